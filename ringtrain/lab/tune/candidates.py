"""Candidates of ringtrain tune, their order and the decision which to keep; measuring is in measure.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.config import Config, changed_options, with_values
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.lab import stats
from ringtrain.protocol.cores import THREADS
from ringtrain.protocol.env import YIELDING

LEVERS = (
    "ranks",
    "controller",
    "yielding",
    "threads",
    "groups",
    "update",
    "passes",
    "fusion",
    "hierarchical",
    "compression",
)
WITHIN_A_START = ("hvd.groups", "hvd.compression", "hvd.local_steps", "optimizer.jit", "train.jit")
FEWER_BYTES = ({"hvd.compression": "fp16"}, {"hvd.compression": "powersgd:4"}, {"hvd.local_steps": 8})
OF_RANKS = ("hvd.op", "hvd.local_steps", "train.virtual_ranks")
"""options with which fewer ranks train by another algorithm, or have batches of another kind"""
FUSED = ("sgd",)
"""optimizers whose update is one kernel without XLA"""
OF_ONE_RANK = ("threads", "update", "passes")
"""levers of a job with one rank, which sends no gradients"""
HIERARCHICAL = "HOROVOD_HIERARCHICAL_ALLREDUCE"
OWN_TURNS = 3  # where each measurement is a separate start
TURNS_WITHIN = 5
SMALLEST_GAIN = 1.02
AUTOTUNE = {  # Horovod's own samples ten steps five times over for each point: a trial would take minutes
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "8",
}
UNDECIDED = "not decided: the time is up"


@dataclass(frozen=True)
class Choice:
    """Changes to the command line of a training."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """of ringtrain.train, by dotted name"""
    environ: Mapping[str, str] = field(default_factory=dict)
    """environment variables of the ranks"""
    launcher: str = ""
    """of ringtrain launch; "": from the command line"""
    ranks: int = 0
    """number of them; 0: from the command line"""

    def over(self, other: Choice) -> Choice:
        """Applies these changes on top of another choice."""
        return Choice(
            {**other.options, **self.options},
            {**other.environ, **self.environ},
            self.launcher or other.launcher,
            self.ranks or other.ranks,
        )

    @property
    def needs_start(self) -> bool:
        """Whether comparing it needs separate starts."""
        return bool(self.ranks or self.launcher or self.environ or set(self.options) - {*WITHIN_A_START})

    def text(self) -> str:
        """Formats as e.g. "hvd.groups=4"."""
        environ = {name: value for name, value in self.environ.items() if name not in THREADS[1:]}
        told = [f"{name}={value}" for name, value in {**self.options, **environ}.items()]
        return " ".join([*self.launch_words(), *told]) or "as it was"

    def launch_words(self) -> list[str]:
        """Arguments for ringtrain launch."""
        words = []
        if self.ranks:
            words += ["-np", str(self.ranks)]
        if self.launcher:
            words += ["--launcher", self.launcher]
        return words

    def words(self) -> list[str]:
        """Arguments for ringtrain.train."""
        words = []
        for name, value in self.options.items():
            word = f"--{name.replace('_', '-')}"
            words.append(word if value is True else f"{word}={value}")
        return words


@dataclass(frozen=True)
class Facts:
    """Facts of the first start that decide which settings are worth trying."""

    num_ranks: int
    ranks_per_host: int
    num_gradients: int
    threads: int
    """of a rank; 0: it computes on a GPU"""
    nccl: bool
    yields: bool | None
    """whether waiting ranks of Open MPI yield their cores; None: not Open MPI"""

    @property
    def has_several_hosts(self) -> bool:
        return self.num_ranks > self.ranks_per_host


@dataclass(frozen=True)
class Lever:
    """Tuning parameter and its candidates."""

    name: str
    candidates: tuple[Choice, ...]
    keep: bool = True
    """False: measured only"""
    autotuned: bool = False
    """whether Horovod's autotuner provides another candidate"""


@dataclass(frozen=True)
class Outcome:
    """Result of a candidate."""

    lever: str
    choice: Choice
    ratios: tuple[float, ...]
    """images/s relative to the best so far, per round"""
    verdict: str
    """"kept", or the reason it was not"""


@dataclass(frozen=True)
class Trial:
    """One start of ranks."""

    variants: Sequence[Sequence[str]]
    """arguments for ringtrain.train of each, measured alternately"""
    limit_s: int
    """after which the ranks are killed"""
    turns: int = 1
    block_s: float = 2.0
    autotune_s: float = 0.0
    """seconds for Horovod's autotuner instead"""


