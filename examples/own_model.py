"""Custom model and data: two functions, named on the command line.

    horovodrun -np 2 -H localhost:2 python -m ringtrain.train \\
        --model.name examples.own_model:model --data.name examples.own_model:data --train.epochs 15
"""

import keras
import numpy as np


def data():
    """Two spirals, as (training inputs, labels), (test inputs, labels), like the functions of keras.datasets."""
    draw = np.random.default_rng(0)
    labels = np.arange(2000) % 2
    angle = draw.uniform(0.5, 3 * np.pi, 2000)
    points = np.stack([angle * np.cos(angle + np.pi * labels), angle * np.sin(angle + np.pi * labels)], axis=1)
    inputs = (points + draw.normal(0, 0.2, points.shape)) / 10
    return (inputs[:1600], labels[:1600]), (inputs[1600:], labels[1600:])


def model(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Functional model with dropout, which outputs logits."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Dense(64, activation="relu")(inputs)
    x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dropout(0.1)(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))
