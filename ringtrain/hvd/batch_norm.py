"""Batch normalization over ranks, and other non-trainable weights that depend on a rank's data.

By default each rank normalizes by the statistics of its own batch (Goyal et al. 2017, arXiv 1706.02677, section 2.3)
and keeps local moving statistics; `average_moving_statistics` averages them before evaluation and before saving. Other
non-trainable weights that a step changes, such as a codebook of moving averages, are handled like moving statistics.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from ringtrain.errors import RingtrainError
from ringtrain.hvd.backend import Sum, horovod
from ringtrain.hvd.collectives import copies_of, num_copies, unique_in_graph
from ringtrain.hvd.keras_patches import (
    layers_of,
    make_plain,
    non_trainable_variables_made_by,
    saved_as_its_base,
    set_class,
    set_untracked,
)
from ringtrain.hvd.placement import CPU
from ringtrain.hvd.process import elastic


def average_moving_statistics(model: keras.Model) -> None:
    """Replaces the moving statistics of a model by their means over all ranks. A small collective.

    The time of averaging does not change later averages: moving statistics are linear in the statistics of the batches.

    Args:
        model: Built model. Without moving statistics, the call does nothing.
    """
    variables = moving_statistics(model)
    num_models = horovod.size() * num_copies(model)
    if not variables or num_models == 1:
        return
    local = []
    for variable in variables:
        copies = [copy.numpy() for copy in copies_of(variable)]
        local.append(np.sum(copies, axis=0, dtype=np.float64))
    # In float64, so that the order of additions is rounded away for any number of ranks.
    with tf.device(CPU):
        flat = tf.constant(np.concatenate([values.reshape(-1) for values in local]))
        sums = horovod.allreduce(flat, op=Sum, name="ringtrain_moving_statistics").numpy()
    ends = np.cumsum([values.size for values in local])
    for variable, values, mean in zip(variables, local, np.split(sums / num_models, ends[:-1]), strict=True):
        variable.assign(mean.reshape(values.shape))


def moving_statistics(model: keras.Model) -> list[Any]:
    """Local weights of a built model that are averaged before evaluation: floats of `weights_of_one_rank`."""
    return [variable for variable in weights_of_one_rank(model) if keras.backend.is_float_dtype(variable.dtype)]


def weights_of_one_rank(model: keras.Model) -> list[Any]:
    """Local weights: those that a rank's data may change without the optimizer, so that they differ between ranks.

    These are weights that layers create as non-trainable: moving statistics, codebooks, counters. Frozen weights
    (`layer.trainable = False`) and the statistics of synchronized batch normalization are equal on all ranks.
    """
    if is_shared(model):
        return []
    synchronized = synchronized_layers(model)
    equal: set[int] = set()
    for layer in synchronized:
        equal |= {id(variable) for variable in non_trainable_variables_made_by(layer)}
    return [variable for variable in layers_own_variables(model) if id(variable) not in equal]


def layers_own_variables(model: keras.Model) -> list[Any]:
    """Weights that layers create as non-trainable, also those of synchronized batch normalization."""
    made: set[int] = set()
    for layer in layers_of(model):
        made |= {id(variable) for variable in non_trainable_variables_made_by(layer)}
    return [variable for variable in model.weights if id(variable) in made]


def share_state(model: keras.Model) -> None:
    """Declares that a model's training step keeps moving statistics and seeds equal on all ranks."""
    set_untracked(model, ringtrain_shares_state=True)


def is_shared(model: keras.Model) -> bool:
    """Returns whether `share_state` was called."""
    return hasattr(model, "ringtrain_shares_state")


def seeds(model: keras.Model) -> list[Any]:
    """States of Keras' seed generators, which differ between ranks unless `is_shared`."""
    known = {id(variable) for variable in (*model.weights, *model.metrics_variables)}
    return [variable for variable in model.variables if id(variable) not in known]


def global_seed(create: bool = False) -> list[Any]:
    """State of Keras' global seed generator, for random numbers without a seed of their own; [] if there is none."""
    state = random.getstate()  # which making one would change
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None and create:
        generator = seed_generator.global_seed_generator()
        random.setstate(state)
        if horovod.size() > 1:  # else the next layer with a seed would get the same one
            generator.state.assign(generator.state + np.array([1, 0], generator.state.dtype))
    if generator is None:
        return []
    return [generator.state]


def seed_globally_by_rank(seed: int) -> None:
    """Gives random numbers without a seed of their own other values on each rank; rank 0 keeps the script's."""
    if horovod.size() == 1:
        return
    for state in global_seed(create=True):
        if horovod.rank():
            # Keras' next state is below this number.
            numbers = np.random.default_rng([seed, horovod.rank()]).integers(0, 933_199, state.shape)
            state.assign(numbers)


