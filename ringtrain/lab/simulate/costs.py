"""Costs of a step, a save and a start: from options, or from the journal of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ringtrain.cluster.host_agent import ALIVE_COUNT, ALIVE_S
from ringtrain.cluster.plans.horovodrun import GLOO_TIMEOUT_S
from ringtrain.cluster.supervisor import CLEAN_UP_S
from ringtrain.errors import RunDirectoryError
from ringtrain.lab.report import run_folder
from ringtrain.monitor import goodput
from ringtrain.monitor.goodput import Goodput
from ringtrain.options import AT_LEAST_0, SECONDS, Argument

SSH_LOST_S = float(ALIVE_S * ALIVE_COUNT)
"""after which ssh gives up a host that does not answer"""
S = Argument("S")
BETWEEN_STEPS = ("steps", "input", "callbacks", "evaluate")
"""parts of a run's time that a step has with all that belongs to it"""


@dataclass(frozen=True)
class Costs:
    """Seconds that parts of a job take.

    Attributes:
        step_s: A step with all ranks, with its data, callbacks and evaluation.
        save_s: A checkpoint, as far as training waits for it.
        start_s: A start, from the launcher's command to the first step, without reading a checkpoint.
        restore_s: Reading a checkpoint back.
        detect_s: A failure, until the launcher has noticed it and cleaned up.
        detect_elastic_s: A failure, until the other ranks of an elastic job have noticed it.
    """

    step_s: float = 1.0
    save_s: float = 10.0
    start_s: float = 60.0
    restore_s: float = 20.0
    detect_s: float = SSH_LOST_S + CLEAN_UP_S
    detect_elastic_s: float = GLOO_TIMEOUT_S + SSH_LOST_S


@dataclass(frozen=True)
class CostOptions:
    """Costs, in seconds."""

    from_run: Annotated[str, Argument("RUN")] = ""
    """folder of a run, from whose journal the costs are taken that are not given here"""
    step_s: Annotated[float | None, S, SECONDS] = None
    """a step, with its data, callbacks and evaluation (1)"""
    save_s: Annotated[float | None, S, AT_LEAST_0] = None
    """a checkpoint, as far as training waits for it (10)"""
    start_s: Annotated[float | None, S, AT_LEAST_0] = None
    """a start, up to the first step (60)"""
    restore_s: Annotated[float | None, S, AT_LEAST_0] = None
    """reading a checkpoint back (20)"""
    detect_s: Annotated[float | None, S, AT_LEAST_0] = None
    """from a host's failure to the end of the other ranks (22; of an elastic job 75, with Gloo's timeout)"""


def costs_of(options: CostOptions) -> tuple[Costs, float]:
    """Costs, and the seconds of training between two checkpoints of the run, 0.0 if there is no run."""
    values = vars(Costs()).copy()
    interval_s = 0.0
    if options.from_run:
        spent = goodput.of(run_folder.read(Path(options.from_run)).events)
        if spent is None or not spent.total_s:
            raise RunDirectoryError(f"{options.from_run}: its journal has no times: give --step-s, --save-s, --start-s")
        values |= measured(spent)
        interval_s = trained_s(spent) / max(1, num_saves(spent))
    for name in ("step_s", "save_s", "start_s", "restore_s", "detect_s"):
        value = getattr(options, name)
        if value is not None:
            values[name] = value
    if options.detect_s is not None:
        values["detect_elastic_s"] = options.detect_s
    return Costs(**values), interval_s


def measured(spent: Goodput) -> dict[str, float]:
    """Costs that a run tells, by name; those that it does not tell are missing."""
    attempts = spent.attempts
    found = {"start_s": spent.seconds["start"] / len(attempts)}
    num_steps = attempts[-1].last_step
    if num_steps:
        steps_s = sum(spent.seconds[part] for part in BETWEEN_STEPS)
        found["step_s"] = steps_s / num_steps
    if num_saves(spent):
        found["save_s"] = spent.seconds["save"] / num_saves(spent)
    restores_s = [attempt.restore_s for attempt in attempts if attempt.restore_s]
    if restores_s:
        found["restore_s"] = sum(restores_s) / len(restores_s)
    return found


def num_saves(spent: Goodput) -> int:
    return sum(attempt.num_saves for attempt in spent.attempts)


def trained_s(spent: Goodput) -> float:
    """Seconds of all steps, also of those that were made again."""
    return spent.seconds["repeated"] + sum(spent.seconds[part] for part in BETWEEN_STEPS)
