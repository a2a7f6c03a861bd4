"""The run's folder and what is written to it: only rank 0 writes, except for each rank's own log."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain
from ringtrain.config import Numbers, TrackingConfig
from ringtrain.display import Progress, speed
from ringtrain.errors import MissingDependency, RunDirectoryError
from ringtrain.json_text import INVALID, parse_json
from ringtrain.optimizers import last_learning_rate
from ringtrain.reports import ALONE, COLLECTIVES
from ringtrain.schedules import Schedule, curve

METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
NO_METRICS = (
    *("epoch", "global_step", "time_s", "train_s", "evaluate_s"),
    *("learning_rate", "loss_scale", "gradient_norm", "images_per_s"),
)
LOCK = ".lock"
LEASE_S = 30.0
"""seconds that a restart gives the process of the attempt before to end: as long as a host agent lives on its own"""
EXPIRY_S = 100.0
"""seconds after which a file server has released the locks of a lost host: NFSv4's lease is 90 s"""
SCHEDULED_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX")


def default_name(data_name: str, now_s: float | None = None) -> str:
    """A run's name where none was given, e.g. "digits-20261120-101500".

    Args:
        data_name: of the data set.
        now_s: seconds since 1970; None: now.
    """
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in data_name)
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"


def create_folder(parent: Path, name: str, number_if_taken: bool, go_on: bool = False) -> Path:
    """Makes the folder of a run, and those inside it.

    Args:
        parent: the folder of all runs; made if it is missing.
        name: of the run.
        number_if_taken: take name-2, name-3, ... where there is one already; else that is an error.
        go_on: a run's folder of that name is used again.

    Returns:
        The new folder.

    Raises:
        RunDirectoryError: it exists already and holds files, or cannot be made.
    """
    candidate, number = parent / name, 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        known = go_on and (candidate / "config.toml").is_file()
        while not known and not _claimed(candidate, only_new=number_if_taken):
            if not number_if_taken:
                raise RunDirectoryError(f"{candidate}: exists already: choose another --run.name, or delete it")
            number += 1
            candidate = parent / f"{name}-{number}"
        for folder in (candidate / "checkpoints", candidate / "tensorboard", candidate / "logs"):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{candidate}: cannot be created: {error.strerror}: choose another --run.directory"
        ) from error
    return candidate


def _claimed(folder: Path, only_new: bool) -> bool:
    """Makes a folder, or takes one without files, as a run that was killed while it began leaves it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return not only_new and _holds_no_files(folder)
    return True


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, or of one that was killed while it began."""
    return (folder / "config.toml").is_file() or _holds_no_files(folder)


def _holds_no_files(folder: Path) -> bool:
    return folder.is_dir() and all(path.is_dir() or path == folder / LOCK for path in folder.rglob("*"))


