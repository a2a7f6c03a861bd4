"""Callbacks of a run, in the order in which Keras calls them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ringtrain import data, hvd
from ringtrain.monitor import fault_injection
from ringtrain.run import evaluation, saver, stopping, tracking
from ringtrain.run.console import Progress

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext


class Callbacks:
    """Callbacks of one rank; `ordered` is the list for Keras' fit."""

    def __init__(self, run: RunContext, progress: Progress) -> None:
        config, numbers, clock = run.config, run.numbers, run.clock
        # Each rank evaluates its shard of the test samples.
        shard = data.evaluation_shard(numbers.num_test, run.rank, run.size)
        test_batches = data.evaluation_batches(run.data_set.test, shard, numbers.batch_size)
        self.evaluation = evaluation.Evaluation(test_batches, shard, run.data_set, clock, config.model.not_averaged)
        self.in_sync = hvd.callbacks.CheckInSyncCallback(config.train.check_every_steps)
        self.stop = stopping.StopTogether(
            run.signals, config, run.start.global_step, numbers.steps_per_epoch, run.data_set.raise_unreadable
        )
        self.plateau = stopping.Plateau(config, numbers, clock, self.stop, run.start)
        faults = fault_injection.FaultInjector(
            run.named.faults, run.rank, numbers.num_steps, numbers.steps_per_epoch, run.folder, run.journal
        )
        self.saver = saver.Saver(
            run.model,
            run.folder / "checkpoints",
            config,
            {"numbers": dataclasses.asdict(numbers), "versions": tracking.versions()},
            clock,
            run.start.metrics,
            run.journal,
            self.plateau.values,
            lambda: self.stop.save_is_due,
            faults.while_saving,
        )
        self.recorder = (
            tracking.Recorder(run.folder, progress, numbers, clock, config.tracking, run.gradient_norm)
            if run.rank == 0
            else None
        )
        self.ordered = [
            clock,  # counts the step, which all others read
            *([run.monitor.pulse] if run.monitor else []),  # ends the step's time before the others take theirs
            self.evaluation,  # replaces this rank's metrics with those of all ranks, before they are read
            *run.users_callbacks,  # may add metrics and ask for the end
            *([self.recorder] if self.recorder else []),  # records what the callbacks above have added
            self.plateau,  # judges the epoch's metrics, and may ask for the end
            self.stop,  # agrees on all requests to stop, and that the loss is finite, before anything is saved
            self.in_sync,  # ranks that have diverged save nothing
            self.saver,  # saves a state on which all ranks agree
            *([fault_injection.callback(faults, clock)] if run.named.faults else []),  # breaks what is complete
            *run.strategy.last_callbacks(run),  # an elastic commit interrupts fit: nothing may follow it
        ]
