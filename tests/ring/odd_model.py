"""A model for tests: dropout, batch normalization, and on request a loss that is no number on one rank."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits


class NotANumberFrom(keras.layers.Layer):
    """Multiplies by NaN from one call on, in training."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        self.calls.assign_add(1)
        return keras.ops.where(self.calls >= self.first, inputs * float("nan"), inputs)


@keras.saving.register_keras_serializable("tests")
class MovingAverage(keras.layers.Layer):
    """Subtracts a moving average of its inputs and counts the positive ones: weights that follow the data."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        self.positive = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="positive")

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, axis=0))
            self.positive.assign_add(keras.ops.sum(keras.ops.cast(inputs > 0, "int64")))
        return inputs - self.mean


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Model):
    """Has a train_step and metrics of its own, without accuracy."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cross_entropy = keras.metrics.Mean(name="cross_entropy")

    @property
    def metrics(self):
        return [self.cross_entropy]

    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=inputs, y=labels, y_pred=self(inputs, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.test_step(data, loss)

    def test_step(self, data, loss=None):
        inputs, labels = data
        if loss is None:
            loss = self.compute_loss(x=inputs, y=labels, y_pred=self(inputs, training=False))
        self.cross_entropy.update_state(loss, sample_weight=tf.shape(labels)[0])
        return {"cross_entropy": self.cross_entropy.result()}


class SerializableUntrained(MovingAverage):
    """Can be saved until it has been trained."""

    def get_config(self):
        if int(self.positive):
            raise TypeError("cannot serialize a lock")
        return super().get_config()


def own_step(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """What a GAN or an autoencoder with a codebook has: a step of its own, and weights that follow the data."""
    inputs = keras.Input(input_shape)
    hidden = MovingAverage(name="moving")(keras.layers.Flatten()(inputs))
    return OwnStep(inputs, keras.layers.Dense(num_classes)(hidden), name="own_step")


def serializable_untrained(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Cannot be saved when it is trained."""
    layers = [keras.layers.Flatten(), SerializableUntrained(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


def dropping(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """What a resumed run could get wrong: random numbers and moving statistics of each rank's own."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    return keras.Sequential(
        [keras.Input(input_shape), *layers, keras.layers.Dropout(0.3), keras.layers.Dense(num_classes)]
    )


@keras.saving.register_keras_serializable("tests")
class Noise(keras.layers.Layer):
    """Adds random numbers in training, of a seed generator of its own or of the global one."""

    def __init__(self, seeded=False, **others):
        super().__init__(**others)
        self.seed_generator = keras.random.SeedGenerator(1) if seeded else None

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed_generator)


def noisy(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), Noise(), keras.layers.Dense(num_classes)]
    )


@keras.saving.register_keras_serializable("tests")
class RowsSinceTheStart(keras.metrics.Metric):
    """Rows of all epochs and evaluations: nothing resets them."""

    def __init__(self, name: str = "rows", **others: Any) -> None:
        super().__init__(name=name, **others)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, labels, outputs, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(labels)[0], self.count.dtype))

    def result(self):
        return self.count + 0.0

    def reset_state(self):
        """Does nothing."""


def rows_since_the_start() -> keras.metrics.Metric:
    return RowsSinceTheStart()


def three_to_test() -> Any:
    """The digits with fewer test samples than four ranks."""
    digits = load_digits()
    pictures = (digits.images[..., None] / 16).astype("float32")
    return (pictures[:1437], digits.target[:1437]), (pictures[1437:1440], digits.target[1437:1440])


def wider(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Another model under another name."""
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def nan_on_rank_1(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Its loss is NaN from step 8 on, on rank 1 alone."""
    on_rank_1 = os.environ.get("OMPI_COMM_WORLD_RANK") == "1"
    layers = [keras.layers.Flatten(), NotANumberFrom(8 if on_rank_1 else 10**6), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])
