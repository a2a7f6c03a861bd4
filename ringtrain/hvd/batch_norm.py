"""Batch normalization over ranks, and other weights that follow a rank's data.

By default each rank normalizes by the statistics of its own batch, as Goyal et al. 2017 (arXiv 1706.02677, section 2.3)
do, and keeps moving statistics of its own; `average_moving_statistics` makes those one model's before it is evaluated
or saved. `SyncBatchNormalization` normalizes by the statistics of all ranks' batches together instead. Layers may hold
other non-trainable weights that a step changes, such as a codebook of moving averages: they are treated alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.errors import RingtrainError
from ringtrain.hvd.backend import Sum, horovod
from ringtrain.hvd.collectives import copies_of, elastic, num_copies, unique_in_graph
from ringtrain.hvd.distributed import saved_as_its_base
from ringtrain.hvd.placement import CPU


def average_moving_statistics(model: keras.Model, not_averaged: Sequence[str] = ()) -> None:
    """Replaces the moving statistics of a model by their means over all ranks.

    A collective, and a small one. Averaging early or late makes no difference to the averages of later steps: moving
    statistics are linear in those of the batches.

    Args:
        model: A built model; without moving statistics nothing happens.
        not_averaged: See `moving_statistics`.
    """
    variables = moving_statistics(model, not_averaged)
    num_models = horovod.size() * num_copies(model)
    if not variables or num_models == 1:
        return
    own = [np.sum([copy.numpy() for copy in copies_of(one)], axis=0, dtype=np.float64) for one in variables]
    # In float64, so that the order of additions does not show after rounding, whatever the number of ranks.
    with tf.device(CPU):
        flat = tf.constant(np.concatenate([values.reshape(-1) for values in own]))
        sums = horovod.allreduce(flat, op=Sum, name="ringtrain_moving_statistics").numpy()
    ends = np.cumsum([values.size for values in own])
    for variable, values, mean in zip(variables, own, np.split(sums / num_models, ends[:-1]), strict=True):
        variable.assign(mean.reshape(values.shape))


def moving_statistics(model: keras.Model, not_averaged: Sequence[str] = ()) -> list[Any]:
    """The weights of each rank's own that are averaged before evaluation: those that are floating-point numbers.

    Args:
        model: A built model.
        not_averaged: Paths of weights to leave out; `*` stands for any characters.
    """
    return [
        variable
        for variable in weights_of_one_rank(model)
        if keras.backend.is_float_dtype(variable.dtype)
        and not any(fnmatchcase(variable.path, pattern) for pattern in not_averaged)
    ]


def weights_of_one_rank(model: keras.Model) -> list[Any]:
    """The weights that a rank's data may change past the optimizer, so that each rank keeps its own.

    They are what layers make as non-trainable: moving statistics, codebooks, counters. Weights that are frozen
    (`layer.trainable = False`) and the statistics of synchronized batch normalization are the same on all ranks.
    """
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, _Synchronized)]
    made = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
    return [variable for variable in model.weights if id(variable) in made]


def synchronize_batch_norm(model: keras.Model, device: str = "") -> int:
    """Turns the batch normalization layers of a model, also of models within it, into synchronized ones.

    Layers are changed in place, before the model is compiled: weights, names and connections stay, and the model may be
    of any kind.

    Args:
        model: Any Keras model.
        device: Device to add up the ranks' statistics on; "": that of the layer.

    Returns:
        The number of synchronized layers.

    Raises:
        RingtrainError: A layer derived from BatchNormalization computes in a way of its own.
    """
    layers = list(batch_norm_layers(model))
    for layer in layers:
        if not isinstance(layer, _Synchronized):
            # Not layer.__class__ = ...: Keras and TensorFlow would take it for an attribute to track.
            object.__setattr__(layer, "__class__", _synchronized(layer.__class__))
            layer.supports_jit = False
        object.__setattr__(layer, "device_of_sums", device)
    return len(layers)


def batch_norm_layers(model: keras.Model) -> Iterator[Any]:
    """All batch normalization layers of a model, nested ones included."""
    return (layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization))


class _Synchronized(keras.layers.BatchNormalization):
    """Mixed into the class of a batch normalization layer; `_moments` is private, tests/ring holds Keras to it."""

    device_of_sums = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_jit = False  # XLA has no kernel for Horovod's allreduce

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if horovod.size() == 1 and not elastic():
            return mean, variance
        # Of sums of squares, float32 would leave little where a mean is large. These are one number per channel.
        own_mean, own_variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        own_count = tf.cast(self._count(inputs, mask), tf.float64)
        squares = own_variance + tf.square(own_mean)
        own_sums = tf.concat([own_count[None], own_count * own_mean, own_count * squares], 0)
        count, sums, sums_of_squares = tf.split(
            _sum_over_ranks(own_sums, self.device_of_sums), [1, mean.shape[0], mean.shape[0]]
        )
        whole_mean = tf.math.divide_no_nan(sums, count)
        whole_variance = tf.math.divide_no_nan(sums_of_squares, count) - tf.square(whole_mean)
        return tf.cast(whole_mean, mean.dtype), tf.cast(tf.nn.relu(whole_variance), variance.dtype)

    def _count(self, inputs: Any, mask: Any) -> Any:
        if mask is not None:
            return tf.reduce_sum(tf.cast(mask, tf.float32))
        return tf.size(inputs) / tf.shape(inputs)[self.axis]


def _sum_over_ranks(values: Any, device: str) -> Any:
    """The sum over the ranks of a vector, and as its gradient the sum of the ranks' gradients.

    A rank's gradients are then those of the sum of all ranks' losses, of which a distributed optimizer takes the mean.
    Horovod's own gradient is the same but named after its tensors, whose names may differ between ranks.
    """
    name = f"HorovodAllreduce_{unique_in_graph('SyncBatchNormalization')}"

    options = {"op": Sum, "ignore_name_scope": True, "device_dense": device}

    @tf.custom_gradient
    def reduced(vector: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return horovod.allreduce(upstream, name=f"{name}_gradient", **options)

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
    """`keras.layers.BatchNormalization` whose statistics in training are those of all ranks' batches together.

    N ranks with batch B normalize as one rank with batch N * B, in value and gradient, for one small allreduce forward
    and one backward per layer and step. All ranks have to call it equally often. Its arguments are Keras', and a model
    saved with it holds the plain layer. Moving statistics are the same on all ranks.
    """


# Keras' own name: that of the plain layer in saved files, and of layers without a name.
SyncBatchNormalization.__name__ = SyncBatchNormalization.__qualname__ = "BatchNormalization"
SyncBatchNormalization.__module__ = "keras.layers"
