"""Which rank stalls, for how long and what is reported: found in the heartbeats of all ranks.

Pure, standard library only.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HEARTBEAT_S = 1.0
SILENT_S = 3.0
"""time without a heartbeat after which a rank is silent"""
STACKS_TIMEOUT_S = 3.0
"""time for a blocking rank to send its stacks"""
REPORT_FIRST_S = 5.0
"""delay before the other ranks exit, so that the stall report reaches the launcher first"""
FIRST_STEPS_S = 120.0
"""minimum stall timeout of the first two steps, which build graphs"""
MIN_WARNING_S = 10.0
"""time without progress before a warning, unless half of the stall timeout is shorter"""
TIMES_MEDIAN = 20
"""a stall takes at least as long as this many steps of the slowest rank"""
WINDOW_STEPS = 50
"""steps of a median"""
ORDER = ("start", "callbacks", "save", "evaluate", "input", "compute", "update")
"""phases besides reduce, in their order from one count of a step to the next"""
STATES = {
    "": "its process has exited",
    "T": "its process is stopped (SIGSTOP, or a scheduler's suspend)",
    "t": "its process is held by a debugger",
    "D": "its process waits for a disk or a file server",
    "Z": "its process has exited",
}


@dataclass(frozen=True)
class Times:
    """Durations of a step's parts: medians over a window of steps, or totals."""

    step_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    callbacks_s: float = 0.0
    wait_s: float = 0.0
    """in allreduce and other collectives: waiting for the other ranks, and communication"""
    own_s: float = 0.0
    """input, compute and callbacks"""
    num_steps: int = 0

    @classmethod
    def of(cls, steps: Sequence[Sequence[float]], combine: Any = statistics.median) -> Times:
        """Combines steps of (input_s, compute_s, callbacks_s, wait_s)."""
        if not steps:
            return cls()
        input_s, compute_s, callbacks_s, wait_s = (combine(part) for part in zip(*steps, strict=True))
        step_s = combine([sum(step) for step in steps])
        own_s = combine([sum(step[:3]) for step in steps])
        return cls(step_s, input_s, compute_s, callbacks_s, wait_s, own_s, len(steps))


@dataclass(frozen=True)
class Row:
    """Known state of one rank."""

    rank: int
    host: str
    process: int = 0
    status: int = -1
    """descriptor of its status line"""
    step: int = 0
    """global steps done"""
    own_steps: int = 0
    """global steps of this process"""
    phase: str = "start"
    idle_s: float = 0.0
    """time since its last progress"""
    times: Times = Times()
    silent_s: float = 0.0
    """time since its last heartbeat"""
    is_done: bool = False
    stacks: str = ""
    """stacks of its threads, if requested"""
    saw: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """result of status.look_at for each silent rank of its host, by rank"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "times": vars(self.times)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        """Reads the result of `to_json`; raises TypeError for other fields."""
        return cls(**{**fields, "times": Times(**fields["times"])})

    @property
    def is_silent(self) -> bool:
        return self.silent_s > SILENT_S and not self.is_done

    @property
    def stuck_s(self) -> float:
        """Time since its last progress: until its last heartbeat, and since then."""
        return self.idle_s + self.silent_s


# ---- where the ranks are and what is said about it -----------------------------------------------------------------


def idle_s(rows: Collection[Row]) -> float:
    """Time for which no rank has made progress."""
    return min((row.stuck_s for row in rows if not row.is_done), default=0.0)


def limit_s(rows: Collection[Row], timeout_s: float) -> float:
    """Stall timeout: the user's `timeout_s`, or more for slow or first steps."""
    # All ranks have done as many steps as the most advanced one; that of a stopped rank may not be known yet.
    if max(row.own_steps for row in rows) < 2:
        return max(timeout_s, FIRST_STEPS_S)
    return max(timeout_s, TIMES_MEDIAN * _step_s(rows))


