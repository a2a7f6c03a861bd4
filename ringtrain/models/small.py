"""Two networks that train in seconds on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def mlp(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """One hidden layer of 100 sigmoid units: 784-100-10 on MNIST, 79,510 parameters."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input(input_shape),
            layers.Flatten(),
            layers.Dense(100, activation="sigmoid"),
            layers.Dense(num_classes, dtype="float32"),
        ],
        name="mlp",
    )


def cnn(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Two 5x5 convolutions of 32 and 64, each with 2x2 max pooling, dense 1024: 3.3 million parameters on MNIST."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input(input_shape),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(num_classes, dtype="float32"),
        ],
        name="cnn",
    )
