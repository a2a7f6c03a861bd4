"""Saves the state of a run during training, on all ranks together: when, and what becomes of an error."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.checkpoint import checkpoint, model_state
from ringtrain.checkpoint.callback_state import CallbackState
from ringtrain.checkpoint.model_state import Arrays
from ringtrain.errors import CheckpointError, NonFiniteLoss, RunDirectoryError
from ringtrain.training import identity, tracking

if TYPE_CHECKING:
    from ringtrain.training.run import Run


class Saver(keras.callbacks.Callback):
    """Saves the state of a run; a thread of rank 0 writes it. A save may fail, as on a full disk, except the last."""

    def __init__(self, run: Run, while_saving: Callable[[int], None] = lambda global_step: None) -> None:
        super().__init__()
        self.set_model(run.job.model)
        self.lock = run.lock
        self.folder, self.config, self.clock, self.journal = run.checkpoints, run.config, run.clock, run.journal
        self.facts = {"config": dataclasses.asdict(run.config), "numbers": dataclasses.asdict(run.job.numbers)}
        common = identity.in_common(run.config, run.job.numbers, run.job.checksums, run.job.of_name)
        self.facts |= {"versions": tracking.versions(), "in_common": common}
        self.metrics = dict(run.start.metrics)
        self.run, self.while_saving = run, while_saving
        self.callback_state: CallbackState | None = run.job.callback_state
        if run.job.users_callbacks and self.callback_state is None:
            self.callback_state = CallbackState(run.job.users_callbacks, run.job.model)
        self.frozen_as_compiled = run.start.frozen_as_compiled
        self.saved_step = -1
        self.is_closed = run.start.ending.is_closed
        """whether nothing is saved any more, since the loss is not finite; the same on every rank"""
        self._failed_step = -2
        self.saves: dict[str, Any] = {"count": 0, "stall_s": 0.0, "longest_stall_s": 0.0, "write_s": 0.0, "failed": []}
        self._floating = [weight for weight in run.job.model.weights if _should_be_finite(weight)]
        self._sum_of_weights = tf.function(self._sum, autograph=False).get_concrete_function()
        # Not a new thread for each save: it would run first, and the training thread would wait for it.
        self._writer = ThreadPoolExecutor(1, "ringtrain-saver")
        self._written: Future[None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.callback_state is not None:
            self.callback_state.save()  # notes what callbacks have set to prepare their training

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._written and self._written.done():
            self.wait()  # raises the error of the writer
        every = self.config.checkpoint.every_steps
        # At the end of an epoch, on_epoch_end saves, with its metrics.
        if every and self.clock.passed(every) and not self.clock.epoch_complete:
            self.save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.clock.epoch_complete:
            self.metrics = {name: float(value) for name, value in (logs or {}).items() if tracking.is_number(value)}
            every = self.config.checkpoint.every_epochs
            if every and (epoch + 1) % every == 0:
                self.save()
        if self.model.stop_training or epoch + 1 == self.config.train.epochs:
            # Now: callbacks and averaged weights replace those with which training would continue.
            self._save_last()

    def save(self) -> None:
        """Starts saving the state, once; raises NonFiniteLoss on every rank if a weight is not finite. Collective."""
        step = self.clock.global_step
        if self.saved_step != step and not self.is_closed:
            self._save(step)

    @hvd.during("save")
    def _save(self, step: int) -> None:
        begin_s = time.perf_counter()
        self.wait()  # for the previous save, so that states do not pile up in memory
        hvd.run_together(lambda: self._require_finite(step))
        files = model_state.gathered(self.model, is_in_epoch=not self.clock.epoch_complete)
        facts: dict[str, Any] = {}
        if files:  # on rank 0
            facts, arrays = self._facts()
            files["state"] |= arrays
        self.saved_step = step
        stall_s = time.perf_counter() - begin_s
        self.saves["count"] += 1
        self.saves["stall_s"] += stall_s
        self.saves["longest_stall_s"] = max(stall_s, self.saves["longest_stall_s"])
        self.journal.write("save", global_step=step, stall_s=stall_s)
        if files:  # last: the writer then needs a core, and there may be none to spare
            self._written = self._writer.submit(self._write, step, files, facts)

    def finish(self) -> None:
        """Waits until the last state is saved; raises CheckpointError on every rank if it cannot be. Collective."""
        if self.saved_step != self.clock.global_step:  # nothing was left to train
            self._save_last()
        hvd.run_together(self._finish)

    def _save_last(self) -> None:
        """Saves the current state and waits until it is on disk, with a second attempt. Collective."""
        self.save()
        self.wait()
        if hvd.broadcast_object(self._failed_step == self.saved_step, 0, name="ringtrain_last_save"):
            self.saved_step = -1  # the disk may have been full for a moment
            self.save()
            self.wait()

    def _finish(self) -> None:
        self.wait()
        self.lock.raise_if_lost()  # results are written next
        if self._failed_step == self.saved_step:
            raise CheckpointError(f"{self.saves['failed'][-1]['error']}; earlier checkpoints are kept")

    def wait(self) -> None:
        """Waits until the pending save is on disk or has failed."""
        if self._written is not None:
            written, self._written = self._written, None
            written.result()

    def _sum(self) -> tf.Tensor:
        """Sum of all weights that should be finite, of which a model may have none."""
        return tf.add_n(
            [tf.cast(tf.reduce_sum(weight.value), tf.float32) for weight in self._floating] or [tf.constant(0.0)]
        )

    def _require_finite(self, step: int) -> None:
        """Raises NonFiniteLoss for a weight that contains NaN or infinity."""
        # The sum is fast, and non-finite if any weight is. It may also overflow if all are finite.
        if math.isfinite(float(self._sum_of_weights())):
            return
        for weight in self._floating:
            if not tf.reduce_all(tf.math.is_finite(weight.value)):
                raise NonFiniteLoss(
                    f"non-finite weight {weight.path} after step {step}: lower the learning rate; the last checkpoint"
                    " is older"
                )

    def _facts(self) -> tuple[dict[str, Any], Arrays]:
        """Facts for the manifest, and arrays that callbacks keep; those of rank 0 are saved."""
        facts: dict[str, Any] = {
            **self.facts,
            "metrics": self.metrics,
            **model_state.facts_of(self.model),
            "frozen_as_compiled": self.frozen_as_compiled,
            "is_ended": self.run.callbacks.stop.is_ended,
            "callbacks": [],
        }
        arrays = Arrays()
        if self.callback_state is not None:
            facts["callbacks"], arrays = self.callback_state.save()
        return facts, arrays

    def _write(self, step: int, files: dict[str, Any], facts: dict[str, Any]) -> None:
        """Writes a checkpoint, in a separate thread."""
        state = files["state"]
        for name, value in state.items():  # early: otherwise the next update of the weights would have to copy them
            state[name] = model_state.storable(value)
        begin_s = time.perf_counter()
        try:
            self.lock.raise_if_lost()
            checkpoint.save(self.folder, step, files, facts, lambda name: self.while_saving(step))
            self._failed_step = -2
        except (OSError, CheckpointError, RunDirectoryError) as error:
            self._failed_step = step
            why = error.strerror if isinstance(error, OSError) else error
            text = f"{self.folder}/step-{step:08d}: cannot be written: {why}"
            self.saves["failed"].append({"global_step": step, "error": text})
            print(f"ringtrain: {text}; training continues", file=sys.stderr, flush=True)
        else:
            try:
                checkpoint.prune(self.folder, self.config.checkpoint.keep)
            except OSError as error:
                text = f"{error.filename or self.folder}: older checkpoints are not removed: {error.strerror}"
                print(f"ringtrain: {text}", file=sys.stderr, flush=True)
            mirror = self.lock.mirror  # a failed run gives it up meanwhile
            if mirror:
                mirror.add(self.folder.parent)
        self.saves["write_s"] += time.perf_counter() - begin_s


def _should_be_finite(weight: Any) -> bool:
    """Returns whether a weight holds numbers that training should keep finite: not one that begins with infinity."""
    if not keras.backend.is_float_dtype(weight.dtype):
        return False
    return weight.trainable or bool(tf.reduce_all(tf.math.is_finite(weight.value)))  # a running minimum, a mask