def best_point(log: Path) -> dict[str, float]:
    """Fusion and cycle time with which Horovod's autotuner was fastest, by the log that it has written; or empty."""
    points: list[dict[str, float]] = []
    if log.exists():
        head, *rows = [line.split(",") for line in log.read_text(encoding="utf-8").splitlines()]
        points = [dict(zip(head, map(float, row), strict=True)) for row in rows]
    if not points:
        return {}
    best = max(points, key=lambda point: point["score"])
    return {"fusion_mb": best["tensor_fusion_threshold"], "cycle_time_ms": best["cycle_time_ms"]}


class BudgetOver(Exception):
    """The remaining budget is too short for another start."""


def next_lever(
    name: str, facts: Facts, config: Config, launcher: str, allow_compression: bool, is_script: bool = False
) -> Lever:
    """Candidates worth trying for a tuning parameter, one of order()."""
    if facts.num_ranks == 1 and name not in OF_ONE_RANK:
        return Lever(name, ())
    if name == "ranks":
        return Lever(name, _fewer_ranks(facts, config, is_script))
    if name == "controller":
        return Lever(name, _other_launcher(config, launcher))
    if name == "yielding":
        return Lever(name, _other_yielding(facts))
    if name == "threads":
        return Lever(name, _other_threads(facts, is_script))
    if name == "groups":
        return Lever(name, _groups(facts, config))
    if name == "update":
        return Lever(name, _compiled_update(config))
    if name == "passes":
        return Lever(name, _compiled_passes(config))
    if name == "fusion":
        return Lever(name, _fusion(config), autotuned=not config.hvd.deterministic)
    if name == "hierarchical":
        return Lever(name, _hierarchical(facts))
    if name == "compression":
        return Lever(name, _fewer_bytes(config), keep=allow_compression)
    raise KeyError(name)


