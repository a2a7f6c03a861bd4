"""The training loop of all strategies: epochs, steps and Keras' callbacks.

Keras' own `fit` cannot resume within an epoch: a second call of it would begin training again for every callback.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from ringtrain import hvd
from ringtrain.checkpoint import callback_state
from ringtrain.hvd.keras_patches import innermost

if TYPE_CHECKING:
    from ringtrain.training.run import Run


def train(run: Run) -> None:
    """Trains to the end of the run, or until all ranks stop after the same step. Every rank makes the same steps."""
    training = Training(run)
    # The strategy makes the steps; it may prepare the next epoch's batches before this one ends.
    with run.strategy.training(run) as steps_of:
        for epoch, steps in training.epochs():
            trained: Iterator[Mapping[str, Any]] = iter(())
            if steps:
                trained = steps_of(epoch, steps.start)
            for step in steps[:: run.job.model.steps_per_execution]:
                training.begin_step(step)
                logs = next(trained, None)
                if logs is None:
                    break  # the data of this epoch have ended early
                training.end_step(step, logs)
                if run.job.model.stop_training:
                    break


class Training:
    """Epochs and steps of a run with its callbacks, around steps that `train` makes."""

    def __init__(self, run: Run) -> None:
        if run.job.callback_state is not None:  # of ranks that change: those that stay may have a later state
            run.job.callback_state.restore()
        self.run, self.callbacks = run, CallbacksOfRun(run)
        self.step_logs: Mapping[str, Any] = {}  # of the last step

    def epochs(self) -> Iterator[tuple[int, range]]:
        """Yields each epoch with the numbers of the steps that are left of it, which are made before the next one."""
        run = self.run
        model, clock = run.job.model, run.clock
        model.stop_training = False
        logs: Mapping[str, Any] | None = dict(run.start.metrics) or None

        self.callbacks.on_train_begin()  # also of a run that was complete: they set its last weights
        callback_state.restore_callbacks(run.job.all_callbacks, run.start.callbacks)

        # The ranks agree on the end: a callback of one alone may set `stop_training`. An epoch whose end a change of
        # ranks has interrupted is ended in any case, and so is one that a callback had ended before a kill.
        stop = run.callbacks.stop
        while clock.epoch < run.config.train.epochs and (
            clock.is_open or not stop.stopped_by or (stop.is_ended and not clock.epoch_complete)
        ):
            # All of an epoch, or what is left of it: after a resume, or after a change of ranks.
            epoch, steps = clock.begin_epoch()
            if stop.is_ended:
                steps = range(0)  # only its end is made up for
            model.reset_metrics()
            self.callbacks.on_epoch_begin(epoch)
            self.step_logs = {} if steps else clock.step_logs
            yield epoch, steps
            clock.restore_metrics()  # if a resumed epoch had no step left, before which they are restored
            logs = _end_epoch(run, self.callbacks, epoch, self.step_logs)
        model.stop_training = bool(run.callbacks.stop.stopped_by)  # also of a run with nothing left to train

        # Nothing is trained any more. First the trained state is saved: whoever continues it, with more epochs or after
        # a kill, must not begin with the weights that averages and callbacks now put in its place.
        run.callbacks.saver.finish()
        clock.keep_state()
        for optimizer in hvd.optimizers_of(model):
            optimizer.finalize_variable_values(innermost(optimizer)._trainable_variables)
        self.callbacks.on_train_end(logs)

    def begin_step(self, step: int) -> None:
        """Begins a step, or a call of several, with this number in its epoch."""
        self.callbacks.on_train_batch_begin(step)

    def end_step(self, step: int, logs: Mapping[str, Any]) -> None:
        """Ends a step that was trained."""
        self.step_logs = logs
        last = step + self.run.job.model.steps_per_execution - 1  # Keras names a call by its last step
        self.callbacks.on_train_batch_end(last, logs)


def _end_epoch(run: Run, callbacks: Any, epoch: int, step_logs: Mapping[str, Any]) -> dict[str, Any]:
    """Calls on_epoch_end; the user's callbacks see complete epochs only, as their state will be saved."""
    run.job.model.stop_training = False  # set again if a stop is decided; callbacks may ask for the end as well
    # An epoch in which a callback has ended training ends, as in Keras; a signal leaves it open for a resume.
    if run.callbacks.stop.is_ended and not run.clock.epoch_complete:
        run.clock.end_epoch()
    if run.clock.epoch_complete:
        run.clock.keep_state()
        callbacks.on_epoch_end(epoch, dict(run.job.model._get_metrics_result_or_logs(step_logs)))
        return run.callbacks.evaluation.logs  # with the metrics of all ranks
    users = {id(callback) for callback in run.job.users_callbacks}
    for callback in run.callbacks.ordered:
        if id(callback) not in users:
            callback.on_epoch_end(epoch, {})
    return {}


def _cut_rows(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Removes the rows from an epoch on, which is trained again, from the file of a `CSVLogger`."""
    not_of_keras = contextlib.suppress(OSError, ValueError, KeyError)  # or there is no such file
    with not_of_keras, open(logger.filename, "r+", encoding="utf-8", newline="") as file:
        lines = file.readlines()
        rows = csv.DictReader(lines, delimiter=logger.sep)
        kept = [line for line, row in zip(lines[1:], rows, strict=True) if int(row["epoch"]) < epoch]
        file.seek(0)
        file.writelines([*lines[:1], *kept])
        file.truncate()


class CallbacksOfRun(keras.callbacks.CallbackList):
    """Callbacks of a run. A resume does not repeat what they did at a start: a rate is not multiplied twice."""

    callbacks: list[keras.callbacks.Callback]

    def __init__(self, run: Run) -> None:
        super().__init__(run.callbacks.ordered, add_history=True, model=run.job.model)
        self._run = run
        self.set_params({"verbose": 0, "epochs": run.config.train.epochs, "steps": run.job.numbers.steps_per_epoch})
        for callback in run.job.users_callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger) and run.start.is_later:
                if not callback.append and not run.strategy.ranks_change:
                    _cut_rows(callback, run.start.global_step // run.job.numbers.steps_per_epoch)
                callback.append = True

    def on_train_begin(self, logs: Any = None) -> None:
        before = None
        if self._run.start.is_later:
            before = callback_state.Snapshot(self.model, [])
        # After a change of ranks, the user's callbacks go on, but for those that begin on a new rank 0.
        everyone, begun = self.callbacks, self._run.job.begun
        self.callbacks = [callback for callback in everyone if id(callback) not in begun]
        super().on_train_begin(logs)
        self.callbacks = everyone
        begun |= {id(callback) for callback in self._run.job.users_callbacks}
        if before:
            before.restore_values()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        clock, users = self._run.clock, self._run.job.users_callbacks
        is_new = epoch != clock.begun_epoch
        clock.begun_epoch = epoch
        if clock.epoch_complete and not clock.is_open and is_new:
            super().on_epoch_begin(epoch, logs)
            return
        before = callback_state.Snapshot(self.model, users)
        super().on_epoch_begin(epoch, logs)
        before.restore_values()
