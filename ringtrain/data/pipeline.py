"""From a split and sample numbers to a tf.data pipeline that Keras can train from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.samples import Split
from ringtrain.data.shard import training_shard

if TYPE_CHECKING:
    import tensorflow as tf


def training_batches(
    samples: Split, batch_size: int, rank: int, size: int, seed: int, epochs: int, first_step: int = 0
) -> tf.data.Dataset:
    """One rank's batches of a whole run, epoch after epoch, or of what is left of it.

    Args:
        samples: the training data.
        batch_size: samples per step on this rank.
        rank: 0 ... size - 1.
        size: number of ranks.
        seed: of the run.
        epochs: of the whole run, from its beginning.
        first_step: global step to begin with: that many batches of the run are left out, without being read.

    Returns:
        Pairs of inputs, float32 [batch_size, ...], and labels, int64 [batch_size].
    """
    import tensorflow as tf

    steps_per_epoch = max(1, len(samples) // (batch_size * size))
    first_epoch, step_in_epoch = divmod(first_step, steps_per_epoch)

    def shard_of(epoch: np.int64) -> NDArray[np.int64]:
        order = samples.epoch_order(batch_size * size, seed, int(epoch))
        return training_shard(order, rank, size)[step_in_epoch if epoch == first_epoch else 0 :]

    def batches_of(epoch: tf.Tensor) -> tf.data.Dataset:
        rows = tf.ensure_shape(tf.numpy_function(shard_of, [epoch], tf.int64), [None, batch_size])
        return tf.data.Dataset.from_tensor_slices(rows).map(lambda numbers: (epoch, numbers))

    order = tf.data.Dataset.range(first_epoch, epochs).flat_map(batches_of)
    return _ahead(samples.batches(order, batch_size, seed))


def evaluation_batches(samples: Split, numbers: NDArray[np.int64], batch_size: int) -> tf.data.Dataset:
    """Batches of chosen samples, in their order; the last one is as short as it comes.

    Args:
        samples: the test data.
        numbers: int64 [n], which of them.
        batch_size: samples per step.

    Returns:
        Pairs of inputs, float32 [up to batch_size, ...], and labels, int64.
    """
    import tensorflow as tf

    order = tf.data.Dataset.from_tensor_slices(numbers).batch(batch_size)
    order = order.map(lambda batch: (tf.constant(0, tf.int64), batch))
    return _ahead(samples.batches(order, batch_size, seed=None))


def _ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Prepares two batches while the model is busy with another."""
    import tensorflow as tf

    options = tf.data.Options()
    # its autotuning can hold up the end of fit for seconds, and with it every other rank
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)
