"""The architectures of keras.applications, untrained and with logits."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

# Written down, so that a misspelt name is told before TensorFlow is loaded; a test compares them with Keras'.
NAMES = """
ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge DenseNet121 DenseNet169 DenseNet201
EfficientNetB0 EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 EfficientNetB6
EfficientNetB7 EfficientNetV2B0 EfficientNetV2B1 EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L EfficientNetV2M
EfficientNetV2S InceptionResNetV2 InceptionV3 MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetLarge
NASNetMobile ResNet101 ResNet101V2 ResNet152 ResNet152V2 ResNet50 ResNet50V2 VGG16 VGG19 Xception
""".split()  # noqa: SIM905 - forty lines otherwise


def application(name: str, input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds an architecture of keras.applications with random weights.

    Args:
        input_shape: of one sample: height, width, channels.

    Returns:
        The model. It takes the values that data sources give: preprocessing that Keras builds in, for pixels from 0 to
        255, is left out or undone.

    Raises:
        ConfigError: the architecture has no use for samples of this shape.
    """
    import keras

    if len(input_shape) != 3:
        raise ConfigError(f"model.name: {name} wants samples of height, width and channels, got shape {input_shape}")
    function = getattr(keras.applications, name)
    options: dict[str, Any] = {}
    if "include_preprocessing" in inspect.signature(function).parameters:
        options["include_preprocessing"] = False
    elif name.startswith("EfficientNet"):  # those of 2019 divide by 255 in any case
        options["input_tensor"] = keras.layers.Rescaling(255.0)(keras.Input(input_shape))
    try:
        model = function(
            weights=None, input_shape=input_shape, classes=num_classes, classifier_activation=None, **options
        )
        # With a tensor of ours, Keras makes a list of one input.
        return keras.Model(model.inputs[0], model.outputs[0], name=model.name) if "input_tensor" in options else model
    except ValueError as error:
        raise ConfigError(
            f"model.name: {name} cannot be built for samples of shape {input_shape}: {str(error).splitlines()[0]}"
        ) from error


APPLICATIONS: dict[str, Callable[[tuple[int, ...], int], keras.Model]] = {
    name: functools.partial(application, name) for name in NAMES
}
