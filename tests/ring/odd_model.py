"""A model for tests: dropout, batch normalization, and on request a loss that is no number on one rank."""

from __future__ import annotations

import os

import keras


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


class SerializableUntrained(keras.layers.Layer):
    """Can be saved until it has been trained."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1)
        return inputs

    def get_config(self):
        if int(self.calls):
            raise TypeError("cannot serialize a lock")
        return super().get_config()


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


def wider(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Another model under another name."""
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def nan_on_rank_1(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Its loss is NaN from step 8 on, on rank 1 alone."""
    on_rank_1 = os.environ.get("OMPI_COMM_WORLD_RANK") == "1"
    layers = [keras.layers.Flatten(), NotANumberFrom(8 if on_rank_1 else 10**6), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])
