"""Candidates of ringtrain tune, their order and the decision which to keep; measuring is in measure.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.config import Config, with_values
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.lab import stats
from ringtrain.protocol.env import YIELDING

LEVERS = ("controller", "yielding", "threads", "groups", "update", "fusion", "hierarchical", "compression")
WITHIN_A_START = ("hvd.groups", "hvd.compression", "hvd.local_steps", "optimizer.jit")
FEWER_BYTES = ({"hvd.compression": "fp16"}, {"hvd.compression": "powersgd:4"}, {"hvd.local_steps": 8})
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
"""variables with the threads of a script's rank, which TensorFlow reads when it starts"""
FUSED = ("sgd",)
"""optimizers whose update is one kernel without XLA"""
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

    def over(self, other: Choice) -> Choice:
        """Applies these changes on top of another choice."""
        return Choice(
            {**other.options, **self.options}, {**other.environ, **self.environ}, self.launcher or other.launcher
        )

    @property
    def needs_start(self) -> bool:
        """Whether comparing it needs separate starts."""
        return bool(self.launcher or self.environ or set(self.options) - {*WITHIN_A_START})

    def text(self) -> str:
        """Formats as e.g. "hvd.groups=4"."""
        environ = {name: value for name, value in self.environ.items() if name not in THREADS[1:]}
        told = [f"{name}={value}" for name, value in {**self.options, **environ}.items()]
        return " ".join([*([f"--launcher {self.launcher}"] if self.launcher else []), *told]) or "as it was"

    def words(self) -> list[str]:
        """Arguments for ringtrain.train."""
        words = {f"--{name.replace('_', '-')}": value for name, value in self.options.items()}
        return [word if value is True else f"{word}={value}" for word, value in words.items()]


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
    best = max(points, key=lambda point: point["score"], default={})
    return {"fusion_mb": best["tensor_fusion_threshold"], "cycle_time_ms": best["cycle_time_ms"]} if best else {}


class BudgetOver(Exception):
    """The remaining budget is too short for another start."""


def next_lever(
    name: str, facts: Facts, config: Config, launcher: str, allow_compression: bool, is_script: bool = False
) -> Lever:
    """Candidates worth trying for a tuning parameter, one of order()."""
    several_hosts = facts.num_ranks > facts.ranks_per_host
    fixed = config.hvd.deterministic or config.hvd.op == "adasum"
    if name == "controller":
        others = {"mpirun": "horovodrun-gloo", "horovodrun": "horovodrun-gloo", "horovodrun-gloo": "mpirun"}
        other = "" if config.hvd.op == "adasum" else others.get(launcher, "")
        return Lever(name, (Choice(launcher=other),) if other else ())
    if name == "yielding":
        turned = {True: "0", False: "1", None: None}[facts.yields]
        return Lever(name, (Choice(environ={YIELDING: turned}),) if turned else ())
    if name == "threads" and is_script:
        few = {1, facts.threads // facts.ranks_per_host, facts.threads // 2} - {0, facts.threads}
        candidates = tuple(Choice(environ=dict.fromkeys(THREADS, str(n))) for n in sorted(few))
        return Lever(name, candidates if facts.threads else ())
    if name == "threads":
        numbers = {1, facts.threads // 2, facts.threads * 2} - {0, facts.threads}
        return Lever(name, tuple(Choice({"device.threads": n}) for n in sorted(numbers)) if facts.threads else ())
    if name == "groups":
        numbers = {n for n in (1, 2, 4, 8) if n < facts.num_gradients} - {config.hvd.groups}
        choices = tuple(Choice({"hvd.groups": n}) for n in sorted(numbers) if _is_valid(config, {"hvd.groups": n}))
        return Lever(name, () if fixed else choices)
    if name == "update":
        is_fused = config.optimizer.name.lower() in FUSED
        useful = not is_fused and not config.optimizer.jit and config.strategy.name == "ring"
        return Lever(name, (Choice({"optimizer.jit": True}),) if useful else ())
    if name == "fusion":
        smaller = () if fixed or config.hvd.fusion_mb == 1 else (Choice({"hvd.fusion_mb": 1.0}),)
        return Lever(name, (*smaller, Choice({"hvd.cycle_time_ms": 5.0})), autotuned=not config.hvd.deterministic)
    if name == "hierarchical":
        # Horovod 0.28.1 has it for NCCL only: its CPU operations never read the setting.
        useful = facts.nccl and not facts.threads and several_hosts and facts.ranks_per_host > 1
        return Lever(name, (Choice(environ={HIERARCHICAL: "1"}),) if useful else ())
    if name == "compression":
        tried = config.hvd.compression == "none" and config.hvd.local_steps == 1
        choices = tuple(Choice(options) for options in FEWER_BYTES if tried and _is_valid(config, options))
        return Lever(name, choices, keep=allow_compression)
    raise KeyError(name)


def _is_valid(config: Config, options: Mapping[str, Any]) -> bool:
    try:
        with_values(config, options)
    except ConfigError:
        return False
    return True


def order(facts: Facts, allow_compression: bool) -> list[str]:
    """Tuning parameters, the largest expected gain first: bytes matter between hosts, cores on one host."""
    if facts.num_ranks > facts.ranks_per_host:
        names = ["controller", "hierarchical", "groups", "fusion", "threads", "update", "yielding"]
    else:
        names = ["groups", "update", "threads", "controller", "fusion", "yielding"]
    first = allow_compression and facts.num_ranks > facts.ranks_per_host
    return ["compression", *names] if first else [*names, "compression"]


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
            ratios = [[b / a for a, b in zip(own_s, other, strict=True)] for other in others]
    except BudgetOver:
        pass  # the measurements so far count
    except LaunchError as error:
        failed |= dict.fromkeys(range(len(candidates)), f"failed: {error}")
    better = [number for number, found in enumerate(ratios) if number not in failed and is_better(found)]
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