def _step_s(rows: Collection[Row]) -> float:
    """Slowest rank's median step. That of a silent rank lacks the last steps, of which there may be few."""
    return max((row.times.step_s for row in rows if not row.is_silent), default=0.0)


def warning_s(rows: Collection[Row], timeout_s: float) -> float:
    """Time without progress after which a warning names the blocking ranks, at most half of `limit_s`."""
    half_s = limit_s(rows, timeout_s) / 2
    return min(half_s, max(MIN_WARNING_S, TIMES_MEDIAN * _step_s(rows)))


def blocking_ranks(rows: Collection[Row]) -> list[Row]:
    """Blocking ranks, given the rows of all ranks, none of which makes progress; empty if all wait."""
    # Ranks without a heartbeat; if none, those that left training; if none, those outside a collective that are behind.
    silent = [row for row in rows if row.is_silent]
    if silent:
        return silent
    left = [row for row in rows if row.is_done]
    if left:
        return left
    working = [row for row in rows if row.phase != "reduce"]
    if not working:
        return []
    least = min(map(_progress, working))
    first_step = min(row.step for row in rows)  # a rank ahead of one that waits in a collective does not block it
    return [row for row in working if _progress(row) == least and row.step <= first_step]


def is_located(row: Row, rows: Collection[Row]) -> bool:
    """Returns whether a rank sends heartbeats, or another rank has read its state from /proc."""
    return not row.is_silent or bool(_seen(row, rows))


def _seen(row: Row, rows: Collection[Row]) -> Mapping[str, Any]:
    """State of a silent rank as a rank of its host has read it from /proc; {}: none has."""
    return next((other.saw[str(row.rank)] for other in rows if str(row.rank) in other.saw), {})


def located(row: Row, rows: Collection[Row]) -> Row:
    """Row of a silent rank, with step and phase as read by ranks of its host or inferred from the other ranks."""
    seen = _seen(row, rows)
    reducing = [other.step for other in rows if other.phase == "reduce" and not other.is_silent]
    step = max([row.step, *reducing])
    return dataclasses.replace(row, step=seen.get("step", step), phase=seen.get("phase", row.phase))


def report(rows: Collection[Row], blocking: Sequence[Row]) -> str:
    """Stall report: blocking ranks, hosts, idle time, waiting ranks and stacks."""
    if not blocking:
        where = ", ".join(f"rank {row.rank} on {row.host} at step {row.step}" for row in sorted(rows, key=_rank)[:8])
        stack = next((f"\n{row.stacks}" for row in sorted(rows, key=_rank) if row.stacks), "")
        return (
            f"no progress on any rank for {idle_s(rows):.0f} s; all wait in a collective ({where}): check the network"
            f" between the hosts, and look for a collective that only some ranks call{stack}"
        )
    sentences = [sentence(row, rows) for row in blocking[:3]]
    if len(blocking) > 3:
        sentences.append(f"and {ranks([row.rank for row in blocking[3:]])} likewise")
    stacks = [f"\n{row.stacks}" for row in blocking[:3] if row.stacks]
    return "\n".join(sentences) + waiting(rows, blocking) + "".join(stacks)


def sentence(row: Row, rows: Collection[Row]) -> str:
    """Sentence about the position and idle time of a blocking rank."""
    if row.is_done:
        return f"rank {row.rank} on {row.host} has left training after step {row.step}"
    at = located(row, rows) if row.is_silent else row
    phase = {"step": "input, compute or reduce"}.get(at.phase, at.phase)
    text = f"rank {row.rank} on {row.host} has made no progress for {row.stuck_s:.0f} s: at step {at.step}"
    if not row.is_silent:
        return f"{text}, in {phase}"
    seen = _seen(row, rows)
    if not seen:
        return (
            f"{text}, last heartbeat in {phase} of step {row.step}: its host or the network to it may be down, or its"
            f" process stopped"
        )
    text = f"{text}, in {phase}"
    why = STATES.get(
        seen["state"], "its process runs but executes no Python code: look for native code that holds the GIL"
    )
    return f"{text}; no heartbeat: {why}"


