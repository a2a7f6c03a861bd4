"""Where the time of a run went, over all of its starts: parts that add up to the clock, from rank 0's journal.

Each event of rank 0 has its total seconds in each phase (`PhaseTracker.spent`). The time from the first step of a
start, or of a change of ranks, to its last event is divided as these totals have grown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

PARTS = {
    "steps": "steps that count",
    "input": "waiting for data in these steps",
    "callbacks": "callbacks between steps, and the run's end",
    "evaluate": "evaluation, and a script's own code between epochs",
    "save": "checkpoints, while training waits",
    "repeated": "steps made again after a restart",
    "start": "starts, restarts and changes of ranks, up to the first step",
    "away": "between two launches",
}
"""parts of a run's time, with their names for readers"""


@dataclass
class Attempt:
    """One start of a run, or a change of its ranks. Times are Unix times."""

    is_start: bool
    begun_s: float
    last_s: float
    hosts: int
    has_ended: bool
    """whether it ended by itself: complete, or stopped by a signal or a limit"""
    num_saves: int
    first_step: int
    last_step: int
    steps_s: float
    """seconds of the steps between these two"""


@dataclass
class Goodput:
    """Time of a run."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """by part; together from the launch, else from the first process, to the last entry"""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Fraction of the time in steps that count, with the exchange of gradients, without waiting for data."""
        return self.seconds["steps"] / self.total_s if self.total_s else 0.0

    @property
    def num_starts(self) -> int:
        return sum(attempt.is_start for attempt in self.attempts)

    @property
    def host_hours(self) -> float:
        """Hours of all hosts during the attempts."""
        return sum(attempt.hosts * (attempt.last_s - attempt.begun_s) for attempt in self.attempts) / 3600

    @property
    def best_interval_s(self) -> float:
        """Seconds between saves that would have cost least, by Young 1974; 0.0 without failures, or waits for saves."""
        num_saves = sum(attempt.num_saves for attempt in self.attempts)
        num_failures = 0
        for attempt, following in itertools.pairwise(self.attempts):
            num_failures += following.is_start and not attempt.has_ended
        if not num_saves or not num_failures:
            return 0.0
        trained_s = self.total_s - self.seconds["away"]
        return math.sqrt(2 * self.seconds["save"] / num_saves * trained_s / num_failures)


def of(events: Iterable[Event]) -> Goodput | None:
    """Returns where the time of a run went, by its journals' events in order of time; None if none tells."""
    attempts: list[list[Event]] = []
    for event in events:
        if event.get("rank") != 0 or not isinstance(event.get("spent_s"), Mapping):
            continue
        if event["event"] == "start" or (attempts and event["event"] == "resize"):
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    found = Goodput()
    for of_attempt in attempts:
        _add(found, of_attempt)
    return found if attempts else None


def _add(found: Goodput, events: list[Event]) -> None:
    """Adds the time from the last attempt to the end of the next one, of which these are the events."""
    first, last = events[0], events[-1]
    trained = next((event for event in events if event["event"] == "training"), last)
    begun_s = min(_number(first.get("begun_s")) or first["time_s"], first["time_s"])
    launched_s = _number(first.get("launched_s"))
    if found.attempts:
        before_s = found.attempts[-1].last_s
        if first["event"] == "resize" or first.get("run_start"):
            launched_s = launched_s or before_s
        begun_s = max(before_s, min(launched_s or begun_s, begun_s))
        found.seconds["away"] += begun_s - before_s
        _go_back(found, _step(first))
    else:
        begun_s = min(launched_s or begun_s, begun_s)
    found.seconds["start"] += trained["time_s"] - begun_s

    # From the first step on, by the process's own clock, which may differ.
    seconds, steps_s = last["time_s"] - trained["time_s"], 0.0
    parts = _grown(trained, last)
    total = sum(parts.values())
    for part, weight in parts.items():
        part_s = seconds * weight / total if total else 0.0
        found.seconds[part] += part_s
        if part == "steps":
            steps_s = part_s
    if not total:
        found.seconds["callbacks"] += seconds
    hosts = first.get("hosts")
    found.attempts.append(
        Attempt(
            is_start=first["event"] == "start",
            begun_s=begun_s,
            last_s=last["time_s"],
            hosts=len(set(map(str, hosts))) if isinstance(hosts, list) and hosts else 1,
            has_ended=any(event["event"] == "end" for event in events),
            num_saves=sum(event["event"] == "save" for event in events),
            first_step=_step(trained),
            last_step=max(map(_step, events)),
            steps_s=steps_s,
        )
    )


def _go_back(found: Goodput, step: int) -> None:
    """Counts the steps of all attempts after one, from which the run goes on, as made again."""
    for attempt in found.attempts:
        num_steps = attempt.last_step - attempt.first_step
        num_repeated = min(num_steps, attempt.last_step - step)
        if num_repeated > 0:
            seconds = attempt.steps_s * num_repeated / num_steps
            found.seconds["steps"] -= seconds
            found.seconds["repeated"] += seconds
            attempt.steps_s -= seconds
        attempt.last_step = min(attempt.last_step, step)


def _grown(before: Event, event: Event) -> dict[str, float]:
    """Seconds by which the totals of a process have grown between two events, by part."""
    parts: dict[str, float] = {}
    for phase, total in event["spent_s"].items():
        part = phase if phase in PARTS else "steps"  # a part of a step, or waiting for other ranks outside of one
        grown_s = max(0.0, _number(total) - _number(before["spent_s"].get(phase)))
        parts[part] = parts.get(part, 0.0) + grown_s
    of_steps = event.get("of_steps_s")
    if isinstance(of_steps, Mapping) and parts.get("steps"):
        measured_s = sum(map(_number, of_steps.values()))
        parts["input"] = parts["steps"] * _number(of_steps.get("input")) / measured_s if measured_s else 0.0
        parts["steps"] -= parts["input"]
    return parts


def _step(event: Event) -> int:
    return event.get("global_step") or 0


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return max(0.0, float(value)) if is_number else 0.0
