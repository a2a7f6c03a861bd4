"""Who keeps the others waiting, and who is slow: decided from what every rank says of itself.

Pure functions, the standard library only.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SILENT_S = 3.0
"""without a beat, of which there is one each second"""
FIRST_STEPS_S = 120.0
"""the least that the first two steps may take, in which graphs are made"""
MIN_WARNING_S = 10.0
TIMES_MEDIAN = 20
WINDOW_STEPS = 50
MIN_LAG_S = 0.002
"""per step; who is slower by less is not worth a word"""
MIN_LOST_S = 5.0
"""that a slow rank has cost the job without a pause: other work on a machine makes any rank slow for a moment"""
ORDER = ("start", "callbacks", "save", "evaluate", "input", "compute", "update")
STATES = {
    "": "its process has ended",
    "T": "its process is stopped (SIGSTOP, or a scheduler's suspend)",
    "t": "its process is held by a debugger",
    "D": "its process waits for a disk or a file server",
    "Z": "its process has ended",
}
PARTS = ("input", "compute", "callbacks")


@dataclass(frozen=True)
class Times:
    """Seconds of a step, each the median over a window of steps, or a total."""

    step_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    callbacks_s: float = 0.0
    wait_s: float = 0.0
    """for the other ranks, in allreduce and other collectives, with the time that these take themselves"""
    own_s: float = 0.0
    """input, compute and callbacks"""
    num_steps: int = 0
    """that it is the median or total of"""

    @classmethod
    def of(cls, steps: Sequence[Sequence[float]], combine: Any = statistics.median) -> Times:
        """Combines steps, each of input_s, compute_s, callbacks_s, wait_s."""
        if not steps:
            return cls()
        input_s, compute_s, callbacks_s, wait_s = (combine(part) for part in zip(*steps, strict=True))
        step_s, own_s = combine([sum(step) for step in steps]), combine([sum(step[:3]) for step in steps])
        return cls(step_s, input_s, compute_s, callbacks_s, wait_s, own_s, len(steps))


@dataclass(frozen=True)
class Row:
    """What is known of one rank."""

    rank: int
    host: str
    process: int = 0
    slate: int = -1
    step: int = 0
    """global steps done"""
    own_steps: int = 0
    """of them, since this process began"""
    phase: str = "start"
    idle_s: float = 0.0
    """since its last progress"""
    times: Times = Times()
    silent_s: float = 0.0
    """since it was heard of"""
    is_done: bool = False
    """it has left training"""
    stacks: str = ""
    """of its threads, if it was asked"""
    saw: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """silent ranks on its host: by rank, what beats.look_at says"""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        """Reads what dataclasses.asdict made; raises TypeError for something else."""
        return cls(**{**fields, "times": Times(**fields["times"])})

    @property
    def is_silent(self) -> bool:
        """Whether its beats have stopped."""
        return self.silent_s > SILENT_S and not self.is_done


def idle_s(rows: Collection[Row]) -> float:
    """Seconds for which no rank has made progress."""
    return min((row.idle_s + row.silent_s for row in rows if not row.is_done), default=0.0)


def limit_s(rows: Collection[Row], timeout_s: float) -> float:
    """How long no rank may make progress.

    Args:
        timeout_s: as the user has it.
    """
    # What one has done, all have; of a rank that is stopped it may not be known yet.
    if max(row.own_steps for row in rows) < 2:
        return max(timeout_s, FIRST_STEPS_S)
    return max(timeout_s, TIMES_MEDIAN * max(row.times.step_s for row in rows))


def warning_s(rows: Collection[Row], timeout_s: float) -> float:
    """After how long to say that somebody is waited for."""
    half_s = limit_s(rows, timeout_s) / 2
    return min(half_s, max(MIN_WARNING_S, TIMES_MEDIAN * max((row.times.step_s for row in rows), default=0.0)))


def keeping_waiting(rows: Collection[Row]) -> list[Row]:
    """The ranks that the others wait for.

    Args:
        rows: of all ranks, none of which makes progress.

    Returns:
        Those whose beats have stopped; else those that have left; else of those that do not wait themselves the ones
        that have got least far; none if all wait.
    """
    working = [row for row in rows if not row.is_done and row.phase != "reduce"]
    groups = [[row for row in rows if row.is_silent], [row for row in rows if row.is_done]]
    if found := next(filter(None, groups), None):
        return found
    least = min((_progress(row) for row in working), default=None)
    others = min((row.step for row in rows), default=0)
    return [row for row in working if _progress(row) == least and row.step <= others]


def is_located(row: Row, rows: Collection[Row]) -> bool:
    """Whether a rank answers, or another one has seen it."""
    return not row.is_silent or any(str(row.rank) in one.saw for one in rows)


def located(row: Row, rows: Collection[Row]) -> Row:
    """A silent rank's row with what others of its host have seen, and what follows from where the others are."""
    seen: dict[str, Any] = next((dict(one.saw[str(row.rank)]) for one in rows if str(row.rank) in one.saw), {})
    step = max([row.step, *(other.step for other in rows if other.phase == "reduce" and not other.is_silent)])
    return dataclasses.replace(row, step=seen.get("step", step), phase=seen.get("phase", row.phase))


