"""Data set of a training and a test split, in memory or read on demand, and their batches as tf.data pipelines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import augment, python_calls, row_order
from ringtrain.data.row_order import evaluation_shard
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf


class Split:
    """Samples, numbered from 0: `Samples` and `Shard` in memory, or `Images` read from files."""

    has_classes = True
    """whether each sample has an integer class; else the data are what `ringtrain.fit` takes"""
    is_of_rank_0 = False
    """whether rank 0 alone reads them"""
    is_shard = False
    """whether they are those of this rank alone, instead of all ranks' together"""
    may_end_early = False
    """whether an epoch can have fewer batches than the first"""
    advice = (
        "give random operations of the dataset a seed, the same on all ranks, or pass ringtrain.from_rank_0(dataset);"
        " do not shard it"
    )
    """advice for the error about ranks with different batches"""

    @property
    def skipped(self) -> frozenset[str]:
        """Names of the samples that this process could not read and skipped."""
        return frozenset()

    @property
    def error(self) -> DataError | None:
        """Error of the first sample that this process could not read, if it was not to be skipped; it ends the run."""
        return None

    @property
    def large(self) -> list[NDArray[Any]]:
        """Arrays in memory whose rows are read where they are."""
        return []

    def __len__(self) -> int:
        raise NotImplementedError

    def num_readable(self, numbers: range) -> int:
        """Returns the number of these samples that this process has not found unreadable so far."""
        return len(numbers)

    def shard(self, number: int, num_shards: int, whole: int = 1) -> range:
        """Samples of a part of an evaluation; see `evaluation_shard`."""
        if self.is_shard:
            return range(len(self))
        return evaluation_shard(len(self), number, num_shards, whole)

    def part(self, numbers: Sequence[int]) -> tf.data.Dataset | None:
        """Batches with these numbers, if samples are stored in batches."""
        return None

    def begin_evaluation(self, number: int) -> None:
        """Begins to read for an evaluation, counted from 0."""

    def end_evaluation(self) -> None:
        """Reads what is left, as the other ranks do."""

    def pass_over(self, epoch: int, was_stopped: bool = False) -> None:
        """Does to shuffles and hooks, which other data may share, what an epoch has done, counted from 0.

        was_stopped: Whether a callback has ended training within it.
        """

    def pass_over_evaluation(self, number: int) -> None:
        """Does to them what an evaluation has done, counted from 0."""

    def end_epoch(self, epoch: int, was_stopped: bool = False) -> None:
        """Does to them what Keras does at the end of an epoch of training, before its evaluation."""

    def checksum(self) -> int:
        """Checksum by which ranks compare their data; without one, the number of samples."""
        return len(self)

    def epoch_order(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the sample numbers of one epoch, [steps, global batch size], all different, equal on all ranks."""
        raise NotImplementedError

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        """Reads batches: pairs of inputs, float32 [up to batch_size, ...], and labels, int64.

        An unreadable sample does not end the pipeline, since other ranks would wait for this one forever: in training
        another sample of its batch replaces it, in evaluation it is dropped. `StopTogether` ends the run.

        Args:
            order: pairs of an epoch, int64 [], and the sample numbers of one batch, int64 [up to batch_size].
            batch_size: samples per step on this rank.
            seed: seed of the run, for random crops and flips; None: evaluation, which has none.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Samples(Split):
    """Inputs with their labels, in memory."""

    inputs: NDArray[Any]
    """[samples, ...]; uint8 values are pixels and are trained as float32 from 0 to 1."""
    labels: NDArray[np.int64]
    """[samples], classes from 0."""
    padding: int = 0
    """Maximum shift, in pixels, of images in training, half of which are also flipped; 0: unchanged images."""

    @property
    def large(self) -> list[NDArray[Any]]:
        return [self.inputs] if python_calls.is_large(self.inputs) else []

    def __len__(self) -> int:
        return len(self.labels)

    def checksum(self) -> int:
        """Checksum of all labels and 256 inputs, evenly spaced."""
        inputs = np.ascontiguousarray(self.inputs[spaced(len(self), 256)])
        return zlib.crc32(inputs.tobytes(), zlib.crc32(self.labels.tobytes()))

    def first(self, num_samples: int) -> Samples:
        """The same, of which only the first samples are used."""
        return replace(self, inputs=self.inputs[:num_samples], labels=self.labels[:num_samples])

    def epoch_order(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return row_order.epoch_order(len(self), global_batch_size, seed, epoch)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        import tensorflow as tf

        large = self.large
        with tf.device("CPU"):  # leaves GPU memory to the model
            inputs, labels = tf.constant(self.inputs[:0] if large else self.inputs), tf.constant(self.labels)

        def batch_of(epoch: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            if large:
                chosen = python_calls.rows(large, numbers)[0]
            else:
                chosen = tf.gather(inputs, numbers)
            if seed is not None and self.padding:
                draw = tf.stack([tf.constant(seed, tf.int64), epoch])
                chosen = augment.shifted(chosen, numbers, len(self), self.padding, draw)
            scale = 1 / 255 if inputs.dtype == tf.uint8 else 1
            return tf.cast(chosen, tf.float32) * scale, tf.gather(labels, numbers)

        return order.map(batch_of)


@dataclass(frozen=True)
class DataSet:
    """Training and test data of a run."""

    train: Split
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]

    @property
    def skipped(self) -> frozenset[str]:
        return self.train.skipped | self.test.skipped

    def first(self, num_samples: int) -> DataSet:
        """The same, of which only the first samples of each split are used; raises DataError if they are in files."""
        if not (isinstance(self.train, Samples) and isinstance(self.test, Samples)):
            raise DataError("data.max_samples: the samples are in files, not in memory: leave it out")
        return replace(self, train=self.train.first(num_samples), test=self.test.first(num_samples))

    def raise_unreadable(self) -> None:
        """Raises DataError for the first sample that this process could not read, if it was not to be skipped."""
        error = self.train.error or self.test.error
        if error is not None:
            raise error


def checked(name: str, train: tuple[Any, Any], test: tuple[Any, Any], num_classes: int = 0) -> DataSet:
    """Validates inputs [samples, ...] and labels [samples] or [samples, 1]; raises DataError if they are invalid.

    Images without a channel, [samples, height, width], get one. `num_classes` 0: the largest label + 1.
    """
    splits = []
    for split, (inputs, labels) in (("training", train), ("test", test)):
        inputs, labels = np.asarray(inputs), np.asarray(labels)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or labels.size == 0 or inputs.shape[:1] != labels.shape:
            one_hot = ""
            if labels.ndim > 1:
                one_hot = ": for one-hot labels use np.argmax(labels, axis=1), for others --model.loss"
            raise DataError(
                f"{name}: {split} data: got inputs of shape {inputs.shape} and labels of shape {labels.shape}, expected"
                f" one integer class per sample, shape {inputs.shape[:1]}, and at least one sample{one_hot}"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
            raise DataError(
                f"{name}: {split} data: got labels of {labels.dtype} from {labels.min()}, expected classes 0, 1, ...,"
                f" or --model.loss for other targets"
            )
        if num_classes and labels.max() >= num_classes:
            raise DataError(
                f"{name}: {split} data: sample {labels.argmax()} has label {labels.max()}, expected 0 to"
                f" {num_classes - 1}"
            )
        check_numbers(f"{name}: {split} data", inputs)
        if inputs.ndim == 3:
            inputs = inputs[..., np.newaxis]
        splits.append(Samples(inputs, labels.astype(np.int64)))
    shapes = [split.inputs.shape[1:] for split in splits]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"{name}: a training sample has shape {shapes[0]}, a test sample {shapes[1]}: expected the same"
        )
    largest = max(int(split.labels.max()) for split in splits)
    return DataSet(splits[0], splits[1], num_classes or largest + 1, shapes[0])


def check_numbers(where: str, inputs: NDArray[Any]) -> None:
    """Raises DataError, which begins with `where`, unless samples are finite numbers."""
    if inputs.dtype.kind not in "buif":
        raise DataError(f"{where}: got inputs of {inputs.dtype}, expected numbers")
    if inputs.dtype.kind == "f":
        for number, sample in enumerate(inputs):  # one by one: no second array of the data's size
            if not np.isfinite(sample).all():
                raise DataError(
                    f"{where}: sample {number} contains {'NaN' if np.isnan(sample).any() else 'an infinite value'}"
                )


def checksums(data_set: DataSet) -> dict[str, str]:
    """Returns a checksum per split, in words."""
    splits = {"training data": data_set.train, "test data": data_set.test}
    return {name: f"with checksum {split.checksum():08x}" for name, split in splits.items()}


def spaced(total: int, count: int) -> NDArray[np.int64]:
    """Returns up to `count` numbers below `total`, evenly spaced."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64))


# ---- batches as tf.data ------------------------------------------------------------------------------------------


def training_batches(
    samples: Split, batch_size: int, rank: int, size: int, seed: int, epochs: int, first_step: int = 0
) -> tf.data.Dataset:
    """Returns one rank's batches, of `batch_size` samples, in a run of `epochs`, from global step `first_step` on.

    They are pairs of inputs, float32 [batch_size, ...], and labels, int64 [batch_size]. Earlier batches are not read.
    """
    shard = rank * batch_size, (rank + 1) * batch_size
    return part_batches(samples, size * batch_size, size * batch_size, shard, seed, epochs, first_step)


def part_batches(
    samples: Split,
    global_batch_size: int,
    samples_per_step: int,
    part: tuple[int, int],
    seed: int,
    epochs: int,
    first_step: int = 0,
) -> tf.data.Dataset:
    """Returns one part of each step of a run, see `training_batches`.

    Args:
        global_batch_size: Samples per update, for which the epochs' order is made.
        samples_per_step: Samples per step on all ranks; it divides the global batch.
        part: First and end of the part. One without samples gets one sample of another rank.
    """
    steps_per_epoch = max(1, len(samples) // global_batch_size * global_batch_size // samples_per_step)
    first_epoch, step_in_epoch = divmod(first_step, steps_per_epoch)
    first, end = part
    if first == end:
        first, end = 0, 1

    def rows_of(epoch: np.int64) -> NDArray[np.int64]:
        steps = samples.epoch_order(global_batch_size, seed, int(epoch)).reshape(-1, samples_per_step)
        return steps[step_in_epoch if epoch == first_epoch else 0 :, first:end]

    order = _in_order(range(first_epoch, epochs), rows_of, end - first)
    return ahead(samples.batches(order, end - first, seed))


def evaluation_batches(samples: Split, numbers: range, batch_size: int) -> tf.data.Dataset:
    """Returns batches of the samples with these successive numbers; the last batch may be smaller."""
    import tensorflow as tf

    part = samples.part(numbers)
    if part is not None:
        return ahead(part)

    def numbers_of_batch(begin: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + batch_size, numbers.stop)
        return tf.constant(0, tf.int64), tf.range(begin, end)

    order = tf.data.Dataset.range(numbers.start, numbers.stop, batch_size).map(numbers_of_batch)
    return ahead(samples.batches(order, batch_size, seed=None))


def _in_order(epochs: range, rows_of: Callable[[np.int64], NDArray[np.int64]], batch_size: int) -> tf.data.Dataset:
    """Returns pairs of an epoch and a batch's sample numbers; `rows_of` an epoch returns its batches as rows."""
    import tensorflow as tf

    def batches_of(epoch: tf.Tensor) -> tf.data.Dataset:
        rows = tf.ensure_shape(tf.numpy_function(rows_of, [epoch], tf.int64), [None, batch_size])
        return tf.data.Dataset.from_tensor_slices(rows).map(lambda numbers: (epoch, numbers))

    return tf.data.Dataset.range(epochs.start, epochs.stop).flat_map(batches_of)


def ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Prepares two batches while the model trains another."""
    import tensorflow as tf

    options = tf.data.Options()
    # autotuning can delay the end of fit by seconds, and with it all other ranks
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)
