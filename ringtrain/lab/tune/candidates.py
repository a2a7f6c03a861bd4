"""What tune tries, in which order, and which of it is kept: everything but the measuring itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringtrain.config import Config
from ringtrain.errors import LaunchError
from ringtrain.lab import stats

LEVERS = ("controller", "yielding", "threads", "groups", "fusion", "hierarchical", "compression")
WITHIN_A_START = ("hvd.groups", "hvd.compression")
YIELDING = "OMPI_MCA_mpi_yield_when_idle"
HIERARCHICAL = "HOROVOD_HIERARCHICAL_ALLREDUCE"
OWN_TURNS = 3  # where each measurement is a start of its own
TURNS_WITHIN = 5
SMALLEST_GAIN = 1.02
UNDECIDED = "not decided: the time is up"


@dataclass(frozen=True)
class Choice:
    """A way to train: what is changed of the command line."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """of ringtrain.train, by dotted name"""
    environ: Mapping[str, str] = field(default_factory=dict)
    """of the ranks"""
    launcher: str = ""
    """of ringtrain launch; empty: the command line's"""

    def over(self, other: Choice) -> Choice:
        """This one's changes on top of another's."""
        return Choice(
            {**other.options, **self.options}, {**other.environ, **self.environ}, self.launcher or other.launcher
        )

    @property
    def needs_start(self) -> bool:
        """Whether it cannot be compared with another within one start."""
        return bool(self.launcher or self.environ or set(self.options) - {*WITHIN_A_START})

    def text(self) -> str:
        """E.g. "hvd.groups=4"."""
        told = [f"{name}={value}" for name, value in {**self.options, **self.environ}.items()]
        return " ".join([*([f"--launcher {self.launcher}"] if self.launcher else []), *told]) or "as it was"

    def words(self) -> list[str]:
        """Of ringtrain.train's command line."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]


@dataclass(frozen=True)
class Facts:
    """What decides which settings are worth trying; the first start tells."""

    num_ranks: int
    ranks_per_host: int
    num_gradients: int
    threads: int
    """of a rank; 0: it computes on a GPU"""
    nccl: bool
    yields: bool | None
    """whether Open MPI's waiting ranks give their cores away; None: it is not Open MPI that they talk over"""


@dataclass(frozen=True)
class Lever:
    """One thing that can be set in several ways."""

    name: str
    candidates: tuple[Choice, ...]
    keep: bool = True
    """False: measured, and never kept"""
    autotuned: bool = False
    """Horovod's autotuner gives another candidate"""


@dataclass(frozen=True)
class Outcome:
    """What a candidate did."""

    lever: str
    choice: Choice
    ratios: tuple[float, ...]
    """images/s over those of the best so far, per turn"""
    verdict: str
    """kept, or why not"""


class BudgetOver(Exception):
    """There is no time for another start."""


def next_lever(name: str, facts: Facts, config: Config, launcher: str, allow_compression: bool) -> Lever:
    """What is worth trying of a lever.

    Args:
        name: one of order().
    """
    several_hosts = facts.num_ranks > facts.ranks_per_host
    fixed = config.hvd.deterministic or config.hvd.op == "adasum"
    if name == "controller":
        others = {"mpirun": "horovodrun-gloo", "horovodrun": "horovodrun-gloo", "horovodrun-gloo": "mpirun"}
        other = "" if config.hvd.op == "adasum" else others.get(launcher, "")
        return Lever(name, (Choice(launcher=other),) if other else ())
    if name == "yielding":
        turned = {True: "0", False: "1", None: None}[facts.yields]
        return Lever(name, (Choice(environ={YIELDING: turned}),) if turned else ())
    if name == "threads":
        numbers = {1, facts.threads // 2, facts.threads * 2} - {0, facts.threads}
        return Lever(name, tuple(Choice({"device.threads": n}) for n in sorted(numbers)) if facts.threads else ())
    if name == "groups":
        numbers = {n for n in (1, 2, 4, 8) if n < facts.num_gradients} - {config.hvd.groups}
        return Lever(name, () if fixed else tuple(Choice({"hvd.groups": n}) for n in sorted(numbers)))
    if name == "fusion":
        smaller = () if fixed or config.hvd.fusion_mb == 1 else (Choice({"hvd.fusion_mb": 1.0}),)
        return Lever(name, (*smaller, Choice({"hvd.cycle_time_ms": 5.0})), autotuned=not config.hvd.deterministic)
    if name == "hierarchical":
        # Horovod 0.28.1 has it for NCCL only: its CPU operations never ask for the setting.
        useful = facts.nccl and not facts.threads and several_hosts and facts.ranks_per_host > 1
        return Lever(name, (Choice(environ={HIERARCHICAL: "1"}),) if useful else ())
    if name == "compression":
        tried = config.hvd.compression == "none"
        return Lever(name, (Choice({"hvd.compression": "fp16"}),) if tried else (), keep=allow_compression)
    raise KeyError(name)


def order(facts: Facts, allow_compression: bool) -> list[str]:
    """Levers, from the one that mostly gains most; what is only measured comes last.

    Args:
        facts: between hosts the bytes decide, on one host the cores.
    """
    if facts.num_ranks > facts.ranks_per_host:
        names = ["controller", "hierarchical", "groups", "fusion", "threads", "yielding"]
    else:
        names = ["groups", "threads", "controller", "fusion", "yielding"]
    first = allow_compression and facts.num_ranks > facts.ranks_per_host
    return ["compression", *names] if first else [*names, "compression"]


def is_better(ratios: Sequence[float]) -> bool:
    """Whether a candidate is faster without doubt: in the median by 2 %, and not slower in hardly any turn (p10).

    Args:
        ratios: images/s over those of the best so far, per turn; of two turns or fewer nothing can be said.
    """
    if len(ratios) < OWN_TURNS:
        return False
    spread = stats.Spread.of(ratios)
    return spread.median >= SMALLEST_GAIN and spread.p10 > 1


Run = Callable[[Choice, Sequence[Choice], int], list[list[float]]]
"""images/s in one start, per variant and turn: what the start itself is like, its variants, turns"""


def compare(lever: Lever, best: Choice, run: Run) -> list[Outcome]:
    """Measures a lever's candidates against the best so far.

    Args:
        lever: with one candidate or more.

    Returns:
        An outcome per candidate; at most one of them is kept.
    """
    candidates = list(lever.candidates)
    ratios: list[list[float]] = [[] for _ in candidates]
    failed: dict[int, str] = {}
    try:
        if any(choice.needs_start for choice in candidates):
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
        pass  # what was measured before counts
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
