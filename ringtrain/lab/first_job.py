"""Your data and your model: replace the contents of both functions.

ringtrain train --config config.toml           # in one process
ringtrain train -np 2 --config config.toml     # on two ranks, each with its own shard of the data
"""

import keras
import numpy as np


def data():
    """Two spirals, as (training inputs, labels), (test inputs, labels). Labels are integers from 0 on."""
    random = np.random.default_rng(0)
    labels = np.arange(2000) % 2
    angle = random.uniform(0.5, 3 * np.pi, 2000)
    points = np.stack([angle * np.cos(angle + np.pi * labels), angle * np.sin(angle + np.pi * labels)], axis=1)
    inputs = (points + random.normal(0, 0.2, points.shape)) / 10
    return (inputs[:1600], labels[:1600]), (inputs[1600:], labels[1600:])


def model(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Keras model for inputs of this shape. Its outputs are logits: no softmax at the end."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Dense(64, activation="relu")(inputs)
    x = keras.layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))
