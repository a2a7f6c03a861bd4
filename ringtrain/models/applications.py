"""Architectures of keras.applications, untrained and with logits."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

# Listed here, so that a misspelled name is reported before TensorFlow is loaded; a test compares the list with Keras'.
NAMES = """
ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge DenseNet121 DenseNet169 DenseNet201
EfficientNetB0 EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 EfficientNetB6
EfficientNetB7 EfficientNetV2B0 EfficientNetV2B1 EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L EfficientNetV2M
EfficientNetV2S InceptionResNetV2 InceptionV3 MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetLarge
NASNetMobile ResNet101 ResNet101V2 ResNet152 ResNet152V2 ResNet50 ResNet50V2 VGG16 VGG19 Xception
""".split()  # noqa: SIM905 - forty lines otherwise


def application(name: str, input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds an architecture of keras.applications with random weights, for samples [height, width, channels].

    The model takes the values that data sources return: Keras' own preprocessing of pixels from 0 to 255 is disabled or
    undone. Raises ConfigError if the architecture does not support samples of this shape.
    """
    import keras

    if len(input_shape) != 3:
        raise ConfigError(f"model.name: {name} wants samples of height, width and channels, got shape {input_shape}")
    function = getattr(keras.applications, name)
    options: dict[str, Any] = {}
    if "include_preprocessing" in inspect.signature(function).parameters:
        options["include_preprocessing"] = False
    elif name.startswith("EfficientNet"):  # those of 2019 always divide by 255
        options["input_tensor"] = keras.layers.Rescaling(255.0)(keras.Input(input_shape))
    try:
        model = function(
            weights=None, input_shape=input_shape, classes=num_classes, classifier_activation=None, **options
        )
        # With `input_tensor`, Keras makes the input a list of one.
        if "input_tensor" in options:
            return keras.Model(model.inputs[0], model.outputs[0], name=model.name)
        return model
    except ValueError as error:
        raise ConfigError(
            f"model.name: {name} cannot be built for samples of shape {input_shape}: {str(error).splitlines()[0]}"
        ) from error


APPLICATIONS: dict[str, Callable[[tuple[int, ...], int], keras.Model]] = {
    name: functools.partial(application, name) for name in NAMES
}
