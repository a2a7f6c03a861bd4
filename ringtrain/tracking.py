"""The run's folder and what is written to it: only rank 0 writes, except for each rank's own log."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import ringtrain
from ringtrain.display import Progress, speed
from ringtrain.errors import RunDirectoryError


def default_name(data_name: str, now_s: float | None = None) -> str:
    """A run's name where none was given, e.g. "digits-20261120-101500".

    Args:
        data_name: of the data set.
        now_s: seconds since 1970; None: now.
    """
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in data_name)
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"


def create_folder(parent: Path, name: str, number_if_taken: bool) -> Path:
    """Makes the folder of a run, and those inside it.

    Args:
        parent: the folder of all runs; made if it is missing.
        name: of the run.
        number_if_taken: take name-2, name-3, ... where there is one already; else that is an error.

    Returns:
        The new folder.

    Raises:
        RunDirectoryError: it exists already and holds something, or cannot be made.
    """
    candidate, number = parent / name, 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
            if not number_if_taken:
                raise RunDirectoryError(f"{candidate}: exists already: choose another --run.name, or delete it")
            number += 1
            candidate = parent / f"{name}-{number}"
        for folder in (candidate, candidate / "checkpoints", candidate / "tensorboard", candidate / "logs"):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{candidate}: cannot be created: {error.strerror}: choose another --run.directory"
        ) from error
    return candidate


class Recorder(keras.callbacks.Callback):
    """Writes down and shows how training goes; for rank 0, after every callback that adds to an epoch's metrics.

    Speed is measured between the end of the first step (in which TensorFlow traces the model) and the end of the last,
    without the time between epochs, in which ranks evaluate.

    Args:
        folder: the run's.
        progress: shows it.
        global_batch_size: samples per step on all ranks.
    """

    def __init__(self, folder: Path, progress: Progress, global_batch_size: int) -> None:
        super().__init__()
        self.folder = folder
        self.progress = progress
        self.global_batch_size = global_batch_size
        self.global_step = 0
        self.timed_steps = 0
        self.timed_s = 0.0
        self.epochs: list[dict[str, Any]] = []

    @property
    def images_per_s(self) -> float:
        """Samples that all ranks together trained per second, over the whole run."""
        return self.timed_steps * self.global_batch_size / self.timed_s if self.timed_s else math.nan

    def on_train_begin(self, logs: Any = None) -> None:
        self.summaries = tf.summary.create_file_writer(str(self.folder / "tensorboard"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.epoch_start_s = self.epoch_end_s = time.perf_counter()
        self.steps_before = self.global_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.epoch_end_s = time.perf_counter()
        self.global_step += 1
        if self.global_step == 1:
            self.epoch_start_s, self.steps_before = self.epoch_end_s, 1
        figures = "  ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        self.progress.step(self.global_step, self.epoch, figures)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps, seconds = self.global_step - self.steps_before, self.epoch_end_s - self.epoch_start_s
        self.timed_steps += steps
        self.timed_s += seconds
        record = {
            "epoch": epoch + 1,
            "global_step": self.global_step,
            "time_s": time.time(),
            **{name: float(value) for name, value in (logs or {}).items() if name != "lr"},
            "learning_rate": float(self.model.optimizer.learning_rate),
            "images_per_s": steps * self.global_batch_size / seconds if seconds else math.nan,
        }
        self.epochs.append(record)
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")
        with self.summaries.as_default():
            for name, value in record.items():
                if name not in ("global_step", "time_s"):
                    tf.summary.scalar(name, value, step=self.global_step)
        self.summaries.flush()
        self.progress.epoch(epoch, figures_of(record))

    def on_train_end(self, logs: Any = None) -> None:
        self.summaries.close()


def figures_of(record: Mapping[str, Any]) -> str:
    """An epoch's record as a person reads it."""
    return (
        f"loss {record['loss']:.4f}  accuracy {record['accuracy']:7.2%}"
        f"  test loss {record['test_loss']:.4f}  test accuracy {record['test_accuracy']:7.2%}"
        f"  {speed(record['images_per_s'])}"
    )


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json.

    Args:
        folder: the run's.
        summary: what came out; numbers that are not finite are written as null.
    """
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")


def draw_curves(folder: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Draws curves.png: loss and accuracy over the epochs, in training and on the test data.

    Args:
        folder: the run's.
        epochs: the records of a Recorder.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        numbers = [record["epoch"] for record in epochs]
        axes.plot(numbers, [record[metric] for record in epochs], marker=".", label="training")
        axes.plot(numbers, [record[f"test_{metric}"] for record in epochs], marker=".", label="test")
        axes.set(xlabel="epoch", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(folder / "curves.png", dpi=120)


def versions() -> dict[str, str]:
    """What this process runs on."""
    return {
        "ringtrain": ringtrain.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": importlib.metadata.version("horovod"),
        "numpy": importlib.metadata.version("numpy"),
    }


def git_revision(start: Path) -> str | None:
    """The commit that a folder's work tree stands on.

    Args:
        start: a folder in the work tree.

    Returns:
        Its hash; None outside of a work tree and before its first commit.
    """
    for folder in (start, *start.parents):
        git = folder / ".git"
        if git.is_dir():
            break
    else:
        return None
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        branch = head.removeprefix("ref: ")
        if (git / branch).exists():
            return (git / branch).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {branch}")), None)
    except OSError:
        return None


def plain(value: Any) -> Any:
    """The value as JSON can say it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
