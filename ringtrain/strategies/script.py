"""Strategy of `ringtrain.fit`: ring, with the data and the compiled model of a script, in a loop around Keras' steps.

Keras' own `fit` cannot resume within an epoch: a second call of it would begin training again for every callback.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from ringtrain import data, hvd
from ringtrain.config import Config
from ringtrain.derived import Numbers
from ringtrain.optim.uneven import UnevenBatches
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import console, devices, model_state, resume
from ringtrain.run.resume import Segment
from ringtrain.strategies.ring import Ring

if TYPE_CHECKING:
    from rich.console import Console

    from ringtrain.run.context import RunContext


class Script(Ring):
    """Strategy ring for the model of a script.

    Attributes:
        is_quiet: Whether nothing is printed.
    """

    is_scripted = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_quiet = False

    def console(self) -> Console:
        return console.console_for(1 if self.is_quiet else hvd.rank())

    def shard(self, numbers: Numbers) -> str:
        n = numbers
        return f"up to {n.batch_size} of {n.samples_per_step} rows of a step on each rank, the last batch included"

    def begin(self) -> devices.Pinning:
        return hvd.run_together(lambda: devices.pin_late(hvd.local_rank(), hvd.local_size(), self.config.device))

    def same_global_batch(self, config: Config, attempt: Attempt) -> Config:
        return config  # a script gives the global batch itself

    def clock(self, run: RunContext) -> resume.Clock:
        per_call = run.model.steps_per_execution
        return resume.Clock(run.start, run.numbers.steps_per_epoch, run.status, run.journal, per_call)

    def summary(self, run: RunContext) -> dict[str, Any]:
        return {**super().summary(run), "script": sys.argv[0]}

    def segments(self, run: RunContext) -> list[Segment]:
        """The rest of the run, if any."""
        steps, epochs = run.numbers.steps_per_epoch, run.config.train.epochs
        epoch = run.start.global_step // steps
        return [Segment(epoch, epochs, steps, run.start.global_step)] if epoch < epochs else []

    def fit(self, run: RunContext, part: Segment) -> None:
        rows = data.RowBatches(run.data_set.train, run.numbers.samples_per_step, run.rank, run.size, run.config.seed)
        with UnevenBatches(run.model, not rows.is_even, rows.has_empty_parts):
            self._train(run, part, rows)

    def _train(self, run: RunContext, part: Segment, rows: data.RowBatches) -> None:
        model, first_step, logs = run.model, part.first_step % part.num_steps, None
        callbacks = keras.callbacks.CallbackList(
            run.callbacks.ordered, model=model, epochs=part.end_epoch, steps=part.num_steps, verbose=0
        )
        model.stop_training = False
        model.make_train_function(force=True)  # an earlier one has other gradients and losses
        for callback in run.users_callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger) and run.start.source:
                callback.append = True
        callbacks.on_train_begin()
        model_state.restore_callbacks(run.users_callbacks, run.start.callbacks)
        for epoch in range(part.first_epoch, part.end_epoch):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            batches, step_logs = rows(epoch, first_step), {}
            for step in range(first_step, part.num_steps, model.steps_per_execution):
                callbacks.on_train_batch_begin(step)
                step_logs = model.train_function(batches)
                callbacks.on_train_batch_end(step + model.steps_per_execution - 1, step_logs)
                if model.stop_training:
                    break
            first_step = 0
            logs = self._end_epoch(run, callbacks, epoch, step_logs)
            if model.stop_training:
                break
        if run.clock.epoch_complete:
            run.callbacks.saver.save()  # before averaged weights replace those with which training would continue
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs)

    def _end_epoch(self, run: RunContext, callbacks: Any, epoch: int, step_logs: Mapping[str, Any]) -> dict[str, Any]:
        """Calls on_epoch_end; the user's callbacks see complete epochs only, as their state will be saved."""
        if run.clock.epoch_complete:
            callbacks.on_epoch_end(epoch, dict(run.model._get_metrics_result_or_logs(step_logs)))
            return run.callbacks.evaluation.logs
        users = {id(callback) for callback in run.users_callbacks}
        for callback in run.callbacks.ordered:
            if id(callback) not in users:
                callback.on_epoch_end(epoch, {})
        return {}


@contextlib.contextmanager
def unchanged_afterwards(model: keras.Model) -> Iterator[None]:
    """Context after which a model and its optimizer have no attributes of a run, and `model.fit` is Keras' again."""
    objects = [model, model.optimizer]
    before = [{name: vars(one).get(name) for name in ("train_step", "apply")} for one in objects]
    jit_compile, model.jit_compile = model.jit_compile, False  # XLA has no kernel for Horovod's allreduce
    try:
        yield
    finally:
        for one, values in zip(objects, before, strict=True):
            for name, value in values.items():
                vars(one).pop(name, None)
                if value is not None:
                    object.__setattr__(one, name, value)
        model.jit_compile, model.train_function = jit_compile, None