def report(rows: Collection[Row], culprits: Sequence[Row]) -> str:
    """The whole story: who, where, for how long, who waits, and the stack."""
    if not culprits:
        where = "; ".join(f"rank {row.rank} on {row.host} at step {row.step}" for row in sorted(rows, key=_rank)[:8])
        stack = next((f"\n{row.stacks}" for row in sorted(rows, key=_rank) if row.stacks), "")
        return (
            f"no rank has made progress for {idle_s(rows):.0f} s, each waits for the others in a collective: {where}:"
            f" look at the network between the hosts, or for a collective that only some ranks take part in{stack}"
        )
    sentences = [sentence(row, rows) for row in culprits[:3]]
    if len(culprits) > 3:
        sentences.append(f"and {ranks([row.rank for row in culprits[3:]])} likewise")
    stacks = [f"\n{row.stacks}" for row in culprits[:3] if row.stacks]
    return "\n".join(sentences) + waiting(rows, culprits) + "".join(stacks)


def sentence(row: Row, rows: Collection[Row]) -> str:
    """Where a rank that is waited for stands."""
    if row.is_done:
        return f"rank {row.rank} on {row.host} has left training after step {row.step}"
    at = located(row, rows) if row.is_silent else row
    phase = {"step": "input, compute or reduce"}.get(at.phase, at.phase)
    idle_s = row.idle_s + row.silent_s
    said = f"rank {row.rank} on {row.host} has made no progress for {idle_s:.0f} s: at step {at.step}"
    if not row.is_silent:
        return f"{said}, in {phase}"
    seen = next((one.saw[str(row.rank)] for one in rows if str(row.rank) in one.saw), None)
    if seen is None:
        return (
            f"{said}, last heard of in {phase} of step {row.step}; it does not answer: its host, or the network to it,"
            f" may be down, or its process stopped"
        )
    said = f"{said}, in {phase}"
    why = STATES.get(seen["state"], "its process runs, but no Python in it does: look for C code that keeps the lock")
    return f"{said}; it does not answer: {why}"


def waiting(rows: Collection[Row], culprits: Collection[Row]) -> str:
    """E.g. "; ranks 0, 2 wait for it"."""
    names = {row.rank for row in culprits}
    others = [row.rank for row in rows if row.rank not in names and not row.is_done and not row.is_silent]
    if not others:
        return ""
    return f"; {ranks(others)} wait{'s' * (len(others) == 1)} for {'it' if len(names) == 1 else 'them'}"


def ranks(numbers: Collection[int]) -> str:
    """E.g. "ranks 0, 2, 3"; of many, the first."""
    shown = ", ".join(str(number) for number in sorted(numbers)[:8])
    return f"rank{'s' * (len(numbers) > 1)} {shown}{f' and {len(numbers) - 8} more' if len(numbers) > 8 else ''}"


def stragglers(rows: Collection[Row], factor: float) -> list[tuple[Row, str, float]]:
    """Ranks that need longer than the others for their own work.

    Args:
        factor: so many times the median of the others; 0: nobody is slow.

    Returns:
        Each with the part that takes it longest beyond the others, and how many times their time it needs. Nobody
        before all ranks have made 50 steps.
    """
    if not factor or len(rows) < 2 or any(row.times.num_steps < WINDOW_STEPS for row in rows):
        return []
    # Sorted once: there may be thousands of ranks.
    ordered = {part: sorted(_part_s(row, part) for row in rows) for part in ("own", *PARTS)}
    found = []
    for row in rows:
        usual_s = _median_of_others(ordered["own"], row.times.own_s)
        if row.times.own_s > max(factor * usual_s, usual_s + MIN_LAG_S):
            lag = {part: _part_s(row, part) - _median_of_others(ordered[part], _part_s(row, part)) for part in PARTS}
            found.append((row, max(PARTS, key=lambda part: lag[part]), row.times.own_s / max(usual_s, 1e-9)))
    return found


def _part_s(row: Row, part: str) -> float:
    seconds: float = getattr(row.times, f"{part}_s")
    return seconds


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Median of sorted values without one of them."""
    own = bisect.bisect_left(ordered, value)
    middle = len(ordered) - 1
    low, high = (place + (place >= own) for place in ((middle - 1) // 2, middle // 2))
    return (ordered[low] + ordered[high]) / 2


class SlowRanks:
    """Names each straggler once, when it has been one for long enough."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.named: set[int] = set()
        self._since: dict[int, int] = {}

    def look(self, rows: Collection[Row]) -> list[tuple[Row, str, float]]:
        """Returns the stragglers to be named now, as stragglers does."""
        found = stragglers(rows, self.factor)
        self._since = {row.rank: self._since.get(row.rank, row.own_steps - WINDOW_STEPS) for row, _, _ in found}
        due = [
            (row, part, times)
            for row, part, times in found
            if row.rank not in self.named and lost_s(row, times, row.own_steps - self._since[row.rank]) >= MIN_LOST_S
        ]
        self.named |= {row.rank for row, _, _ in due}
        return due


def lost_s(row: Row, times: float, num_steps: int) -> float:
    """Seconds that all ranks have lost to one that needs so many times the others' time for its own part of a step."""
    return num_steps * row.times.own_s * (1 - 1 / times)


def slow_words(row: Row, part: str, times: float) -> str:
    """A line about a straggler."""
    part_s = getattr(row.times, f"{part}_s")
    return (
        f"rank {row.rank} on {row.host} is slow: it needs {times:.1f} times as long for its own part of a step as the"
        f" other ranks ({1000 * row.times.own_s:.1f} ms, of that {part} {1000 * part_s:.1f} ms), and all wait for it"
    )


def _progress(row: Row) -> tuple[int, int]:
    return row.step, ORDER.index(row.phase) if row.phase in ORDER else ORDER.index("input")


def _rank(row: Row) -> int:
    return row.rank