def waiting(rows: Collection[Row], blocking: Collection[Row]) -> str:
    """Waiting ranks as in "; ranks 0, 2 wait for it"; "" if there are none."""
    waited_for = {row.rank for row in blocking}
    others = []
    for row in rows:
        is_waiting = not row.is_done and not row.is_silent
        if is_waiting and row.rank not in waited_for:
            others.append(row.rank)
    if not others:
        return ""
    verb = "waits" if len(others) == 1 else "wait"
    pronoun = "it" if len(waited_for) == 1 else "them"
    return f"; {ranks(others)} {verb} for {pronoun}"


def ranks(numbers: Collection[int]) -> str:
    """Ranks as in "ranks 0, 2, 3", the first 8 of many."""
    text = "ranks " if len(numbers) > 1 else "rank "
    text += ", ".join(str(number) for number in sorted(numbers)[:8])
    if len(numbers) > 8:
        text += f" and {len(numbers) - 8} more"
    return text


# ---- when a stall is reported --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Decision after a look at all heartbeats, for all ranks."""

    warning: str = ""
    """to print now; "": nothing"""
    stall: str = ""
    """report with which the job ends; "": it continues"""
    blocking: Sequence[Row] = ()
    """ranks to which the report belongs"""


class Stalls:
    """Rule for stalls: no rank makes progress for the timeout, see `limit_s`; a warning precedes, see `warning_s`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.has_warned = False
        self._asked_s: float | None = None

    def look(self, rows: Collection[Row], now_s: float) -> Finding:
        """Looks at the rows of all ranks that have sent a heartbeat, each second; `now_s` is a steady clock."""
        if idle_s(rows) <= 2 * HEARTBEAT_S:
            self.has_warned, self._asked_s = False, None
        warning = self._warning(rows)
        if self._asked_s is None:
            if idle_s(rows) > limit_s(rows, self.timeout_s):
                self._asked_s = now_s
            return Finding(warning)
        blocking = blocking_ranks(rows)
        asked = blocking or [row for row in rows if row.rank == 0]
        answered = [is_located(row, rows) if row.is_silent else bool(row.stacks) for row in asked]
        if all(answered) or now_s - self._asked_s > STACKS_TIMEOUT_S:
            return Finding(warning, report(rows, blocking), blocking)
        return Finding(warning)

    def asked(self, rows: Collection[Row]) -> list[int] | None:
        """Ranks whose stacks the report needs, besides rank 0's; None: no report is due."""
        if self._asked_s is None:
            return None
        return [row.rank for row in blocking_ranks(rows)]

    def has_lost_rank_0(self, rows: Sequence[Row], rank: int) -> bool:
        """Returns whether this rank ends the job: rank 0, the first row, sends no heartbeat; its own row follows."""
        # Rank 1 reports for all. Without it, each rank reports.
        delay_s = REPORT_FIRST_S if rank > 1 else 0.0
        return rows[0].is_silent and idle_s(rows) > limit_s(rows, self.timeout_s) + delay_s

    def _warning(self, rows: Collection[Row]) -> str:
        """Names the blocking ranks once, as soon as it is known where they are; else after STACKS_TIMEOUT_S."""
        late_s = idle_s(rows) - warning_s(rows, self.timeout_s)
        if self.has_warned or late_s <= 0:
            return ""
        blocking = blocking_ranks(rows)
        waiting_ranks = waiting(rows, blocking)
        if not waiting_ranks:
            return ""
        is_known = all(is_located(row, rows) for row in blocking)
        if not is_known and late_s <= STACKS_TIMEOUT_S:
            return ""
        self.has_warned = True
        return "; ".join(sentence(row, rows) for row in blocking[:3]) + waiting_ranks


def _progress(row: Row) -> tuple[int, int]:
    phase = row.phase if row.phase in ORDER else "input"
    return row.step, ORDER.index(phase)


def _rank(row: Row) -> int:
    return row.rank