class RunLock:
    """Right of one process to write to a run's folder, until `release` or the end of the process.

    It is a lock of the open file .lock: the kernel gives it back when the process ends, however that happens, and NFS
    keeps it on the server for all hosts. A POSIX record lock, which any other close of the file in this process would
    give back, takes its place where there is none. The file stays, and says which process has or had the lock.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._file: IO[str] | None = None

    def take(self, folder: Path, same_job: bool = False) -> None:
        """Takes the lock of a folder, unless this object has it already; from another one in this process at once.

        Args:
            same_job: the lock may be held by an earlier attempt of this job, or by an earlier rank 0, as it may by an
                earlier start of the scheduler's job. It gets 30 s to end; after that the lock is taken from it if it
                is on another host: that host is lost. Any other process on another host gets 100 s.

        Raises:
            RunDirectoryError: another process holds it, or it cannot be written.
        """
        if self.folder == folder:
            return
        for other in [lock for lock in _taken if lock.folder == folder]:
            other.release()  # of a start that has failed
        path, begin_s, told = folder / LOCK, time.monotonic(), False
        try:
            while not self._locked(path):
                holder = _holder(path)
                elsewhere = _is_elsewhere(holder)
                earlier = same_job or _of_same_scheduled_job(holder)
                wait_s = LEASE_S if earlier else EXPIRY_S if elsewhere else 0.0
                process, host, since = (holder.get(key, "?") for key in ("process", "host", "since"))
                by = f"process {process} on {host} since {since}"
                if time.monotonic() < begin_s + wait_s:
                    if elsewhere and not told:
                        why = f"waiting up to {wait_s:g} s: if that host is lost, its lock expires"
                        print(f"ringtrain: {folder}: in use by {by}: {why}", file=sys.stderr, flush=True)
                        told = True
                    time.sleep(0.2)
                elif earlier and elsewhere:
                    path.unlink(missing_ok=True)  # another file, which the server has no lock for
                else:
                    raise RunDirectoryError(
                        f"{folder}: in use by {by}: wait until it ends, or choose another --run.name; if that host is"
                        f" lost, delete {path}"
                    )
        except OSError as error:
            raise RunDirectoryError(
                f"{path}: cannot be written: {error.strerror}: choose another --run.directory"
            ) from error
        self.folder = folder
        _taken.add(self)

    def _locked(self, path: Path) -> bool:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            return False
        except OSError as error:
            why = f"the file system has no locks ({error.strerror}): make sure that no other job has this --run.name"
            print(f"ringtrain: {path}: {why}", file=sys.stderr, flush=True)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.close()  # it was deleted in this moment
            return self._locked(path)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(json.dumps(_this_process() | {"since": since}) + "\n")
        file.flush()
        self._file = file
        return True

    def release(self) -> None:
        """Gives the lock back, if this process has it."""
        self._close()
        self.folder = None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


_taken: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in _taken:
        lock._close()


# The lock is held until every process that has the open file has closed it: one that was forked must not have it.
os.register_at_fork(after_in_child=_close_in_child)


def _lock(file: IO[str]) -> None:
    whole = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
    except (BlockingIOError, PermissionError):
        raise
    except OSError:  # the kernel or the file system has no such locks
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _this_process() -> dict[str, Any]:
    """Host, boot, process and the scheduler's job of this process, as a lock's file has them."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "process": os.getpid(),
        "job": " ".join(os.environ[name] for name in SCHEDULED_JOB if os.environ.get(name)),
        "requeued": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def _is_elsewhere(holder: Mapping[str, Any]) -> bool:
    """Whether a lock's holder is on another host: by its name, or by its boot where two have one name."""
    own = _this_process()
    return any(holder.get(key) not in (None, "", own[key]) for key in ("host", "boot"))


def _of_same_scheduled_job(holder: Mapping[str, Any]) -> bool:
    """Whether a lock's holder belongs to an earlier start of the scheduler's job that this process belongs to."""
    own = _this_process()
    if not own["job"] or holder.get("job") != own["job"]:
        return False
    # Slurm counts its requeues: within one, the holder is another launch, which may still train.
    return "SLURM_JOB_ID" not in os.environ or holder.get("requeued") != own["requeued"]


