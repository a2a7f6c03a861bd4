"""Models by name: an MLP and a CNN that train in seconds on a CPU, two ResNets, and those of keras.applications."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

# Listed here, so that a misspelled name is reported before TensorFlow is loaded; a test compares the list with Keras'.
OF_KERAS = """
ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge DenseNet121 DenseNet169 DenseNet201
EfficientNetB0 EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 EfficientNetB6
EfficientNetB7 EfficientNetV2B0 EfficientNetV2B1 EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L EfficientNetV2M
EfficientNetV2S InceptionResNetV2 InceptionV3 MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetLarge
NASNetMobile ResNet101 ResNet101V2 ResNet152 ResNet152V2 ResNet50 ResNet50V2 VGG16 VGG19 Xception
""".split()  # noqa: SIM905 - forty lines otherwise


def mlp(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds an MLP with one hidden layer of 100 sigmoid units: 784-100-10 on MNIST, 79,510 parameters."""
    from keras import Input, Sequential, config, layers

    return Sequential(
        [
            Input(input_shape),
            layers.Flatten(),
            layers.Dense(100, activation="sigmoid"),
            layers.Dense(num_classes, dtype=config.floatx()),
        ],
        name="mlp",
    )


def cnn(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds a CNN: 5x5 convolutions of 32 and 64, each with 2x2 max pooling, dense 1024; 3.3 M parameters on MNIST."""
    from keras import Input, Sequential, config, layers

    return Sequential(
        [
            Input(input_shape),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(num_classes, dtype=config.floatx()),
        ],
        name="cnn",
    )


def resnet20(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds ResNet-20 for CIFAR-10 (He et al. 2015, section 4.2, n = 3, option A): 0.27 million parameters."""
    from keras import Input, Model, layers

    inputs = Input(input_shape)
    x = layers.ReLU()(_normalized_convolution(inputs, 16, 3))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if block == 0 and filters > 16 else 1
            residual = layers.ReLU()(_normalized_convolution(x, filters, 3, stride))
            residual = _normalized_convolution(residual, filters, 3)
            x = layers.ReLU()(layers.add([residual, _thinned(x, filters) if stride > 1 else x]))
    return Model(inputs, _classifier(x, num_classes, "he_normal"), name="resnet20")


def resnet50(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds ResNet-50 as in Goyal et al. 2017, section 5.1: 25.6 million parameters with 1,000 classes.

    Four stages of 3, 4, 6 and 3 bottlenecks. A stage's stride is in the 3x3 convolution (often called v1.5), not in the
    first 1x1 as in He et al. 2015; shortcuts that change the shape are 1x1 convolutions (option B). The last gamma of
    each block starts at zero, so that every block starts as the identity, and the classifier's weights are drawn from
    N(0, 0.01).
    """
    from keras import Input, Model, initializers, layers

    inputs = Input(input_shape)
    x = layers.ReLU()(_normalized_convolution(inputs, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for filters, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            stride = 2 if block == 0 and filters > 64 else 1
            residual = layers.ReLU()(_normalized_convolution(x, filters, 1))
            residual = layers.ReLU()(_normalized_convolution(residual, filters, 3, stride))
            residual = _normalized_convolution(residual, 4 * filters, 1, gamma="zeros")
            shortcut = x
            if block == 0:
                shortcut = _normalized_convolution(x, 4 * filters, 1, stride)
            x = layers.ReLU()(layers.add([residual, shortcut]))
    return Model(inputs, _classifier(x, num_classes, initializers.RandomNormal(stddev=0.01)), name="resnet50")


def _normalized_convolution(x: Any, filters: int, size: int, stride: int = 1, gamma: str = "ones") -> Any:
    from keras import layers

    x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)


def _thinned(x: Any, filters: int) -> Any:
    """Takes every second pixel of each row and column, and pads the channels with zeros on both sides to `filters`."""
    from keras import ops

    added = filters - x.shape[-1]
    return ops.pad(x[:, ::2, ::2, :], ((0, 0), (0, 0), (0, 0), (added // 2, added - added // 2)))


def _classifier(x: Any, num_classes: int, initializer: Any) -> Any:
    from keras import config, layers

    x = layers.GlobalAveragePooling2D()(x)
    return layers.Dense(num_classes, kernel_initializer=initializer, dtype=config.floatx())(x)


def application(name: str, input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds an architecture of keras.applications with random weights, for samples [height, width, channels]."""
    import keras

    if len(input_shape) != 3:
        raise ValueError("it takes samples of height, width and channels")
    function = getattr(keras.applications, name)
    options: dict[str, Any] = {}
    # Keras' own preprocessing of pixels from 0 to 255 is disabled or undone: data sources have done theirs.
    if "include_preprocessing" in inspect.signature(function).parameters:
        options["include_preprocessing"] = False
    elif name.startswith("EfficientNet"):  # those of 2019 always divide by 255
        options["input_tensor"] = keras.layers.Rescaling(255.0)(keras.Input(input_shape))
    model = function(weights=None, input_shape=input_shape, classes=num_classes, classifier_activation=None, **options)
    # With `input_tensor`, Keras makes the input a list of one.
    if "input_tensor" in options:
        return keras.Model(model.inputs[0], model.outputs[0], name=model.name)
    return model


APPLICATIONS: dict[str, Callable[[tuple[int, ...], int], keras.Model]] = {
    name: functools.partial(application, name) for name in OF_KERAS
}
