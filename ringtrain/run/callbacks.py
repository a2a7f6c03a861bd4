"""Callbacks of a run, in the order in which Keras calls them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ringtrain import hvd
from ringtrain.config import Config
from ringtrain.hvd.keras_patches import innermost
from ringtrain.monitor import fault_injection, trackers
from ringtrain.run import callback_state, saver, stopping, tracking
from ringtrain.run.console import Progress

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext
    from ringtrain.run.resume import Segment


class Callbacks:
    """Callbacks of one rank; `ordered` is the list for Keras' fit, `of_segment` the same for a part of a run."""

    def __init__(self, run: RunContext, progress: Progress) -> None:
        lengths = run.numbers.lengths
        faults = fault_injection.FaultInjector(run.named.faults, run.rank, *lengths, run.folder, run.journal)
        inject = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: faults.after_step(run.clock.global_step, run.model)
        )
        self.evaluation = run.strategy.evaluation(run)
        self.in_sync = hvd.callbacks.CheckInSyncCallback(run.config.train.check_every_steps)
        self.stop = stopping.StopTogether(run)
        self.plateau = stopping.Plateau(run, self.stop)
        self.saver = saver.Saver(run, self.plateau.values, lambda: self.stop.save_is_due, faults.while_saving)
        wanted = run.config if run.rank == 0 else Config()
        self.trackers = hvd.run_together(lambda: trackers.Trackers(wanted, dataclasses.asdict(run.numbers), run.folder))
        self.recorder = tracking.Recorder(run, progress) if run.rank == 0 else None
        self.ordered = [
            run.clock,  # counts the step, which all others read
            *([run.monitor.step_timer] if run.monitor else []),  # ends the step's time before the others take theirs
            self.evaluation,  # replaces this rank's metrics with those of all ranks, before they are read
            *run.users_callbacks,  # may add metrics and ask for the end
            *([self.recorder] if self.recorder else []),  # records what the callbacks above have added
            self.plateau,  # judges the epoch's metrics, and may ask for the end
            self.stop,  # agrees on all requests to stop, and that the loss is finite, before anything is saved
            self.in_sync,  # ranks that have diverged save nothing
            self.saver,  # saves a state on which all ranks agree
            *([inject] if run.named.faults else []),  # breaks what is complete
            *run.strategy.last_callbacks(run),  # an elastic commit interrupts fit: nothing may follow it
        ]
        self._run = run
        self._of_segments: CallbacksOfSegments | None = None

    def of_segment(self, part: Segment) -> CallbacksOfSegments:
        """Callbacks for one of the calls of `fit` that make up a run."""
        if self._of_segments is None:
            self._of_segments = CallbacksOfSegments(self._run, self.ordered)
        self._of_segments.begin(part)
        return self._of_segments


class CallbacksOfSegments(keras.callbacks.CallbackList):
    """List of callbacks that see one training, although Keras' `fit` is called once per segment.

    For an epoch that was begun before a resume, `on_epoch_begin` changes nothing that was saved: a learning rate is
    not multiplied twice.
    """

    def __init__(self, run: RunContext, callbacks: list[keras.callbacks.Callback]) -> None:
        super().__init__(callbacks, add_history=True, model=run.model)
        self._run = run
        self._begun = False
        self._weights: list[Any] = []

    def begin(self, part: Segment) -> None:
        self.set_params({"verbose": 0, "epochs": part.end_epoch, "steps": part.num_steps})

    @property
    def _is_last(self) -> bool:
        return self.model.stop_training or self.params["epochs"] == self._run.config.train.epochs

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._begun:
            self._begun = True
            with contextlib.ExitStack() as stack:
                if self._run.start.source:  # what callbacks do to the model here is in the checkpoint
                    stack.enter_context(callback_state.unchanged_afterwards(self.model, []))
                super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        clock, users = self._run.clock, self._run.users_callbacks
        if clock.epoch_complete and not clock.is_open:
            super().on_epoch_begin(epoch, logs)
            return
        with callback_state.unchanged_afterwards(self.model, users):
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        averages = any(innermost(optimizer).use_ema for optimizer in hvd.optimizers_of(self.model))
        if averages and epoch + 1 == self.params["epochs"] and not self._is_last:
            self._weights = [np.array(weight) for weight in self.model.trainable_weights]

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_last:
            super().on_train_end(logs)
            return
        # Keras has replaced them by their averages, as at the end of a training.
        for weight, array in zip(self.model.trainable_weights, self._weights, strict=False):
            weight.assign(array)
        self._weights = []
