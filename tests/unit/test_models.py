"""Models by name, a user's own, and random numbers that differ by rank."""

from __future__ import annotations

import inspect
import zipfile

import keras
import numpy as np
import pytest

from ringtrain import models
from ringtrain.config.sections import ModelConfig
from ringtrain.errors import ConfigError
from ringtrain.models.zoo import APPLICATIONS

pytestmark = pytest.mark.slow


def build(name: str, input_shape=(28, 28, 1), num_classes=10) -> keras.Model:
    return models.builder(ModelConfig(name=name))(input_shape, num_classes)


def test_mlp_is_784_100_10_with_sigmoid():
    model = build("mlp")
    assert [weight.shape for weight in model.weights] == [(784, 100), (100,), (100, 10), (10,)]
    assert model.layers[1].activation is keras.activations.sigmoid
    assert model.count_params() == 79_510


def test_cnn_is_two_convolutions_and_dense_1024():
    model = build("cnn")
    kernels = [weight.shape for weight in model.weights if len(weight.shape) > 1]
    assert kernels == [(5, 5, 1, 32), (5, 5, 32, 64), (7 * 7 * 64, 1024), (1024, 10)]
    assert sum(isinstance(layer, keras.layers.MaxPooling2D) for layer in model.layers) == 2
    assert model.count_params() == 3_274_634


