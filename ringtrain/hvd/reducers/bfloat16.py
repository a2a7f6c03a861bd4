"""Gradients in bfloat16, which Horovod's allreduce does not support: half of the bytes, without float16's overflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringtrain.hvd.backend import Average, Sum, horovod
from ringtrain.hvd.reducer import Compressor, Reducer
from ringtrain.hvd.reduction import Reduction, by_dtype, joined, require_one_vector, widened


class BFloat16(Compressor, Reducer):
    """Gradients are sent as bfloat16 and summed in float32: `hvd.Compression.bf16`."""

    def __str__(self) -> str:
        return "BFloat16"

    def check(self, reduction: Reduction) -> None:
        require_one_vector(reduction, (Average, Sum))

    def reducer(self) -> Reducer:
        """Itself: it has no state."""
        return self

    def reduce(
        self, reduction: Reduction, tensors: list[tf.Tensor], variables: Sequence[Any], name: str
    ) -> list[tf.Tensor]:
        num_ranks = reduction.num_ranks()
        factor: Any = 1.0
        if reduction.op == Average:
            factor = 1.0 / num_ranks
        results = list(tensors)
        # As one vector of each dtype: the order of additions is the same in every step.
        for number, members in enumerate(by_dtype(range(len(tensors)), tensors)):

            def send(flat: tf.Tensor, number: int = number) -> tf.Tensor:
                options = {"ignore_name_scope": True, "process_set": reduction.process_set}
                with tf.device(reduction.device_dense):
                    return sum_in_bfloat16(flat, num_ranks, factor, f"{name}_{number}", **options)

            totals = joined([widened(tensors[index]) for index in members], send)
            for index, total in zip(members, totals, strict=True):
                results[index] = tf.cast(total, tensors[index].dtype)
        return results


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