def _holder(path: Path) -> dict[str, Any]:
    """Host, process and begin of the process that has a lock, as far as they are known."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Recorder(keras.callbacks.Callback):
    """Writes down and shows how training goes; for rank 0, after every callback that adds to an epoch's metrics.

    Speed is measured between the end of the first step (in which TensorFlow traces the model) and the end of the last,
    without the time between epochs, in which ranks evaluate.

    Args:
        folder: the run's.
        progress: shows it.
        numbers: of the run. An epoch that is broken off is not recorded.
        clock: counts the steps; what the folder holds of later ones than it begins with is forgotten.
        options: what else is written down.
        gradient_norm: of the last update, if it is tracked. It is computed for steps that are written down.
    """

    def __init__(
        self,
        folder: Path,
        progress: Progress,
        numbers: Numbers,
        clock: Any,
        options: TrackingConfig,
        gradient_norm: Any = None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.progress = progress
        self.options = options
        self.gradient_norm = gradient_norm
        self.accumulation_steps = numbers.accumulation_steps
        self.images_per_step = numbers.batch_size * numbers.num_ranks
        self.clock = clock
        self.first_step = self.global_step = clock.global_step
        self.timed_steps = 0
        self.timed_s = 0.0
        self.complained = False
        self.unwritten: dict[str, list[str]] = {}
        self.epochs = _records_until(folder / METRICS, self.first_step)
        _records_until(folder / STEPS, self.first_step)

    @property
    def images_per_s(self) -> float:
        """Samples that all ranks together trained per second, over the whole run."""
        return self.timed_steps * self.images_per_step / self.timed_s if self.timed_s else math.nan

    def on_train_begin(self, logs: Any = None) -> None:
        self.summaries = tf.summary.create_file_writer(str(self.folder / "tensorboard"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.epoch_begin_s = self.epoch_start_s = self.epoch_end_s = time.perf_counter()
        self.steps_before = self.global_step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.gradient_norm is not None:
            # Of the last update before a line is written, of steps.jsonl or at the epoch's end.
            until_lines = -(self.global_step + 1) % self.options.every_steps, self.params["steps"] - 1 - batch
            self.gradient_norm.want(min(until_lines) < self.accumulation_steps)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.epoch_end_s = time.perf_counter()
        self.global_step += 1
        if self.global_step == self.first_step + 1:
            self.epoch_start_s, self.steps_before = self.epoch_end_s, self.global_step
        figures = "  ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items() if np.ndim(value) == 0)
        self.progress.step(self.global_step, self.epoch, figures)
        every = self.options.every_steps
        if every and self.global_step % every == 0:
            self._record(STEPS, "steps/", self.epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps, seconds = self.global_step - self.steps_before, self.epoch_end_s - self.epoch_start_s
        self.timed_steps += steps
        self.timed_s += seconds
        if not self.clock.epoch_complete:
            return  # broken off
        train_s, evaluate_s = self.epoch_end_s - self.epoch_begin_s, time.perf_counter() - self.epoch_end_s
        self.epochs.append(self._record(METRICS, "", epoch, logs, train_s=train_s, evaluate_s=evaluate_s))
        with self._disk_may_be_full():
            if self.options.histograms:
                with self.summaries.as_default():
                    for weight in self.model.trainable_weights:
                        tf.summary.histogram(weight.path, weight.value, step=self.global_step)
            self.summaries.flush()
        self.progress.epoch(epoch, figures_of(self.epochs[-1]))

    def on_train_end(self, logs: Any = None) -> None:
        with self._disk_may_be_full():
            self._append(METRICS)
            self._append(STEPS)
            self.summaries.close()

    @contextlib.contextmanager
    def _disk_may_be_full(self) -> Iterator[None]:
        """Records wait in memory then; training goes on."""
        try:
            yield
        except OSError as error:
            self._complain(error.strerror or str(error))
        except tf.errors.OpError as error:  # TensorBoard's files
            self._complain(error.message)

    def _complain(self, why: str) -> None:
        if not self.complained:
            print(f"ringtrain: {self.folder}: cannot be written: {why}; training goes on", file=sys.stderr, flush=True)
        self.complained = True

    def _append(self, file_name: str, *lines: str) -> None:
        """Adds lines to a file, with those that found no room before."""
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
        """Adds a line to a file, and its numbers to TensorBoard."""
        steps, seconds = self.global_step - self.steps_before, self.epoch_end_s - self.epoch_start_s
        record = {
            "epoch": epoch + 1,
            "global_step": self.global_step,
            "time_s": time.time(),
            **{name: np.asarray(value).tolist() for name, value in (logs or {}).items() if name != "lr"},
            "learning_rate": last_learning_rate(self.model.optimizer),
            **loss_scale_of(self.model.optimizer),
            **({} if self.gradient_norm is None else {"gradient_norm": float(self.gradient_norm)}),
            "images_per_s": steps * self.images_per_step / seconds if seconds else math.nan,
            **more,
        }
        with self._disk_may_be_full():
            self._append(file_name, json.dumps(plain(record)))
        with self._disk_may_be_full(), self.summaries.as_default():
            for name, value in record.items():
                if name not in ("global_step", "time_s") and np.ndim(value) == 0:
                    tf.summary.scalar(prefix + name, value, step=self.global_step)
        return record


def _records_until(path: Path, global_step: int) -> list[dict[str, Any]]:
    """Reads back an earlier process' records, and cuts the file where the run goes on."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(*INVALID):  # the last line of a process that was killed
            record = parse_json(line)
            if record["global_step"] <= global_step:
                records.append(record)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    os.replace(unfinished, path)
    return records


