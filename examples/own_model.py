"""Your own model and data: two functions, named on the command line.

    horovodrun -np 2 -H localhost:2 python -m ringtrain.train \\
        --model.name examples.own_model:model --data.name examples.own_model:data --train.epochs 15
"""

import keras
import numpy as np


def data():
    """Two spirals: training inputs and labels, test inputs and labels, as the functions of keras.datasets give them."""
    draw = np.random.default_rng(0)
    labels = np.arange(2000) % 2
    angle = draw.uniform(0.5, 3 * np.pi, 2000)
    points = np.stack([angle * np.cos(angle + np.pi * labels), angle * np.sin(angle + np.pi * labels)], axis=1)
    inputs = (points + draw.normal(0, 0.2, points.shape)) / 10
    return (inputs[:1600], labels[:1600]), (inputs[1600:], labels[1600:])


def model(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A functional model with dropout; it returns logits."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Dense(64, activation="relu")(inputs)
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dropout(0.1)(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))
