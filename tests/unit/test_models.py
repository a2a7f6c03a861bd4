"""Models by name, a user's own, and random numbers that differ by rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ringtrain import models
from ringtrain.config import ModelConfig
from ringtrain.errors import ConfigError


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


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("input_shape", [(8, 8, 1), (32, 32, 3)])
def test_models_take_other_sizes_and_return_logits(name, input_shape):
    model = build(name, input_shape, 7)
    outputs = np.asarray(model(np.ones((3, *input_shape), np.float32) * 10))
    assert outputs.shape == (3, 7)
    assert not np.allclose(outputs.sum(axis=1), 1)


def test_names():
    with pytest.raises(ConfigError, match=r"^model.name: got ccn, did you mean cnn\?"):
        build("ccn")
    with pytest.raises(ConfigError, match=r"^model.name: got zzz, expected one of cnn, mlp"):
        build("zzz")
    with pytest.raises(ConfigError, match="importing no_such_module failed"):
        build("no_such_module:model")


def own(input_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def one_too_many(input_shape, num_classes):
    return own(input_shape, num_classes + 1)


def test_own_model_is_built_and_its_outputs_are_looked_at():
    assert build(f"{__name__}:own").count_params() == 7850
    with pytest.raises(ConfigError, match=r"outputs of shape \(None, 11\), expected .*10 classes"):
        build(f"{__name__}:one_too_many")


def dropped_by(rank: int) -> np.ndarray:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(50), keras.layers.Dropout(0.5)])
    models.seed_by_rank(model, 0, rank)
    return np.asarray(model(np.ones((1, 50)), training=True)) == 0


def test_ranks_start_with_the_same_weights_but_drop_other_units():
    first = [build("mlp").get_weights() for _ in range(2) if keras.utils.set_random_seed(3) is None]
    assert all(np.array_equal(a, b) for a, b in zip(*first, strict=True))
    assert np.array_equal(dropped_by(1), dropped_by(1))
    assert not np.array_equal(dropped_by(0), dropped_by(1))
