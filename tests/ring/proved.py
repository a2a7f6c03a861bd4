"""Jobs for ringtrain prove: right ones, and one of each fault that it names."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from ringtrain import hvd


def data(order: Any = None) -> Any:
    digits = load_digits()
    pictures, rows = (digits.images[..., None] / 16).astype("float32"), np.arange(1437) if order is None else order
    return (pictures[rows], digits.target[rows]), (pictures[1437:], digits.target[1437:])


def shuffled() -> Any:
    """Wrong: in another order in every process."""
    return data(np.random.default_rng().permutation(1437))


def divided() -> Any:
    """Wrong: ringtrain divides the samples, too."""
    return data(np.arange(1437)[hvd.rank() :: hvd.size()])


def model(input_shape: tuple[int, ...], num_classes: int, *more: keras.layers.Layer) -> keras.Model:
    hidden = [keras.layers.Flatten(), *more, keras.layers.Dense(32, "relu")]
    return keras.Sequential([keras.Input(input_shape), *hidden, keras.layers.Dense(num_classes)])


def dropping(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    return model(input_shape, num_classes, keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))


def synced(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    return model(input_shape, num_classes, hvd.SyncBatchNormalization())


class Noise(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return x + tf.random.normal(tf.shape(x), stddev=0.1) if training else x


def noisy(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Wrong: random numbers that no checkpoint holds."""
    return model(input_shape, num_classes, Noise())


class Sum(keras.losses.Loss):
    def call(self, y: Any, y_pred: Any) -> Any:
        return (
            tf.reduce_sum(
                tf.square(tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 10, dtype=y_pred.dtype) - y_pred)
            )
            / 100
        )


def summed(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Wrong: its loss grows with the batch."""
    made = model(input_shape, num_classes)
    made.compile(keras.optimizers.SGD(0.01), Sum(reduction=None), metrics=["accuracy"])
    return made


class Largest(keras.metrics.Metric):
    """Wrong: no sum over rows."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.maximum(self.largest, tf.cast(tf.reduce_max(y_pred), self.largest.dtype)))

    def result(self) -> Any:
        return self.largest.value + 0


def largest() -> keras.metrics.Metric:
    return Largest()


class OnOneRank(keras.callbacks.Callback):
    """Wrong: rank 1 changes its weights."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1:
            self.model.trainable_variables[0].assign_add(self.model.trainable_variables[0] * 0.001)


def on_one_rank() -> keras.callbacks.Callback:
    return OnOneRank()
