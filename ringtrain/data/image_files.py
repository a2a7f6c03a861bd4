"""Images that stay in their files until they are trained, and those in a folder per class."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.config import DataConfig
from ringtrain.data import row_order
from ringtrain.data.augment import picture
from ringtrain.data.dataset import DataSet, Split, spaced
from ringtrain.errors import DataError
from ringtrain.protocol import cores

if TYPE_CHECKING:
    import tensorflow as tf

MAX_THREADS = 16
LINES_ABOUT_SKIPPED = 10
ENDINGS = (".jpg", ".jpeg", ".png")
TEST_FOLDERS = ("val", "test")
DEFAULT_SIZE = 224


@dataclass
class Unreadable:
    """Samples and files that this process cannot read."""

    skip: bool
    """Whether to skip and count them; otherwise they end training."""
    skipped: set[str] = field(default_factory=set)
    """Names of samples and files."""
    numbers: set[int] = field(default_factory=set)
    """Numbers of the samples among them that have one."""
    error: DataError | None = None

    def add(self, name: str, problem: str) -> None:
        """Records an unreadable sample or file by its location, `name`. Raises DataError unless it may be skipped."""
        if not self.skip:
            self.error = self.error or DataError(
                f"{name}: {problem}: fix or remove it, or skip unreadable samples with --data.on-error skip"
            )
            raise self.error
        if name not in self.skipped and len(self.skipped) < LINES_ABOUT_SKIPPED:
            print(f"ringtrain: skipped {name}: {problem}", file=sys.stderr, flush=True)
        self.skipped.add(name)


@dataclass(frozen=True)
class Images(Split):
    """Split of images in files; only their locations are in memory."""

    num_images: int
    read: Callable[[tf.Tensor], tf.data.Dataset]
    """Maps a sample number, int64 [], to one pair of encoded image, string [], and class, int64 []."""
    name_of: Callable[[int], str]
    """Location of a sample, for messages."""
    order: Callable[[int, int, int], NDArray[np.int64]]
    num_classes: int
    size: int
    """Height and width after resizing, in pixels."""
    augment: bool
    """Random crops and flips in training."""
    unreadable: Unreadable
    first_label: int = 0
    """Class 0 as numbered in the files, for messages."""

    @property
    def skipped(self) -> frozenset[str]:
        return frozenset(self.unreadable.skipped)

    @property
    def error(self) -> DataError | None:
        return self.unreadable.error

    def __len__(self) -> int:
        return self.num_images

    def num_readable(self, numbers: range) -> int:
        return len(numbers) - sum(number in numbers for number in self.unreadable.numbers)

    def checksum(self) -> int:
        """Checksum of 16 images and their labels, evenly spaced."""
        import tensorflow as tf

        order = tf.data.Dataset.from_tensor_slices(spaced(len(self), 16))
        checksum = len(self)
        for encoded, label in order.flat_map(self.read).ignore_errors():
            checksum = zlib.crc32(encoded.numpy() + str(int(label)).encode(), checksum)
        return checksum

    def epoch_order(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.order(global_batch_size, seed, epoch)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        """Reads samples in parallel, in order. A crop depends on seed, epoch and sample only: not on ranks or a resume.

        An error would lose the number of an unreadable sample. Its batch comes without it, and with the others' places.
        """
        import tensorflow as tf

        threads = min(cores.num_threads(tf.config.threading.get_intra_op_parallelism_threads()), MAX_THREADS)
        training = seed is not None

        def of_batch(epoch: tf.Tensor, numbers: tf.Tensor) -> tf.data.Dataset:
            def read(place: tf.Tensor, number: tf.Tensor) -> tf.data.Dataset:
                return self.read(number).map(lambda encoded, label: (place, number, encoded, label)).ignore_errors()

            def decode(place: tf.Tensor, number: tf.Tensor, encoded: tf.Tensor, label: tf.Tensor) -> tuple[Any, ...]:
                crop = None
                if training and self.augment:
                    crop = tf.stack([tf.constant(seed, tf.int64), epoch * self.num_images + number])
                in_range = tf.debugging.Assert((label >= 0) & (label < self.num_classes), [label])
                with tf.control_dependencies([in_range] if in_range is not None else []):
                    return place, picture(encoded, self.size, crop), label

            numbered = tf.data.Dataset.from_tensor_slices((tf.range(tf.size(numbers, tf.int64)), numbers))
            samples = numbered.interleave(read, cycle_length=threads, num_parallel_calls=threads, deterministic=True)
            decoded = samples.map(decode, num_parallel_calls=threads, deterministic=True).ignore_errors()
            ints = tf.zeros([0], tf.int64)
            nothing = tf.data.Dataset.from_tensors((ints, tf.zeros([0, self.size, self.size, 3]), ints))
            good = decoded.batch(batch_size).concatenate(nothing).take(1)
            return good.map(lambda *values: (numbers, *values))

        # Two batches at a time: the last samples of one would leave some of several threads without work.
        together = min(2, threads)
        batches = order.interleave(of_batch, cycle_length=together, num_parallel_calls=together, deterministic=True)
        batches = batches.map(functools.partial(self._whole, batch_size=batch_size if training else None))
        if training:
            return batches
        if self.unreadable.skip:
            return batches.filter(lambda images, labels: tf.size(labels) > 0)
        return batches.apply(tf.data.experimental.assert_cardinality(order.cardinality()))

    def _whole(
        self, numbers: tf.Tensor, places: tf.Tensor, images: tf.Tensor, labels: tf.Tensor, batch_size: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Reports the samples that a batch lacks; in training, of batches of `batch_size`, others replace them."""
        import tensorflow as tf

        def report(missing: NDArray[np.int64], anything_left: np.bool_) -> NDArray[np.bool_]:
            with contextlib.suppress(DataError):  # the error is kept, and raised on all ranks together
                for number in missing.tolist():
                    self.unreadable.numbers.add(number)
                    self.unreadable.add(self.name_of(number), self._problem(number))
            if batch_size and not anything_left:
                message = f"{self.name_of(int(missing[0]))}: and no other sample of its batch can be read"
                self.unreadable.error = self.unreadable.error or DataError(message)
            return np.array(True)

        def with_others() -> tuple[tf.Tensor, tf.Tensor]:
            num_good = tf.size(places)
            readable = tf.scatter_nd(places[:, tf.newaxis], tf.ones_like(places), tf.shape(numbers, tf.int64)) > 0
            reported = tf.numpy_function(report, [tf.boolean_mask(numbers, ~readable), num_good > 0], tf.bool)
            with tf.control_dependencies([reported]):
                if not batch_size:
                    return tf.identity(images), tf.identity(labels)
                # Every step of every rank keeps its number of samples. If there are none, the error ends training.
                others = tf.range(batch_size) % tf.maximum(1, num_good)
                chosen = tf.where(readable, tf.cumsum(tf.cast(readable, tf.int32), exclusive=True), others)
                blanks = tf.cast(num_good == 0, tf.int32)
                padded = tf.pad(images, [[0, blanks], [0, 0], [0, 0], [0, 0]]), tf.pad(labels, [[0, blanks]])
                return tf.gather(padded[0], chosen), tf.gather(padded[1], chosen)

        is_whole = tf.equal(tf.size(places), tf.size(numbers))
        images, labels = tf.cond(is_whole, lambda: (images, labels), with_others)
        return tf.ensure_shape(images, [batch_size, *images.shape[1:]]), tf.ensure_shape(labels, [batch_size])

    def _problem(self, number: int) -> str:
        """Reads a sample again by itself, to find out what is wrong with it."""
        import tensorflow as tf

        try:
            for encoded, label in tf.data.Dataset.from_tensors(np.int64(number)).flat_map(self.read):
                if not 0 <= label < self.num_classes:
                    first = self.first_label
                    return f"label {label + first}, expected {first} to {first + self.num_classes - 1}"
                picture(encoded, self.size, None)
                return "damaged outside of its center"
            return "truncated"
        except tf.errors.DataLossError:
            return "corrupt: its checksum differs, or it is truncated"
        except tf.errors.OpError as error:
            return text_of(error)


