"""A model for tests: dropout, batch normalization, and on request a loss that is no number on one rank."""

from __future__ import annotations

import keras


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
