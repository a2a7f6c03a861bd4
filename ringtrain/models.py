"""Models by name; each is a function of the shape of one sample and the number of classes, and returns logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ringtrain.config import ModelConfig
from ringtrain.errors import ConfigError
from ringtrain.lookup import find

if TYPE_CHECKING:
    import keras

Build = Callable[[tuple[int, ...], int], "keras.Model"]


def mlp(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """One hidden layer of 100 sigmoid units: 784-100-10 on MNIST, 79,510 parameters."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input(input_shape),
            layers.Flatten(),
            layers.Dense(100, activation="sigmoid"),
            layers.Dense(num_classes),
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
            layers.Dense(num_classes),
        ],
        name="cnn",
    )


MODELS: dict[str, Build] = {"mlp": mlp, "cnn": cnn}


def builder(config: ModelConfig) -> Build:
    """Finds the function that builds the configured model, without building it.

    Args:
        config: its name is a key of MODELS, or module:function of a function (input_shape, num_classes) that returns a
            Keras model from inputs, float32 [batch, *input_shape], to logits, [batch, num_classes].

    Returns:
        The function; it raises ConfigError when what it built gives other outputs.

    Raises:
        ConfigError: there is no such model.
    """
    found = find("model.name", config.name, MODELS)

    def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
        model = found(input_shape, num_classes)
        if not model.built:
            model.build((None, *input_shape))
        if tuple(model.output_shape) != (None, num_classes):
            raise ConfigError(
                f"model.name: {config.name} gives outputs of shape {model.output_shape}, expected one logit for each of"
                f" {num_classes} classes: {(None, num_classes)}"
            )
        return model

    return build


def seed_by_rank(model: keras.Model, seed: int, rank: int) -> None:
    """Gives this rank's dropout, noise and augmentation random numbers of their own.

    Weights are made from the same seed on every rank, and so are Keras' seed generators: without this, all ranks would
    drop the same units.

    Args:
        model: built, not yet compiled: all its variables but the weights are then states of seed generators.
        seed: of the run.
        rank: of this process.
    """
    weights = {id(variable) for variable in model.weights}
    states = (variable for variable in model.variables if id(variable) not in weights)
    for index, state in enumerate(states):
        state.assign(np.random.default_rng([seed, rank, index]).integers(0, 2**31, state.shape))
