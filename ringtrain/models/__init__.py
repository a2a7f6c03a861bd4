"""Models by name or module:function, with their loss and metrics.

zoo:            mlp, cnn, ResNets, and models of keras.applications
losses_metrics: losses and metrics by name
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringtrain.config.by_name import find
from ringtrain.config.sections import ModelConfig
from ringtrain.errors import ConfigError
from ringtrain.models.losses_metrics import OF_CLASSES, accuracy, cross_entropy, loss, metrics, needs_classes
from ringtrain.models.zoo import APPLICATIONS, cnn, mlp, resnet20, resnet50

if TYPE_CHECKING:
    import keras

Build = Callable[[Any, int], "keras.Model"]
"""(input_shape, num_classes): a model from float32 [batch, *input_shape] to logits, [batch, num_classes]"""

MODELS: dict[str, Build] = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20, "resnet50": resnet50}


def builder(config: ModelConfig, of_classes: bool = True) -> Build:
    """Resolves model.name to the function that builds the model, without calling it; both raise ConfigError."""
    known: dict[str, Build] = {**APPLICATIONS, **MODELS}
    plain = {_plain(name): name for name in known}  # MODELS last: resnet-50 is ringtrain's, ResNet50 Keras'
    name = config.name if config.name in known else plain.get(_plain(config.name), config.name)
    # The forty names of Keras are listed only if one of them was probably meant.
    function = find("model.name", name, known if difflib.get_close_matches(name, known, cutoff=0.5) else MODELS)

    def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
        import keras

        is_own = ":" in config.name
        try:
            if not is_own and any(isinstance(size, tuple | dict | str) for size in input_shape):
                raise ValueError("it takes one array, not a nest: use a model of your own")
            model = function(input_shape, num_classes)
            if not of_classes and (model.built or type(model).call is keras.Model.call):
                outputs = None  # integers or text may be expected; a GAN has no outputs
            else:
                # The call builds a model that is not built yet, such as a keras.Model subclass.
                one = lambda shape: keras.KerasTensor((None, *shape))  # noqa: E731
                outputs = model(keras.tree.map_shape_structure(one, input_shape))
        except ValueError as error:
            if is_own:
                raise
            reason = str(error).strip().partition("\n")[0]
            message = f"model.name: {config.name} cannot take inputs of shape {input_shape}: {reason}"
            raise ConfigError(message) from error
        if not of_classes and not model.compiled and not config.loss:
            raise ConfigError(
                f"model.name: {config.name} returns a model without a loss, and the targets are not integer classes:"
                f" name a loss with model.loss, or compile the model there"
            )
        if of_classes and not model.compiled and config.loss in ("", OF_CLASSES):  # others may have any outputs
            _check_outputs(config.name, outputs, num_classes)
        return model

    return build


def _check_outputs(name: str, outputs: Any, num_classes: int) -> None:
    if tuple(outputs.shape) != (None, num_classes):
        raise ConfigError(
            f"model.name: {name} gives outputs of shape {tuple(outputs.shape)}, expected one logit for each"
            f" of {num_classes} classes: {(None, num_classes)}"
        )


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
