"""Learning rate as a pure function of the global step, so that a resumed run needs no state for it.

The warm-up is gradual, as in Goyal et al. 2017 (arXiv 1706.02677, section 2.2): from the rate before scaling, initial,
to the full rate, peak, by the same amount with every update. With w warm-up steps:

    warm-up      initial + (peak - initial) * step / w                  for steps below w

Then, with t growing from 0 at the end of the warm-up to 1 at the end of the run, and e = end_factor:

    constant     peak
    steps        peak * factor ** (number of milestones passed)         Goyal et al. 2017, section 5.1
    cosine       peak * (e + (1 - e) * (1 + cos(pi * t)) / 2)           Loshchilov & Hutter 2017 (arXiv 1608.03983)
    polynomial   peak * (e + (1 - e) * (1 - t) ** power)                You et al. 2017 (arXiv 1708.03888), with power 2

A step is one batch on every rank, as counted by `optimizer._iterations` in Keras. With accumulated gradients, the
weights change only at every accumulation_steps-th step. All steps of an update have the same rate, so a run that
accumulates k batches has the rates of a run with batches k times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config


@dataclass(frozen=True)
class Schedule:
    """Learning rate over a run, as plain numbers."""

    name: str
    """Key of DECAYS."""
    learning_rate: float
    """Full rate, from the end of the warm-up."""
    initial_learning_rate: float
    """Rate at step 0 of a warm-up."""
    warmup_steps: int
    """First step at the full rate; a multiple of accumulation_steps, as are the other numbers of steps."""
    num_steps: int
    """Steps of the whole run; cosine and polynomial would reach their end one step after the last."""
    accumulation_steps: int = 1
    """Steps per update."""
    milestone_steps: tuple[int, ...] = ()
    """First steps at rates reduced by `factor`."""
    factor: float = 0.1
    end_factor: float = 0.0
    power: float = 1.0

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same rate."""
        flat = self.name == "constant" or (self.name == "steps" and not self.milestone_steps)
        return flat and (not self.warmup_steps or self.initial_learning_rate == self.learning_rate)

    def rate(self, step: Any, ops: Any = np) -> Any:
        """Returns the float64 rate of global steps: a number, array or tensor. `ops`: NumPy, in a graph keras.ops."""
        begun = step // self.accumulation_steps * self.accumulation_steps  # the first step of its update
        warmth = begun / max(1, self.warmup_steps)
        warming = self.initial_learning_rate * (1.0 - warmth) + self.learning_rate * warmth
        passed = (begun - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        decayed = self.learning_rate * DECAYS[self.name](self, begun, ops.clip(passed, 0.0, 1.0), ops)
        return ops.where(begun < self.warmup_steps, warming, decayed)


def _steps(schedule: Schedule, step: Any, passed: Any, ops: Any) -> Any:
    fraction = 1.0 + 0.0 * passed
    for milestone in schedule.milestone_steps:
        fraction = ops.where(step >= milestone, fraction * schedule.factor, fraction)
    return fraction


def _down_to(end: float, fraction: Any) -> Any:
    return fraction + end * (1.0 - fraction)


# Fraction of the full rate, given the fraction (0 to 1) of the steps after the warm-up that have passed.
DECAYS: dict[str, Callable[[Schedule, Any, Any, Any], Any]] = {
    "constant": lambda schedule, step, passed, ops: 1.0 + 0.0 * passed,
    "steps": _steps,
    "cosine": lambda schedule, step, passed, ops: _down_to(
        schedule.end_factor, (1.0 + ops.cos(math.pi * passed)) / 2.0
    ),
    "polynomial": lambda schedule, step, passed, ops: _down_to(
        schedule.end_factor, ops.power(1.0 - passed, schedule.power)
    ),
}


def schedule_of(config: Config, numbers: Numbers) -> Schedule:
    """Returns the configured schedule: the fields of `Schedule` are named as in `Numbers` and in the configuration."""
    values = {**vars(numbers), **vars(config.schedule)}
    return Schedule(**{field.name: values[field.name] for field in fields(Schedule)})


def corners(schedule: Schedule) -> list[tuple[int, str]]:
    """Returns the breakpoints of a schedule, in ascending order, each with a label. A step may occur twice."""
    last = schedule.num_steps - 1
    named = [(0, "first step")]
    if schedule.warmup_steps:
        named.append((schedule.warmup_steps, "after the warm-up"))
    if schedule.name == "steps":
        named += [(step, f"milestone {number}") for number, step in enumerate(schedule.milestone_steps, 1)]
    elif schedule.name != "constant":
        named.append(((schedule.warmup_steps + schedule.num_steps) // 2, "half of the way down"))
    before = sorted((corner for corner in named if corner[0] < last), key=lambda corner: corner[0])
    return [*before, (last, "last step")]


def in_words(schedule: Schedule, steps_per_epoch: int) -> dict[str, str]:
    """Returns a row of the plan for each breakpoint of a schedule that is not constant."""
    if schedule.is_constant:
        return {}
    rows = {}
    for number, (step, name) in enumerate(corners(schedule), 1):
        where = f"step {step:,}, epoch {step // steps_per_epoch + 1}"
        key = " " * number  # no row may have the key of another
        rows[key] = f"{where:<26} {float(schedule.rate(step)):<10.3g} {name}"
    return rows
