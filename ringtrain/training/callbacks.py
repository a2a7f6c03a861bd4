"""Callbacks of a run, in the order in which Keras calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from ringtrain import hvd
from ringtrain.monitor import fault_injection
from ringtrain.training import evaluation, saver, stopping, tracking

if TYPE_CHECKING:
    from ringtrain.training.run import Run


class Callbacks:
    """Callbacks of one rank; `ordered` is the list of all."""

    def __init__(self, run: Run) -> None:
        lengths = run.job.numbers.lengths
        faults = fault_injection.FaultInjector(run.source.faults, run.rank, *lengths, run.folder, run.journal)
        inject = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: faults.after_step(run.clock.global_step, run.job.model)
        )
        self.evaluation = evaluation.Evaluation(run)
        self.in_sync = hvd.callbacks.CheckInSyncCallback(run.config.train.check_every_steps)
        self.stop = stopping.StopTogether(run)
        self.saver = saver.Saver(run, faults.while_saving)
        self.recorder = note_rate = None
        if run.rank == 0:
            self.recorder = recorder = tracking.Recorder(run)
            note_rate = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: recorder.note_learning_rate())
        ordered: list[Any] = [
            run.clock,  # counts the step, which all others read
            run.step_timer,  # ends the step's time before the others take theirs
            self.evaluation,  # replaces this rank's metrics with those of all ranks, before they are read
            note_rate,  # before a callback changes it
            *run.job.users_callbacks,  # may add metrics and ask for the end
            self.recorder,  # records what the callbacks above have added
            self.stop,  # agrees on all requests to stop, and that the loss is finite, before anything is saved
            self.in_sync,  # ranks that have diverged save nothing
            self.saver,  # saves a state on which all ranks agree
            inject if run.source.faults else None,  # breaks what is complete
            *run.strategy.last_callbacks(run),  # an elastic commit interrupts training: nothing may follow it
        ]
        self.ordered = [callback for callback in ordered if callback is not None]