def num_trainable(model: keras.Model) -> int:
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def convolutions(model: keras.Model) -> list[tuple[int, int, int]]:
    """Size, filters and stride of each, in the order of the layers."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert not any(layer.use_bias for layer in layers)
    assert {layer.data_format for layer in layers} == {"channels_last"}
    return [(layer.kernel_size[0], layer.filters, layer.strides[0]) for layer in layers]


def test_resnet20_is_that_of_he_et_al():
    model = build("resnet20", (32, 32, 3))
    assert num_trainable(model) == 269_722
    stages = [(3, filters, stride) for filters in (16, 32, 64) for stride in (2 - (filters == 16), 1, 1, 1, 1, 1)]
    assert convolutions(model) == [(3, 16, 1), *stages]
    assert model.layers[-2].input.shape == (None, 8, 8, 64)


def test_resnet50_is_that_of_goyal_et_al():
    model = build("resnet50", (224, 224, 3), 1000)
    assert num_trainable(model) == 25_557_032
    sizes = convolutions(model)
    assert sizes[0] == (7, 64, 2)
    assert [size for size, _, stride in sizes[1:] if stride == 2] == [3, 1] * 3  # 3x3, and the shortcut
    assert model.layers[-2].input.shape == (None, 7, 7, 2048)
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert {(layer.momentum, layer.epsilon) for layer in norms} == {(0.9, 1e-5)}
    classifier = model.layers[-1]
    assert float(classifier.kernel.numpy().std()) == pytest.approx(0.01, rel=0.02) and not classifier.bias.numpy().any()


def test_resnet50s_blocks_begin_as_the_identity():
    model = build("resnet50", (32, 32, 3))
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    zero = [layer for layer in norms if not layer.gamma.numpy().any()]
    assert len(norms) == 53 and len(zero) == 16
    ends = [layer for layer in model.layers if isinstance(layer, keras.layers.Add)]
    assert {end.input[0]._keras_history.operation for end in ends} == set(zero)
    assert all(np.all(layer.gamma.numpy() == 1) for layer in norms if layer not in zero)


@pytest.mark.parametrize("name", models.MODELS)
def test_logits_are_float32_under_mixed_precision(name):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = build(name, (8, 8, 1))
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.outputs[0].dtype == "float32" and model.layers[1].compute_dtype == "float16"
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}


def test_the_names_of_keras_applications_are_keras_own():
    functions = {name for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    assert set(APPLICATIONS) == functions


@pytest.mark.parametrize("name", ["mobilenet-v2", "EfficientNetB0"])
def test_an_application_is_untrained_and_gives_logits(name):
    model = build(name, (32, 32, 3), 7)
    outputs = np.asarray(model(np.random.default_rng(0).random((3, 32, 32, 3), np.float32) * 10))
    assert outputs.shape == (3, 7)
    assert not np.allclose(outputs.sum(axis=1), 1)


def test_applications_get_pixels_as_data_sources_give_them():
    """EfficientNetB0 divides by 255 within; MobileNetV3 and the like are told not to."""
    x = np.random.default_rng(0).random((1, 32, 32, 3), np.float32)
    model = build("EfficientNetB0", (32, 32, 3))
    rescaled = keras.Model(
        model.inputs[0], next(layer for layer in model.layers if "normalization" in layer.name).output
    )
    assert np.allclose(rescaled(x), x, atol=1e-6)
    rescalings = [layer for layer in build("MobileNetV3Small", (32, 32, 3)).layers if "rescaling" in layer.name]
    assert not rescalings


@pytest.mark.parametrize("name", ["resnet20", "mobilenet-v2"])
def test_saved_models_are_plain_keras(name, tmp_path):
    model = build(name, (32, 32, 3))
    model.compile("sgd", models.cross_entropy(0.1))
    model.save(tmp_path / "model.keras")
    assert b"ringtrain" not in zipfile.ZipFile(tmp_path / "model.keras").read("config.json")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = np.ones((1, 32, 32, 3), np.float32)
    assert np.array_equal(np.asarray(loaded(x)), np.asarray(model(x)))
    assert type(loaded.loss) is keras.losses.SparseCategoricalCrossentropy


def test_label_smoothing_is_keras_own_for_labels_that_are_integers():
    random = np.random.default_rng(0)
    labels, logits = random.integers(0, 5, 6), random.normal(size=(6, 5)).astype(np.float32)
    for smoothing in (0.0, 0.1):
        reference = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)
        expected = float(reference(np.eye(5)[labels], logits))
        assert float(models.cross_entropy(smoothing)(labels, logits)) == pytest.approx(expected, abs=1e-6)
    half = models.cross_entropy(smoothing)(labels, keras.ops.cast(logits, "bfloat16"))
    assert half.dtype == "float32"


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("input_shape", [(8, 8, 1), (32, 32, 3)])
def test_models_take_other_sizes_and_return_logits(name, input_shape):
    model = build(name, input_shape, 7)
    outputs = np.asarray(model(np.ones((3, *input_shape), np.float32) * 10))
    assert outputs.shape == (3, 7)
    assert not np.allclose(outputs.sum(axis=1), 1)
    assert name == model.name


def test_our_resnet50_and_keras_are_told_apart_by_their_names():
    assert build("resnet-50", (32, 32, 3)).name == "resnet50"
    assert num_trainable(build("ResNet50", (32, 32, 3))) != num_trainable(build("resnet50", (32, 32, 3)))


@pytest.mark.parametrize(
    ("name", "input_shape", "message"),
    [
        ("ccn", (28, 28, 1), r"model.name: got ccn, did you mean cnn\?"),
        ("zzz", (28, 28, 1), "model.name: got zzz, expected one of cnn, mlp, resnet20, resnet50 "),
        ("efficientnet_b9", (28, 28, 1), r"model.name: got efficientnet_b9, did you mean EfficientNetB\d\?"),
        ("no_such_module:model", (4, 4, 1), ".*importing no_such_module failed"),
        ("cnn", (7,), r"model.name: cnn cannot take inputs of shape \(7,\): [^\n]+$"),
        ("VGG16", (9,), r"model.name: VGG16 cannot .* \(9,\): it takes samples of height"),
        ("mobilenet-v2", (28, 28, 1), r"model.name: mobilenet-v2 cannot .* \(28, 28, 1\): Input size must be at"),
    ],
)
def test_names_and_samples_that_do_not_fit_are_refused_in_one_line(name, input_shape, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        build(name, input_shape)


def own(input_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def one_too_many(input_shape, num_classes):
    return own(input_shape, num_classes + 1)


def test_own_model_is_built_and_its_outputs_are_looked_at():
    assert build(f"{__name__}:own").count_params() == 7850
    with pytest.raises(ConfigError, match=r"outputs of shape \(None, 11\), expected .*10 classes"):
        build(f"{__name__}:one_too_many")
