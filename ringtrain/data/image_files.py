"""Images that stay in their files until they are trained."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.augment import picture
from ringtrain.data.dataset import Split, spaced
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

MAX_THREADS = 16
LINES_ABOUT_SKIPPED = 10


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

    def num_readable(self, numbers: NDArray[np.int64]) -> int:
        return len(set(numbers.tolist()) - self.unreadable.numbers)

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

        An unreadable sample is returned as a marked blank: an exception would lose its number.
        """
        import tensorflow as tf

        threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        threads = min(threads, MAX_THREADS)

        def numbered(epoch: tf.Tensor, numbers: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(numbers).map(lambda number: (epoch, number))

        def sample(epoch: tf.Tensor, number: tf.Tensor) -> tf.data.Dataset:
            crop = None
            if seed is not None and self.augment:
                crop = tf.stack([tf.constant(seed, tf.int64), epoch * self.num_images + number])

            def decode(encoded: tf.Tensor, label: tf.Tensor) -> tuple[Any, ...]:
                in_range = tf.debugging.Assert((label >= 0) & (label < self.num_classes), [label])
                with tf.control_dependencies([in_range] if in_range is not None else []):
                    return number, True, picture(encoded, self.size, crop), label

            blank = (number, False, tf.zeros([self.size, self.size, 3]), tf.constant(0, tf.int64))
            good = self.read(number).map(decode).ignore_errors()
            return good.concatenate(tf.data.Dataset.from_tensors(blank)).take(1)

        samples = order.flat_map(numbered).interleave(
            sample, cycle_length=threads, num_parallel_calls=threads, deterministic=True
        )
        training = seed is not None
        batches = samples.batch(batch_size, drop_remainder=training)
        batches = batches.map(functools.partial(self._readable, training=training))
        if training:
            return batches
        if self.unreadable.skip:
            return batches.filter(lambda images, labels: tf.size(labels) > 0)
        return batches.apply(tf.data.experimental.assert_cardinality(order.cardinality()))

    def _readable(
        self, numbers: tf.Tensor, readable: tf.Tensor, images: tf.Tensor, labels: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Reports the blanks of a batch, and replaces them in training or drops them in evaluation."""
        import tensorflow as tf

        def report(blanks: NDArray[np.int64], anything_left: np.bool_) -> NDArray[np.bool_]:
            with contextlib.suppress(DataError):  # the error is kept, and raised on all ranks together
                for number in blanks.tolist():
                    self.unreadable.numbers.add(number)
                    self.unreadable.add(self.name_of(number), self._problem(number))
            if training and not anything_left:
                message = f"{self.name_of(int(blanks[0]))}: and no other sample of its batch can be read"
                self.unreadable.error = self.unreadable.error or DataError(message)
            return np.array(True)

        def without_blanks() -> tuple[tf.Tensor, tf.Tensor]:
            blanks = tf.boolean_mask(numbers, ~readable)
            anything_left = tf.reduce_any(readable)
            with tf.control_dependencies([tf.numpy_function(report, [blanks, anything_left], tf.bool)]):
                good = tf.cast(tf.where(readable)[:, 0], tf.int32)
            if not training:
                return tf.gather(images, good), tf.gather(labels, good)
            # others of the batch replace them: every step of every rank keeps its number of samples
            places = tf.range(tf.size(numbers))
            good = tf.cond(anything_left, lambda: good, lambda: places)
            chosen = tf.where(readable, places, tf.gather(good, places % tf.size(good)))
            return tf.gather(images, chosen), tf.gather(labels, chosen)

        return tf.cond(tf.reduce_all(readable), lambda: (images, labels), without_blanks)

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
            return re.sub(r"\{\{.*?\}\} | \[Op:.*", "", error.message).strip().splitlines()[0]
