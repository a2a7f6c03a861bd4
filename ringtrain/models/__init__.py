"""Models by name or module:function, with their loss and metrics.

zoo:            mlp, cnn and ResNets
applications:   models of keras.applications
losses_metrics: cross-entropy, accuracy, top-5
lazy_keras:     defers the import of Keras modules that training does not use
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ringtrain.config import ModelConfig
from ringtrain.config_io import find
from ringtrain.errors import ConfigError
from ringtrain.models.applications import APPLICATIONS
from ringtrain.models.losses_metrics import cross_entropy, metrics
from ringtrain.models.zoo import cnn, mlp, resnet20, resnet50

if TYPE_CHECKING:
    import keras

Build = Callable[[tuple[int, ...], int], "keras.Model"]

MODELS: dict[str, Build] = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20, "resnet50": resnet50}


def builder(config: ModelConfig) -> Build:
    """Resolves the function that builds the configured model, without building it.

    Args:
        config: `name` is a key of MODELS, a name in keras.applications (MobileNetV2, or mobilenet-v2), or
            module:function of a function (input_shape, num_classes) that returns a Keras model from inputs, float32
            [batch, *input_shape], to logits, [batch, num_classes]. A compiled model may have any outputs.

    Raises:
        ConfigError: The model does not exist; in the returned function, the model has other outputs.
    """
    known: dict[str, Build] = {**APPLICATIONS, **MODELS}
    plain = {_plain(name): name for name in known}  # MODELS last: resnet-50 is ringtrain's, ResNet50 Keras'
    name = config.name if config.name in known else plain.get(_plain(config.name), config.name)
    # The forty names of Keras are listed only if one of them was probably meant.
    function = find("model.name", name, known if difflib.get_close_matches(name, known, cutoff=0.5) else MODELS)

    def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
        import keras

        try:
            model = function(input_shape, num_classes)
            # The call builds a model that is not built yet, such as a keras.Model subclass.
            outputs = model(keras.KerasTensor((None, *input_shape)))
        except ValueError as error:
            if ":" in config.name:
                raise
            reason = str(error).strip().partition("\n")[0]
            message = f"model.name: {config.name} cannot take inputs of shape {input_shape}: {reason}"
            raise ConfigError(message) from error
        if not model.compiled and tuple(outputs.shape) != (None, num_classes):
            raise ConfigError(
                f"model.name: {config.name} gives outputs of shape {tuple(outputs.shape)}, expected one logit for each"
                f" of {num_classes} classes: {(None, num_classes)}"
            )
        return model

    return build


def seed_by_rank(model: keras.Model, seed: int, rank: int) -> None:
    """Gives dropout, noise and augmentation their own random numbers on each rank.

    Weights and Keras' seed generators are made from the same seed on every rank: without this, all ranks would drop the
    same units. If a process has several copies of the model, each counts as a rank.
    """
    # Before `compile`, all variables of a model but the weights are states of seed generators.
    weights = {id(variable) for variable in model.weights}
    states = (variable for variable in model.variables if id(variable) not in weights)
    for index, state in enumerate(states):
        copies = getattr(state.value, "values", None) or [state]
        for number, copy in enumerate(copies, rank * len(copies)):
            copy.assign(np.random.default_rng([seed, number, index]).integers(0, 2**31, state.shape))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
