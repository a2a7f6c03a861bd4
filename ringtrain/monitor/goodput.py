"""Where the time of a run went, over all of its starts: parts that add up to the clock, from rank 0's journal.

Each event of rank 0 has its total seconds in each phase (`PhaseTracker.spent`). What lies between two events of a
process is divided as these totals have grown. The time between two processes is a restart.
"""

from __future__ import annotations

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
    "start": "starts, up to the first step",
    "restore": "reading a checkpoint back",
    "resize": "changes of ranks, up to the first step",
    "restart": "restarts, from an attempt's last entry to the next process",
    "away": "between two launches",
}
"""parts of a run's time, with their names for readers"""
OF_PHASES = {"step": "steps", "reduce": "steps"}
"""parts of phases that have other names; `reduce` here is waiting for other ranks outside of a step"""
STOPPED = ("end",)


@dataclass
class Attempt:
    """One start of a run.

    Attributes:
        begun_s: Unix time at which rank 0's process began.
        last_s: Unix time of its last entry.
        hosts: Number of hosts of its ranks.
        has_ended: Whether it ended by itself: complete, or stopped by a signal or a limit.
        num_saves: Number of checkpoints.
        restore_s: Seconds of reading a checkpoint back; 0.0 if it began without one.
        first_step, last_step: Global step after which `steps_s` is counted, and the last one known.
        steps_s: Seconds of the steps in between.
    """

    begun_s: float
    last_s: float = 0.0
    hosts: int = 1
    has_ended: bool = False
    num_saves: int = 0
    restore_s: float = 0.0
    first_step: int = 0
    last_step: int = 0
    steps_s: float = 0.0


@dataclass
class Goodput:
    """Time of a run.

    Attributes:
        seconds: By part; see PARTS. They add up to the time from the launch, else from the first process, to the last
            entry.
        attempts: In order.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Fraction of the time in steps that count, with the exchange of gradients, without waiting for data."""
        return self.seconds["steps"] / self.total_s if self.total_s else 0.0

    @property
    def host_hours(self) -> float:
        """Hours of all hosts during the attempts."""
        return sum(attempt.hosts * (attempt.last_s - attempt.begun_s) for attempt in self.attempts) / 3600

    @property
    def best_interval_s(self) -> float:
        """Seconds between two checkpoints that would have cost least.

        0.0 if no attempt has failed, or no checkpoint made training wait.
        """
        num_saves = sum(attempt.num_saves for attempt in self.attempts)
        num_failures = sum(not attempt.has_ended for attempt in self.attempts[:-1])
        if not num_saves or not num_failures:
            return 0.0
        trained_s = self.total_s - self.seconds["away"]
        return cheapest_interval_s(self.seconds["save"] / num_saves, trained_s / num_failures)


def cheapest_interval_s(save_s: float, per_failure_s: float) -> float:
    """Seconds between two checkpoints that cost least, by Young 1974: sqrt(2 x cost of one x time per failure)."""
    return math.sqrt(2 * save_s * per_failure_s)


def of(events: Iterable[Event]) -> Goodput | None:
    """Returns where the time of a run went, by all of its journals' events in order of time; None if none tells.

    Example:
        >>> goodput.of(journal.read(Path("runs/digits"))).share
        0.83
    """
    reader = Reader()
    for event in events:
        if event.get("rank") == 0 and isinstance(event.get("spent_s"), dict):
            reader.read(event)
    return reader.result if reader.result.attempts else None


