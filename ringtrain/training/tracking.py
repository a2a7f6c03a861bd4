"""Files that rank 0 writes: metrics.jsonl, steps.jsonl and TensorBoard during training, then results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain
from ringtrain import hvd
from ringtrain.checkpoint import checkpoint, durable, model_state
from ringtrain.checkpoint.run_folder import METRICS, NO_METRICS, STEPS, plain, write_summary
from ringtrain.config.derived import counted
from ringtrain.errors import CheckpointError
from ringtrain.optim.optimizers import last_learning_rate
from ringtrain.protocol.env import ALONE, COLLECTIVES
from ringtrain.protocol.json_text import INVALID, parse_json
from ringtrain.training.console import Progress, speed

if TYPE_CHECKING:
    from ringtrain.training.run import Run


POSITION = ("global_step", "time_s")
"""keys of a record that are not metrics, but its position in the run"""
BETWEEN_NOTES_S, BETWEEN_NOTES = 10.0, 0.01
"""time between two entries of where time went: seconds, or a fraction of the time of training, whichever is longer"""


class Recorder(keras.callbacks.Callback):
    """Records and shows the progress of training, on rank 0."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.folder = run, run.folder
        self.progress = Progress(run.terminal, run.job.numbers.num_steps, run.config.train.epochs)
        self.images_per_step = run.job.numbers.samples_per_step
        self.first_step = run.clock.global_step
        self.timed_steps, self.timed_s = 0, 0.0  # without the first step (tracing) and the time between epochs
        self._begin_s = time.perf_counter()
        self._next_note_s = self._begin_s + BETWEEN_NOTES_S
        self.reported = False
        self.unwritten: dict[str, list[str]] = {}
        # Records of steps after the resume point are dropped.
        self.epochs = _records_until(self.folder / METRICS, self.first_step - run.clock.is_open)
        _records_until(self.folder / STEPS, self.first_step)

    @property
    def images_per_s(self) -> float:
        """Samples that all ranks together train per second, over the whole run."""
        if not self.timed_s:
            return math.nan
        return self.timed_steps * self.images_per_step / self.timed_s

    @property
    def global_step(self) -> int:
        return self.run.clock.global_step

    def on_train_begin(self, logs: Any = None) -> None:
        self.summaries = tf.summary.create_file_writer(str(self.folder / "tensorboard"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.evaluated_s = epoch, self.run.callbacks.evaluation.seconds
        self.epoch_begin_s = self.epoch_start_s = self.epoch_end_s = time.perf_counter()
        self.steps_before = self.last_step = self.global_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.epoch_end_s, self.last_step = time.perf_counter(), self.global_step
        if self.run.clock.before == self.first_step:
            self.epoch_start_s, self.steps_before = self.epoch_end_s, self.global_step
        if self.progress.is_due():
            figures = "  ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items() if is_number(value))
            self.progress.step(self.global_step, self.epoch, figures)
        every = self.run.config.tracking.every_steps
        if every and self.run.clock.passed(every):
            self.note_learning_rate()
            self._record(STEPS, "steps/", self.epoch, logs)
        self._note_time()

    def note_learning_rate(self) -> None:
        """Keeps the rate of the last step for the next record. At the end of an epoch, before callbacks change it."""
        self.learning_rate = last_learning_rate(self.model.optimizer)

    def _note_time(self) -> None:
        """Writes where time went to the journal, now and then: a kill loses what came after the last entry."""
        now_s = time.perf_counter()
        if now_s > self._next_note_s:
            self.run.journal.write("time", global_step=self.global_step)
            self._next_note_s = now_s + max(BETWEEN_NOTES_S, BETWEEN_NOTES * (now_s - self._begin_s))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps, seconds = self.last_step - self.steps_before, self.epoch_end_s - self.epoch_start_s
        self.timed_steps += steps
        self.timed_s += seconds
        if not self.run.clock.epoch_complete:
            return  # interrupted
        train_s = self.epoch_end_s - self.epoch_begin_s
        evaluate_s = self.run.callbacks.evaluation.seconds - self.evaluated_s
        self.epochs.append(self._record(METRICS, "", epoch, logs, train_s=train_s, evaluate_s=evaluate_s))
        with self._disk_may_be_full():
            self.summaries.flush()
        samples = counted(self.run.config.data.name, self.images_per_step)
        self.progress.epoch(epoch, figures_of(self.epochs[-1], samples))

    def on_train_end(self, logs: Any = None) -> None:
        with self._disk_may_be_full():
            self._append(METRICS)
            self._append(STEPS)
            self.summaries.close()

    @contextlib.contextmanager
    def _disk_may_be_full(self) -> Iterator[None]:
        """Reports a failed write once; records then stay in memory, and training continues."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:  # the latter from TensorBoard's files
            why: Any = error
            if isinstance(error, tf.errors.OpError):
                why = error.message
            elif error.strerror:
                why = error.strerror
            if not self.reported:
                text = f"{self.folder}: cannot be written: {why}; training continues"
                print(f"ringtrain: {text}", file=sys.stderr, flush=True)
            self.reported = True

    def _append(self, file_name: str, *lines: str) -> None:
        """Appends lines to a file, after those that could not be written before."""
        waiting = self.unwritten.setdefault(file_name, [])
        waiting += lines
        path = self.folder / file_name
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in waiting)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise
        waiting.clear()

    def _record(self, file_name: str, prefix: str, epoch: int, logs: Any, **more: float) -> dict[str, Any]:
        """Appends a record to a file, and its numbers to TensorBoard."""
        optimizer = self.model.optimizer
        record: dict[str, Any] = {"epoch": epoch + 1, "global_step": self.global_step, "time_s": time.time()}
        for name, value in (logs or {}).items():
            if name != "lr":
                record[name] = np.asarray(value).tolist()
        record["learning_rate"] = self.learning_rate
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            record["loss_scale"] = float(optimizer.dynamic_scale)
        record["images_per_s"] = math.nan
        seconds = self.epoch_end_s - self.epoch_start_s
        if seconds:
            record["images_per_s"] = (self.last_step - self.steps_before) * self.images_per_step / seconds
        record |= more
        with self._disk_may_be_full():
            self._append(file_name, json.dumps(plain(record), default=_text))
        shown = {prefix + name: number for name, number in record.items() if name not in POSITION and is_number(number)}
        with self._disk_may_be_full(), self.summaries.as_default():
            tf.summary.experimental.write_raw_pb(_scalars(shown), step=self.global_step)
        return record


def _scalars(numbers: Mapping[str, Any]) -> bytes:
    """Numbers for TensorBoard, for one operation: one of `tf.summary.scalar` for each takes five times as long."""
    of_scalars = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
    summary = tf.compat.v1.Summary()
    for name, number in numbers.items():
        summary.value.add(tag=name, metadata=of_scalars, tensor=tf.make_tensor_proto(float(number), tf.float32))
    return summary.SerializeToString()


def is_number(value: Any) -> bool:
    """Returns whether a value of logs is a number, and no text or array."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"


def _text(value: Any) -> str:
    """Text for a value that JSON cannot represent, such as that of a tensor of texts."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def _records_until(path: Path, global_step: int) -> list[dict[str, Any]]:
    """Reads the records of an earlier process, and truncates the file at the resume point."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(*INVALID):  # incomplete last line of a killed process
            record = parse_json(line)
            if record["global_step"] <= global_step:
                records.append(record)
    durable.write(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


def figures_of(record: Mapping[str, Any], samples: str = "images") -> list[str]:
    """Formats an epoch's record, the least important last. A model without loss or accuracy shows its first metrics."""
    usual = {
        "loss": "loss {:.4f}",
        "accuracy": "accuracy {:.2%}",
        "test_loss": "test loss {:.4f}",
        "test_accuracy": "accuracy {:.2%}",
    }
    missing = usual.keys() - record.keys()
    if missing:
        names = [name for name, value in record.items() if name not in NO_METRICS and is_number(value)]
        names.sort(key=lambda name: name not in ("loss", "val_loss"))  # else by name, from a script
        shown = [f"{name.replace('_', ' ')} {record[name]:.4f}" for name in names[: len(missing) + 2]]
    else:
        shown = [text.format(record[name]) for name, text in usual.items()]
    return [*shown, speed(record["images_per_s"], samples)]


def versions() -> dict[str, str]:
    """Returns the versions that this process uses; of Horovod and mpi4py, the one that its ranks communicate by."""
    by = "mpi4py" if os.environ.get(COLLECTIVES) in ("mpi4py", ALONE) else "horovod"
    return {
        "ringtrain": ringtrain.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        by: importlib.metadata.version(by),
        "numpy": importlib.metadata.version("numpy"),
    }


def write_results(run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the ranks again, exports the model on rank 0, and writes and returns the summary. Collective."""
    callbacks, numbers = run.callbacks, run.job.numbers
    metrics, recorder = callbacks.saver.metrics, callbacks.recorder
    summary = {
        "test_accuracy": metrics.get("test_accuracy"),
        "test_loss": metrics.get("test_loss"),
        "metrics": metrics,
        "images_per_s": recorder.images_per_s if recorder else math.nan,
        "samples": counted(run.config.data.name, numbers.samples_per_step),
        "num_ranks": numbers.num_ranks,
        "num_parameters": sum(math.prod(variable.shape) for variable in run.job.model.trainable_variables),
        "global_step": run.clock.global_step,
        "stopped_by": callbacks.stop.stopped_by,
        "resumed_from": run.start.source,
        "restarts": run.attempt.number,
        "restart_causes": run.attempt.causes,
        "frozen": model_state.frozen_layers(run.job.model),
        "frozen_as_compiled": run.start.frozen_as_compiled,
        "in_sync": True,
        "checksum": hvd.check_in_sync(run.job.model),
        "check_s": callbacks.in_sync.seconds,
        "evaluate_s": callbacks.evaluation.seconds,
        "saves": callbacks.saver.saves,
        "fit_s": time.time() - run.started,
        "started": run.started,
        "hosts": run.hosts,
        **facts,  # in place of those above
        "numbers": dataclasses.asdict(numbers),
        "versions": versions(),
        "config": dataclasses.asdict(run.config),
    }

    def write() -> None:
        if not recorder:
            return
        try:
            if "script" in summary:
                weights = model_state.arrays_of(dict(enumerate(run.job.model.weights)))
                checkpoint.save_result(run.folder, weights)
            checkpoint.export(run.job.model, run.folder)
        except (CheckpointError, OSError) as error:  # the other files are written nevertheless
            summary["not_exported"] = str(error)
        finally:
            write_summary(run.folder, summary)

    hvd.run_together(write)
    return summary
