"""Position of a run: where it starts, its clock of steps, and why it is about to end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from numpy.typing import NDArray

from ringtrain.checkpoint.callback_state import State
from ringtrain.monitor.journal import Journal
from ringtrain.protocol.status import StatusLine
from ringtrain.training import evaluation


@dataclass(frozen=True)
class Ending:
    """Why training is about to end."""

    stopped_by: str = ""
    """Reason on which the ranks have agreed."""
    requested: str = ""
    """Reason that a rank has given, and on which they agree next."""
    is_ended: bool = False
    """Whether a callback has asked for the end."""
    is_closed: bool = False
    """Whether nothing is saved any more, since the loss is not finite."""


@dataclass(frozen=True)
class Start:
    """Position at which a run starts or resumes."""

    global_step: int = 0
    source: str = ""
    """Checkpoint folder; "": start from scratch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last complete epoch."""
    step_logs: Mapping[str, Any] = field(default_factory=dict)
    """Logs of the last step, if the end of its epoch is to be made up for."""
    is_open: bool = False
    """Whether the end of an epoch is to be made up for: a change of ranks has interrupted it."""
    begun_epoch: int = -1
    """The epoch for which callbacks have seen `on_epoch_begin`, if ranks have changed since."""
    callbacks: State = field(default_factory=lambda: ([], {}))
    """State of the callbacks of a script or of train.callbacks."""
    is_ended: bool = False
    """Whether a callback had asked for the end when the checkpoint was saved."""
    ending: Ending = Ending()
    """Of the ranks that trained before a change of ranks."""
    metrics_state: tuple[NDArray[Any], ...] = ()
    """Metric sums of this rank, if in the middle of an epoch."""
    refused: tuple[str, ...] = ()
    """Why newer checkpoints were skipped."""
    initial_epoch: int = 0
    """Epoch in which the run has begun, in whichever attempt."""
    frozen: Sequence[int] | None = None
    """`model_state.frozen_layers` when the checkpoint was saved; None: not known."""
    frozen_as_compiled: Sequence[int] | None = None
    """The same when that training began, in whichever attempt."""

    @property
    def is_later(self) -> bool:
        """Whether training has begun before: in another process, or on other ranks."""
        return bool(self.source or (self.global_step and not self.initial_epoch))


class Clock(keras.callbacks.Callback):
    """Counts the steps of a run. It must be the first callback, since the others read it."""

    is_open = False

    def __init__(
        self, start: Start, steps_per_epoch: int, status: StatusLine, journal: Journal, steps_per_call: int = 1
    ) -> None:
        super().__init__()
        self.steps_per_call = steps_per_call
        self.status = status
        self.journal = journal
        self.begun = False
        status.put(start.global_step, "")
        self.global_step = self.before = start.global_step
        self.steps_per_epoch = steps_per_epoch
        self.metrics_state = start.metrics_state
        self.step_logs = start.step_logs
        self.results: dict[str, Any] = {}
        """of the metrics after the first step of a resumed epoch, before the sums of earlier steps are added"""
        self.begun_epoch = start.begun_epoch

    @property
    def where(self) -> dict[str, Any]:
        """Position of the run, for the journal's last event."""
        return {"global_step": self.global_step}

    @property
    def epoch(self) -> int:
        """Number of the epoch under way or, between two, of the next one."""
        return self.global_step // self.steps_per_epoch

    @property
    def steps_left(self) -> int:
        """Number of steps that are left of the epoch under way or, between two, of the next one."""
        return self.steps_per_epoch - self.global_step % self.steps_per_epoch

    def begin_epoch(self) -> tuple[int, range]:
        """Begins an epoch, or goes on with it; returns its number and those of the steps that are left of it."""
        return self.epoch, range(self.global_step % self.steps_per_epoch, self.steps_per_epoch)

    @property
    def epoch_complete(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.global_step % self.steps_per_epoch == 0

    def end_epoch(self) -> None:
        """Counts an epoch whose data have ended early as a complete one."""
        self.before = self.global_step
        self.global_step = math.ceil(self.global_step / self.steps_per_epoch) * self.steps_per_epoch
        self.status.put(self.global_step, "")

    def keep_state(self) -> None:
        """Keeps the state before the end of an epoch or of training, if ranks change: not here."""

    def passed(self, every: int) -> bool:
        """Returns whether the last call of a step has reached a multiple of `every`."""
        return self.global_step // every > self.before // every

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.restore_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.before = self.global_step
        self.global_step += min(self.steps_per_call, self.steps_per_epoch - self.before % self.steps_per_epoch)
        self.status.put(self.global_step, "")
        if not self.begun:
            self.begun = True
            self.journal.write("training", global_step=self.global_step)
        self.results = {}
        if self.metrics_state:  # only now, as Keras has created the metrics in this step
            self.results = evaluation.results_of_metrics(self.model)
            for variable, array in zip(self.model.metrics_variables, self.metrics_state, strict=True):
                variable.assign_add(array)
            self.metrics_state = ()

    def restore_metrics(self) -> None:
        """Gives the metrics their state of the epoch's steps before a resume, once, if they are created already."""
        if not self.metrics_state:  # `metrics_variables` walks through all layers
            return
        variables = self.model.metrics_variables
        if len(variables) != len(self.metrics_state):
            return
        for variable, array in zip(variables, self.metrics_state, strict=True):
            variable.assign(array)
        self.metrics_state = ()