class Reader:
    """Adds rank 0's events one after another."""

    def __init__(self) -> None:
        self.result = Goodput()
        self.process: tuple[Any, Any] = (None, None)
        self.spent: Mapping[str, float] = {}
        """totals of the process at its last event"""
        self.has_begun = False
        """whether the first step since the last start or change of ranks is done"""

    def read(self, event: Event) -> None:
        """Adds the time up to an event."""
        if event["event"] == "start":
            self._begin(event)
            return
        if not self.result.attempts:
            return  # of a run whose beginning is missing
        attempt, process = self.attempt, (event.get("host"), event.get("process"))
        seconds = max(0.0, event["time_s"] - attempt.last_s)
        spent = _numbers(event["spent_s"])
        if event["event"] == "resize":
            self._go_back_to(event)
            self.has_begun = False
        if process != self.process or not self.has_begun:
            self._add({self.waiting: 1.0}, seconds)
        else:
            grown = {phase: max(0.0, total - self.spent.get(phase, 0.0)) for phase, total in spent.items()}
            self._add(_in_parts(grown, _numbers(event.get("of_steps_s"))), seconds)
        self.process, self.spent = process, spent
        attempt.last_s = max(attempt.last_s, event["time_s"])
        step = event.get("global_step")
        if event["event"] == "training":
            self.has_begun = True
            attempt.first_step, attempt.steps_s = step or 0, 0.0
        if isinstance(step, int):
            attempt.last_step = max(attempt.last_step, step)
        attempt.num_saves += event["event"] == "save"
        if event["event"] != "signal":  # one may come when all is written
            attempt.has_ended = event["event"] in STOPPED

    @property
    def attempt(self) -> Attempt:
        return self.result.attempts[-1]

    @property
    def waiting(self) -> str:
        """Part of the time before the first step."""
        return "start" if not self.attempt.first_step else "resize"

    def _begin(self, event: Event) -> None:
        """Adds the time from the last attempt to the first event of the next one."""
        begun_s = _number(event.get("begun_s")) or event["time_s"]
        launched_s = _number(event.get("launched_s"))
        is_restart = bool(event.get("run_start"))
        if self.result.attempts:
            last_s = self.attempt.last_s
            if not launched_s and not is_restart:
                launched_s = begun_s
            # A launch may have lost attempts that have no entry.
            launched_s = min(max(launched_s, last_s), max(begun_s, last_s))
            begun_s = max(begun_s, last_s)
            self.result.seconds["away"] += launched_s - last_s
            self._go_back_to(event)
        else:
            launched_s = min(launched_s or begun_s, begun_s)
        self.result.seconds["restart" if is_restart else "start"] += begun_s - launched_s
        num_hosts = 1
        hosts = event.get("hosts")
        if isinstance(hosts, list) and hosts:
            num_hosts = len(set(map(str, hosts)))
        step = event.get("global_step") or 0
        self.result.attempts.append(Attempt(begun_s, begun_s, num_hosts, last_step=step))
        seconds = max(0.0, event["time_s"] - begun_s)
        restore_s = 0.0
        if event.get("resumed_from"):
            restore_s = min(seconds, _number(event.get("restore_s")))
        self.attempt.restore_s = restore_s
        self.result.seconds["restore"] += restore_s
        self.result.seconds["start"] += seconds - restore_s
        self.attempt.last_s = max(begun_s, event["time_s"])
        self.process = event.get("host"), event.get("process")
        self.spent = _numbers(event["spent_s"])
        self.has_begun = False

    def _go_back_to(self, event: Event) -> None:
        """Counts the steps of all attempts after that of an event, from which the run goes on, as made again."""
        step = event.get("global_step") or 0
        for attempt in self.result.attempts:
            num_steps = attempt.last_step - attempt.first_step
            num_repeated = min(num_steps, attempt.last_step - step)
            if num_repeated > 0:
                seconds = min(attempt.steps_s * num_repeated / num_steps, self.result.seconds["steps"])
                self.result.seconds["steps"] -= seconds
                self.result.seconds["repeated"] += seconds
                attempt.steps_s -= seconds
            attempt.last_step = min(attempt.last_step, step)

    def _add(self, weights: Mapping[str, float], seconds: float) -> None:
        """Divides seconds by weights; they are those of the clock, which the process's own may differ from."""
        total = sum(weights.values())
        for part, weight in weights.items():
            share_s = seconds * weight / total if total else 0.0
            self.result.seconds[part] += share_s
            if part == "steps":
                self.attempt.steps_s += share_s
        if not total:
            self.result.seconds["callbacks"] += seconds


def _in_parts(grown: Mapping[str, float], of_steps: Mapping[str, float]) -> dict[str, float]:
    """Seconds in phases as seconds in parts."""
    parts: dict[str, float] = {}
    for phase, seconds in grown.items():
        part = OF_PHASES.get(phase, phase)
        if part not in PARTS:
            part = "steps"  # a phase with a name of its own, such as a wait for gradients of a worker
        parts[part] = parts.get(part, 0.0) + seconds
    measured_s = sum(of_steps.values())
    if measured_s:
        waited_s = grown.get("step", 0.0) * of_steps.get("input", 0.0) / measured_s
        parts["input"] = waited_s
        parts["steps"] = parts.get("steps", 0.0) - waited_s
    return parts


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return max(0.0, float(value)) if is_number else 0.0


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {str(name): _number(value) for name, value in values.items()}
