"""A model function after which virtual ranks are added in an order of Horovod's own: the negative control."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from odd_model import dropping

from ringtrain import hvd
from ringtrain.training import virtual_ranks


def allreduced(rows: tf.Tensor, num: int, reduction: Any) -> tf.Tensor:
    return hvd.allreduce(tf.reduce_sum(rows, axis=0), op=hvd.Sum, name="reordered")


def model(input_shape: tuple[int, ...], num_classes: int) -> Any:
    virtual_ranks.sum_of_all = allreduced
    return dropping(input_shape, num_classes)
