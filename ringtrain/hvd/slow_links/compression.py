"""Compression of gradients by name, and sums in bfloat16, which Horovod's allreduce does not support."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringtrain.hvd.backend import Compression as HorovodsOwn
from ringtrain.hvd.backend import horovod
from ringtrain.hvd.slow_links.powersgd import OfOptimizers, PowerSGD


class BFloat16(OfOptimizers):
    """Marker: gradients are sent as bfloat16 and summed in float32."""


class Compression(HorovodsOwn):
    """Compressions for `DistributedOptimizer(compression=...)`: `none`, `fp16`, `bf16`, or `powersgd(rank)`.

    Example:
        >>> hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.powersgd(4))
    """

    bf16 = BFloat16

    @staticmethod
    def powersgd(rank: int, error_feedback: bool = True, min_ratio: float = 2.0) -> PowerSGD:
        """Low-rank approximations of gradients: see `PowerSGD`."""
        return PowerSGD(rank, error_feedback, min_ratio)

    @classmethod
    def named(cls, name: str) -> Any:
        """Compression of a name as in the option `hvd.compression`: none, fp16, bf16, powersgd:4, ..."""
        kind, _, rank = name.partition(":")
        return cls.powersgd(int(rank)) if kind == "powersgd" else getattr(cls, kind)


def name_of(compression: Any) -> str:
    """Name of a compression, for messages and to compare the ranks' settings."""
    return str(compression) if isinstance(compression, PowerSGD) else compression.__name__


def sum_in_bfloat16(flat: tf.Tensor, num_ranks: Any, factor: Any, name: str, **options: Any) -> tf.Tensor:
    """Sums a vector over the ranks, multiplied by `factor`, with the bytes of a ring that sends 16 bits per number.

    Each rank receives its part of all ranks' vectors, adds them in float32, and sends the sum to the others: a number
    is rounded twice, whatever the number of ranks, and all ranks have the same bits.
    """
    num_ranks, length = tf.cast(num_ranks, tf.int32), tf.size(flat)
    padded = tf.pad(flat, [[0, -length % num_ranks]])
    rows = _as_uint16(tf.reshape(padded, [num_ranks, -1]))
    received, _ = horovod.alltoall(rows, splits=tf.fill([num_ranks], 1), name=f"{name}_parts", **options)
    total = tf.reduce_sum(_as_float32(received), 0) * tf.cast(factor, tf.float32)
    whole = horovod.allgather(_as_uint16(total), name=f"{name}_sums", **options)
    return tf.cast(tf.reshape(_as_float32(whole)[:length], tf.shape(flat)), flat.dtype)


def _as_uint16(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.uint16)  # Horovod sends no bfloat16


def _as_float32(bits: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)