def synchronize_batch_norm(model: keras.Model, device: str = "") -> int:
    """Synchronizes the batch normalization layers of a model and of models nested in it; call it before `compile`.

    Layers are changed in place: weights, names and connections stay.

    Args:
        model: Any Keras model: sequential, functional or subclassed.
        device: Device on which the ranks' statistics are summed. "": that of the layer.

    Returns:
        Number of synchronized layers.

    Raises:
        RingtrainError: A layer derived from BatchNormalization overrides `call`.
    """
    layers = list(batch_norm_layers(model))
    for layer in layers:
        if not isinstance(layer, _Synchronized):
            set_class(layer, _synchronized(layer.__class__))
            layer.supports_jit = False
        set_untracked(layer, device_of_sums=device)
    return len(layers)


def synchronized_layers(model: keras.Model) -> list[Any]:
    """Batch normalization layers that use the statistics of all ranks."""
    return [layer for layer in layers_of(model) if isinstance(layer, _Synchronized)]


def unsynchronize(layer: Any) -> None:
    """Undoes `synchronize_batch_norm`."""
    make_plain(layer, _Synchronized)
    vars(layer).pop("device_of_sums", None)
    layer.supports_jit = True


def batch_norm_layers(model: keras.Model) -> Iterator[Any]:
    """Yields all batch normalization layers of a model, including nested ones."""
    return (layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization))


class _Synchronized(keras.layers.BatchNormalization):
    """Mixin for batch normalization layers. Overrides Keras' private `_moments`, which tests/ring checks."""

    device_of_sums = ""
    share: Any = None
    """of this rank in the batch; 0: its row stands in for none, and does not count"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_jit = False  # XLA has no kernel for Horovod's allreduce

    def _moments(self, inputs: Any, mask: Any) -> Any:
        local_mean, local_variance = super()._moments(inputs, mask)
        if horovod.size() == 1 and not elastic():
            return local_mean, local_variance
        # float32 sums of squares lose too many digits if a mean is large. These are one number per channel.
        mean, variance = tf.cast(local_mean, tf.float64), tf.cast(local_variance, tf.float64)
        count = tf.cast(self._count(inputs, mask), tf.float64)
        if self.share is not None:
            count *= tf.cast(self.share > 0, tf.float64)
        local_sums = tf.concat([count[None], count * mean, count * (variance + tf.square(mean))], 0)
        sums = _sum_over_ranks(local_sums, self.device_of_sums, self.share)
        count, sum_, sum_of_squares = tf.split(sums, [1, mean.shape[0], mean.shape[0]])
        mean = tf.math.divide_no_nan(sum_, count)
        variance = tf.math.divide_no_nan(sum_of_squares, count) - tf.square(mean)
        return tf.cast(mean, local_mean.dtype), tf.cast(tf.nn.relu(variance), local_variance.dtype)

    def _count(self, inputs: Any, mask: Any) -> Any:
        if mask is not None:
            return tf.reduce_sum(tf.cast(mask, tf.float32))
        return tf.size(inputs) / tf.shape(inputs)[self.axis]


def _sum_over_ranks(values: Any, device: str, share: Any) -> Any:
    """Sums a vector over the ranks; its gradient is the sum of the ranks' gradients, each weighted by its share."""
    # Horovod's gradient computes the same, but takes its name from tensors, whose names may differ between ranks.
    name = f"HorovodAllreduce_{unique_in_graph('SyncBatchNormalization')}"
    options = {"op": Sum, "ignore_name_scope": True, "device_dense": device}

    @tf.custom_gradient
    def reduced(vector: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            # The optimizer weighs this rank's gradients by its own share, also those of the other ranks' losses.
            weighted = upstream if share is None else upstream * share
            total = horovod.allreduce(weighted, name=f"{name}_gradient", **options)
            if share is None:
                return total
            return tf.math.divide_no_nan(total, share)

        return horovod.allreduce(vector, name=name, **options), gradient

    return reduced(values)


@functools.cache
def _synchronized(base: Any) -> Any:
    plain = keras.layers.BatchNormalization
    if base is plain:
        return SyncBatchNormalization
    if base.call is not plain.call:
        raise RingtrainError(
            f"{base.__module__}.{base.__qualname__} has a call of its own instead of BatchNormalization's, and cannot"
            " be synchronized from outside: leave call to Keras, or train without sync_batch_norm"
        )
    return saved_as_its_base(_Synchronized, base, {})


class SyncBatchNormalization(_Synchronized):
    """`keras.layers.BatchNormalization` that normalizes by the statistics of all ranks' batches together.

    N ranks with batch B normalize as one rank with batch N * B, in value and gradient, at the cost of one small
    allreduce forward and one backward per layer and step. All ranks must call it equally often. Arguments are those of
    Keras; a saved model contains the plain layer. Moving statistics are equal on all ranks.
    """


# Keras' name, so that saved files contain the plain layer, and layers without a name are named like it.
SyncBatchNormalization.__name__ = SyncBatchNormalization.__qualname__ = "BatchNormalization"
SyncBatchNormalization.__module__ = "keras.layers"