def text_of(error: Exception) -> str:
    """What an error of an operation says, in one line, without the operation's place in a graph."""
    text = re.sub(r"\{\{.*?\}\} ?| \[Op:.*", "", getattr(error, "message", str(error))).strip()
    return text.partition("\n")[0].rstrip(".") or type(error).__name__


# ---- train/<class>/*.jpg, and val/ or test/ with the same classes ----------------------------------------------------


def image_folder(config: DataConfig) -> DataSet:
    """Lists the image files; each image is read during training, by the rank that trains it.

    Raises DataError if a folder is missing, empty or unreadable, or if training and test classes differ.
    """
    if not config.dir:
        raise DataError(f"{config.name}: give its directory with --data.dir")
    root = Path(config.dir)
    classes = class_names(root / "train")
    size = config.image_size or DEFAULT_SIZE

    def split(folder: Path, augment: bool) -> Images:
        import tensorflow as tf

        files: list[bytes] = []
        counts = []
        for name in classes:
            of_class = [os.fsencode(path) for path in pictures(folder / name)]
            files += of_class
            counts.append(len(of_class))
        with tf.device("CPU"):
            paths = tf.constant(files)
            labels = tf.constant(np.repeat(np.arange(len(classes)), counts))

        def read(number: tf.Tensor) -> tf.data.Dataset:
            file = tf.data.Dataset.from_tensors(number)
            return file.map(lambda number: (tf.io.read_file(tf.gather(paths, number)), tf.gather(labels, number)))

        return Images(
            num_images=len(paths),
            read=read,
            name_of=lambda number: os.fsdecode(paths[number].numpy()),
            order=functools.partial(row_order.epoch_order, len(paths)),
            num_classes=len(files),
            size=size,
            augment=augment,
            unreadable=Unreadable(config.on_error == "skip"),
        )

    test = split(evaluation_folder(root, classes), augment=False)
    return DataSet(split(root / "train", config.augment), test, len(classes), (size, size, 3))


def class_names(folder: Path) -> list[str]:
    """Returns the sorted subfolders, whose indices are the classes. Raises DataError if there are none."""
    names = sorted(path.name for path in _entries(folder) if path.is_dir())
    if not names:
        raise DataError(f"{folder}: contains no directories, expected one per class")
    return names


def evaluation_folder(root: Path, classes: list[str]) -> Path:
    """Returns the folder of the test images. Raises DataError if there is none or its classes differ from training."""
    for folder in (root / name for name in TEST_FOLDERS):
        if folder.exists():
            names = class_names(folder)
            if names != classes:
                odd = sorted(set(names) ^ set(classes))[0]
                raise DataError(
                    f"{folder}: expected the same classes as in {root / 'train'}: only one of them has {odd!r}"
                )
            return folder
    raise DataError(f"{root}: contains neither {' nor '.join(TEST_FOLDERS)}, expected a directory of test images")


def pictures(folder: Path) -> list[Path]:
    """Returns the image files of a folder, sorted. Raises DataError if it cannot be read or has none."""
    paths = sorted(path for path in _entries(folder) if path.suffix.lower() in ENDINGS)
    if not paths:
        raise DataError(f"{folder}: contains no images, expected files that end in {', '.join(ENDINGS)}")
    return paths


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
