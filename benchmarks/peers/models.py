"""Models of the comparison besides ringtrain's own: --model.name peers.models:transformer."""

from __future__ import annotations

import keras
from keras import layers


def wide_mlp(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds an MLP with four hidden layers of 512 units: 1.2 million parameters on MNIST."""
    hidden = [layers.Dense(512, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), *hidden, layers.Dense(num_classes)])


def transformer(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds a transformer of two blocks of width 128 with four heads, whose tokens are the rows of an image."""
    height, width, channels = input_shape
    inputs = keras.Input(input_shape)
    x = layers.Dense(128)(layers.Reshape((height, width * channels))(inputs))
    for _ in range(2):
        normalized = layers.LayerNormalization()(x)
        x = layers.add([x, layers.MultiHeadAttention(4, 32)(normalized, normalized)])
        hidden = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dense(128)(hidden)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))
