"""From arrays and sample numbers to a tf.data pipeline that Keras can train from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.shard import training_shard
from ringtrain.data.sources import Samples

if TYPE_CHECKING:
    import tensorflow as tf


def training_batches(
    samples: Samples, batch_size: int, rank: int, size: int, seed: int, epochs: int
) -> tf.data.Dataset:
    """One rank's batches of a whole run, epoch after epoch.

    Args:
        samples: the training data; every rank holds all of it in memory.
        batch_size: samples per step on this rank.
        rank: 0 ... size - 1.
        size: number of ranks.
        seed: of the run.
        epochs: how many.

    Returns:
        Pairs of inputs, float32 [batch_size, ...], and labels, int64 [batch_size].
    """
    import tensorflow as tf

    def shard_of(epoch: np.int64) -> NDArray[np.int64]:
        return training_shard(len(samples), batch_size, rank, size, seed, int(epoch))

    def batches_of(epoch: tf.Tensor) -> tf.data.Dataset:
        numbers = tf.numpy_function(shard_of, [epoch], tf.int64)
        return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(numbers, [None, batch_size]))

    return _gather(samples, tf.data.Dataset.range(epochs).flat_map(batches_of))


def evaluation_batches(samples: Samples, numbers: NDArray[np.int64], batch_size: int) -> tf.data.Dataset:
    """Batches of chosen samples, in their order; the last one is as short as it comes.

    Args:
        samples: the test data.
        numbers: int64 [n], which of them.
        batch_size: samples per step.

    Returns:
        Pairs of inputs, float32 [up to batch_size, ...], and labels, int64.
    """
    import tensorflow as tf

    return _gather(samples, tf.data.Dataset.from_tensor_slices(numbers).batch(batch_size))


def _gather(samples: Samples, numbers: tf.data.Dataset) -> tf.data.Dataset:
    import tensorflow as tf

    with tf.device("CPU"):  # a GPU's memory is for the model
        inputs, labels = tf.constant(samples.inputs), tf.constant(samples.labels)

    def batch_of(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        chosen = tf.gather(inputs, batch)
        scale = 1 / 255 if inputs.dtype == tf.uint8 else 1
        return tf.cast(chosen, tf.float32) * scale, tf.gather(labels, batch)

    options = tf.data.Options()
    # its autotuning can hold up the end of fit for seconds, and with it every other rank
    options.autotune.enabled = False
    return numbers.map(batch_of).prefetch(2).with_options(options)
