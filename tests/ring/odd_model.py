"""A model for tests: dropout, batch normalization, and on request a loss that is no number on one rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def dropping(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """What a resumed run could get wrong: random numbers and moving statistics of each rank's own."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    return keras.Sequential(
        [keras.Input(input_shape), *layers, keras.layers.Dropout(0.3), keras.layers.Dense(num_classes)]
    )


def pairs() -> Any:
    """Two inputs of a row; the last batch of 64 has 27 of 91 rows."""
    draw = np.random.default_rng(0)
    left, right = draw.normal(size=(91, 4)).astype("float32"), draw.normal(size=(91, 3)).astype("float32")
    x, y = {"left": left, "right": right}, left.sum(1) * right.sum(1)
    return (x, y), (x, y)


def of_pairs(input_shape: dict[str, tuple[int, ...]], num_targets: int) -> keras.Model:
    inputs = {name: keras.Input(shape, name=name) for name, shape in input_shape.items()}
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, keras.layers.Dense(num_targets)(hidden))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


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