def _fewer_ranks(facts: Facts, config: Config, is_script: bool) -> tuple[Choice, ...]:
    if not facts.threads or facts.has_several_hosts or config.strategy.name != "ring":
        return ()
    changed = changed_options(config)
    if any(option in changed for option in OF_RANKS):
        return ()
    choices = []
    for number in sorted({1, facts.num_ranks // 2}):
        if number < facts.num_ranks and facts.num_ranks % number == 0:
            choices.append(_on_ranks(number, facts.num_ranks, config, is_script))
    return tuple(choices)


def _other_launcher(config: Config, launcher: str) -> tuple[Choice, ...]:
    others = {"mpirun": "horovodrun-gloo", "horovodrun": "horovodrun-gloo", "horovodrun-gloo": "mpirun"}
    if config.hvd.op == "adasum" or launcher not in others:
        return ()
    return (Choice(launcher=others[launcher]),)


def _other_yielding(facts: Facts) -> tuple[Choice, ...]:
    if facts.yields is None:
        return ()
    turned = "0" if facts.yields else "1"
    return (Choice(environ={YIELDING: turned}),)


def _other_threads(facts: Facts, is_script: bool) -> tuple[Choice, ...]:
    if not facts.threads:
        return ()
    counts = {1, facts.threads // 2, facts.threads * 2} - {0, facts.threads}
    if is_script:
        return tuple(Choice(environ=dict.fromkeys(THREADS, str(n))) for n in sorted(counts))
    return tuple(Choice({"device.threads": n}) for n in sorted(counts))


def _groups(facts: Facts, config: Config) -> tuple[Choice, ...]:
    if _is_fixed(config):
        return ()
    choices = []
    for number in (1, 2, 4, 8):
        options = {"hvd.groups": number}
        is_other = number < facts.num_gradients and number != config.hvd.groups
        if is_other and _is_valid(config, options):
            choices.append(Choice(options))
    return tuple(choices)


def _compiled_update(config: Config) -> tuple[Choice, ...]:
    is_fused = config.optimizer.name.lower() in FUSED
    if is_fused or config.optimizer.jit or config.strategy.name != "ring":
        return ()
    return (Choice({"optimizer.jit": True}),)


def _compiled_passes(config: Config) -> tuple[Choice, ...]:
    options = {"train.jit": True}
    if config.train.jit or config.strategy.name != "ring" or not _is_valid(config, options):
        return ()
    return (Choice(options),)


def _fusion(config: Config) -> tuple[Choice, ...]:
    slower_cycle = Choice({"hvd.cycle_time_ms": 5.0})
    if _is_fixed(config) or config.hvd.fusion_mb == 1:
        return (slower_cycle,)
    return (Choice({"hvd.fusion_mb": 1.0}), slower_cycle)


def _hierarchical(facts: Facts) -> tuple[Choice, ...]:
    # Horovod 0.28.1 has it for NCCL only: its CPU operations never read the setting.
    if facts.nccl and not facts.threads and facts.has_several_hosts and facts.ranks_per_host > 1:
        return (Choice(environ={HIERARCHICAL: "1"}),)
    return ()


def _fewer_bytes(config: Config) -> tuple[Choice, ...]:
    if config.hvd.compression != "none" or config.hvd.local_steps != 1:
        return ()
    return tuple(Choice(options) for options in FEWER_BYTES if _is_valid(config, options))


def _is_fixed(config: Config) -> bool:
    """True if the sums would depend on how gradients are grouped."""
    return config.hvd.deterministic or config.hvd.op == "adasum"


def _on_ranks(number: int, before: int, config: Config, is_script: bool) -> Choice:
    """Fewer ranks with the same batch, and together with the same number of threads."""
    options = {}
    if config.device.threads:
        options["device.threads"] = config.device.threads * before // number
    if not is_script:  # whose batch is that of all ranks
        options["train.batch_size"] = config.train.batch_size * before // number
    return Choice(options, ranks=number)


def _is_valid(config: Config, options: Mapping[str, Any]) -> bool:
    try:
        with_values(config, options)
    except ConfigError:
        return False
    return True


def order(facts: Facts, allow_compression: bool) -> list[str]:
    """Tuning parameters, the largest expected gain first: bytes matter between hosts, cores on one host."""
    if facts.has_several_hosts:
        names = ["controller", "hierarchical", "groups", "fusion", "threads", "update", "passes", "yielding"]
    else:
        names = ["ranks", "groups", "update", "passes", "threads", "controller", "fusion", "yielding"]
    if allow_compression and facts.has_several_hosts:
        return ["compression", *names]
    return [*names, "compression"]


def is_better(ratios: Sequence[float]) -> bool:
    """Whether a candidate is 2 % faster in the median and faster at p10; False with fewer than three rounds."""
    if len(ratios) < OWN_TURNS:
        return False
    spread = stats.Spread.of(ratios)
    return spread.median >= SMALLEST_GAIN and spread.p10 > 1


Run = Callable[[Choice, Sequence[Choice], int], list[list[float]]]
"""images/s of one start per variant and round, from the choice for the start, its variants and the rounds"""


def compare(lever: Lever, best: Choice, run: Run, needs_starts: bool = False) -> list[Outcome]:
    """Measures the candidates of a tuning parameter against the best so far; keeps at most one.

    Args:
        needs_starts: Every measurement is a start of its own.
    """
    candidates = list(lever.candidates)
    ratios: list[list[float]] = [[] for _ in candidates]
    failed: dict[int, str] = {}
    try:
        if needs_starts or any(choice.needs_start for choice in candidates):
            alive = list(range(len(candidates)))
            for turn in range(OWN_TURNS):
                if not alive:
                    break
                ((own,),) = run(best, [Choice()], 1)
                for number in list(alive):
                    try:
                        ((other,),) = run(candidates[number].over(best), [Choice()], 1)
                    except LaunchError as error:
                        failed[number] = f"failed: {error}"
                        alive.remove(number)
                        continue
                    ratios[number].append(other / own)
                    if turn and max(ratios[number]) < 1:  # slower twice: not worth a third start
                        alive.remove(number)
        else:
            variants = [Choice(), *candidates]
            try:
                own_s, *others = run(best, variants, TURNS_WITHIN)
            except BudgetOver:
                own_s, *others = run(best, variants, OWN_TURNS)
            ratios = []
            for other_s in others:
                ratios.append([b / a for a, b in zip(own_s, other_s, strict=True)])
    except BudgetOver:
        pass  # the measurements so far count
    except LaunchError as error:
        failed |= dict.fromkeys(range(len(candidates)), f"failed: {error}")
    better = _better(ratios, failed)
    winner = max(better, key=lambda number: stats.Spread.of(ratios[number]).median, default=-1)
    outcomes = []
    for number, (choice, found) in enumerate(zip(candidates, ratios, strict=True)):
        verdict = "another is better" if number in better else "gain not certain"
        if number == winner:
            verdict = "kept" if lever.keep else "not kept: it changes numbers; --allow-compression keeps it"
        if len(found) < OWN_TURNS and not (len(found) > 1 and max(found) < 1):
            verdict = UNDECIDED
        outcomes.append(Outcome(lever.name, choice, tuple(found), failed.get(number, verdict)))
    return outcomes


def _better(ratios: Sequence[Sequence[float]], failed: Collection[int]) -> list[int]:
    """Numbers of the candidates that are certainly faster."""
    found = []
    for number, of_candidate in enumerate(ratios):
        if number not in failed and is_better(of_candidate):
            found.append(number)
    return found