def loss_scale_of(optimizer: Any) -> dict[str, float]:
    """The present factor of mixed_float16's loss, under its name, where there is one."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return {"loss_scale": float(optimizer.dynamic_scale)} if scaled else {}


def figures_of(record: Mapping[str, Any]) -> list[str]:
    """An epoch's record as a person reads it, what matters least last.

    A model with a `train_step` of its own may have neither loss nor accuracy: then the first of its metrics are shown.
    """
    usual = {
        "loss": "loss {:.4f}",
        "accuracy": "accuracy {:.2%}",
        "test_loss": "test loss {:.4f}",
        "test_accuracy": "accuracy {:.2%}",
    }
    if missing := usual.keys() - record.keys():
        names = [name for name, value in record.items() if name not in NO_METRICS and np.ndim(value) == 0]
        shown = [f"{name.replace('_', ' ')} {record[name]:.4f}" for name in names[: len(missing) + 2]]
    else:
        shown = [text.format(record[name]) for name, text in usual.items()]
    return [*shown, speed(record["images_per_s"])]


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json.

    Args:
        folder: the run's.
        summary: what came out; numbers that are not finite are written as null.
    """
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False)
    unfinished = folder / "summary.unfinished"
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, folder / "summary.json")


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns summary.json, or {} if there is none or it is incomplete."""
    path = folder / "summary.json"
    try:
        summary = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}


def draw_curves(folder: Path, epochs: Sequence[Mapping[str, Any]], schedule: Schedule, steps_per_epoch: int) -> None:
    """Draws curves.png: two metrics over the epochs, in training and on the test data, and the learning rate.

    The metrics are loss and accuracy, or the first that the model has.

    Args:
        folder: the run's.
        epochs: the records of a Recorder.
        schedule: the learning rate as it was planned; those in the records are dots on it.
        steps_per_epoch: of the run.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.5), layout="constrained")
    *panels, rates = figure.subplots(1, 3)
    steps, planned = curve(schedule)
    rates.plot(steps / steps_per_epoch, planned, label="planned")
    # A record says what the epoch's last step had, and step 0 is the first.
    rates.plot(
        [(r["global_step"] - 1) / steps_per_epoch for r in epochs],
        [r["learning_rate"] for r in epochs],
        ".",
        label="trained with",
    )
    highest = max([*planned, *(record["learning_rate"] for record in epochs)])
    rates.set(xlabel="epoch", ylabel="learning rate", ylim=(0, 1.1 * highest or 1))  # a constant one not on the edge
    rates.grid(alpha=0.3)
    rates.legend()
    # A model with a train_step of its own may have neither.
    names = dict.fromkeys(["loss", "accuracy", *(name for record in epochs for name in record)])
    drawn = [name for name in names if any(f"test_{name}" in record for record in epochs)] or [*names]
    for axes in panels[len(drawn) :]:
        figure.delaxes(axes)
    for axes, metric in zip(panels, drawn, strict=False):
        numbers = [record["epoch"] for record in epochs]
        for name, label in ((metric, "training"), (f"test_{metric}", "test")):
            axes.plot(numbers, [record.get(name, math.nan) for record in epochs], marker=".", label=label)
        axes.set(xlabel="epoch", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(folder / "curves.png", dpi=120)


def check_packages() -> None:
    """Raises MissingDependency now, not after hours of training, where a package for the run's files is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency("matplotlib draws curves.png and is not installed: pip install 'ringtrain[train]'")


def versions() -> dict[str, str]:
    """What this process runs on; of Horovod and mpi4py, what its ranks talk by."""
    by = "mpi4py" if os.environ.get(COLLECTIVES) in ("mpi4py", ALONE) else "horovod"
    return {
        "ringtrain": ringtrain.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        by: importlib.metadata.version(by),
        "numpy": importlib.metadata.version("numpy"),
    }


def plain(value: Any) -> Any:
    """The value as JSON can say it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
