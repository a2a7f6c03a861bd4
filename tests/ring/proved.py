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


def model(input_shape: tuple[int, ...], num_classes: int, *more: keras.layers.Layer) -> keras.Model:
    hidden = [keras.layers.Flatten(), *more, keras.layers.Dense(32, "relu")]
    return keras.Sequential([keras.Input(input_shape), *hidden, keras.layers.Dense(num_classes)])


class Noise(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return x + tf.random.normal(tf.shape(x), stddev=0.1) if training else x


def noisy(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Wrong: random numbers that no checkpoint holds."""
    return model(input_shape, num_classes, Noise())


class OnOneRank(keras.callbacks.Callback):
    """Wrong: rank 1 changes its weights."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1:
            self.model.trainable_variables[0].assign_add(self.model.trainable_variables[0] * 0.001)


def on_one_rank() -> keras.callbacks.Callback:
    return OnOneRank()
