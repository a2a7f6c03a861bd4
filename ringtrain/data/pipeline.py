"""tf.data pipelines for Keras, from a split and sample numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.dataset import Split
from ringtrain.data.sharding import part_of, training_shard

if TYPE_CHECKING:
    import tensorflow as tf


def training_batches(
    samples: Split, batch_size: int, rank: int, size: int, seed: int, epochs: int, first_step: int = 0
) -> tf.data.Dataset:
    """Returns one rank's batches, of `batch_size` samples, in a run of `epochs`, from global step `first_step` on.

    They are pairs of inputs, float32 [batch_size, ...], and labels, int64 [batch_size]. Earlier batches are not read.
    """
    steps_per_epoch = max(1, len(samples) // (batch_size * size))
    first_epoch, step_in_epoch = divmod(first_step, steps_per_epoch)

    def shard_of(epoch: np.int64) -> NDArray[np.int64]:
        order = samples.epoch_order(batch_size * size, seed, int(epoch))
        return training_shard(order, rank, size)[step_in_epoch if epoch == first_epoch else 0 :]

    order = _in_order(range(first_epoch, epochs), shard_of, batch_size)
    return ahead(samples.batches(order, batch_size, seed))


def dealt_batches(
    samples: Split,
    epochs: range,
    seed: int,
    dealt_by: int,
    position: int,
    global_batch_size: int,
    rank: int,
    size: int,
    whole_part: int = 1,
) -> tf.data.Dataset:
    """Returns one rank's batches of the rest of an epoch, redistributed over any number of ranks, or of several epochs.

    Args:
        epochs: one that has started, or several complete ones whose length global_batch_size divides.
        dealt_by: global batch size that the epochs' order is made for.
        position: number of samples of the order that are trained already.
        global_batch_size: samples per step on all ranks; the last step has the remainder. Each rank gets its `part_of`
            them; a rank with an empty part gets one sample of another rank.
        whole_part: number of samples of which parts are multiples, as all steps are.
    """
    length = len(samples) // dealt_by * dealt_by
    whole = (length - position) // global_batch_size * global_batch_size + position

    def steps(begin: int, end: int, per_step: int) -> tf.data.Dataset:
        first, last = part_of(per_step, rank, size, whole_part)
        first, last = (first, last) if first < last else (0, 1)

        def rows_of(epoch: np.int64) -> NDArray[np.int64]:
            order = samples.epoch_order(dealt_by, seed, int(epoch)).reshape(-1)
            return order[begin:end].reshape(-1, per_step)[:, first:last]

        return samples.batches(_in_order(epochs, rows_of, last - first), last - first, seed)

    batches = steps(position, whole, global_batch_size)
    return ahead(batches.concatenate(steps(whole, length, length - whole)) if whole < length else batches)


def evaluation_batches(
    samples: Split, numbers: range, batch_size: int, chosen: NDArray[np.int64] | None = None
) -> tf.data.Dataset:
    """Returns batches of the samples with these successive numbers; the last batch may be smaller.

    Args:
        chosen: Which of these batches, counted from 0; None: all.
    """
    import tensorflow as tf

    part = samples.part(numbers)
    if part is not None:
        return ahead(part)
    if chosen is None:
        chosen = np.arange(math.ceil(len(numbers) / batch_size))

    def numbers_of_batch(begin: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + batch_size, numbers.stop)
        return tf.constant(0, tf.int64), tf.range(begin, end)

    order = tf.data.Dataset.from_tensor_slices(numbers.start + chosen * batch_size).map(numbers_of_batch)
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
