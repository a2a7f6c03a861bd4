"""A checkpoint appears whole under its name, or not at all."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ringtrain import checkpoint


def small_model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 3)))
    return model


def test_saved_model_comes_back_with_its_optimizer(tmp_path):
    model = small_model()
    path = checkpoint.save(model, tmp_path, 17)
    assert path == tmp_path / "17.keras" and list(tmp_path.iterdir()) == [path]
    loaded = keras.models.load_model(path)
    for ours, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy())


class Unsaveable(keras.layers.Layer):
    """Fails in the middle of a save, as a full disk does."""

    def call(self, inputs):
        return inputs

    def save_own_variables(self, store):
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    old = checkpoint.save(small_model(), tmp_path, 17).read_bytes()
    model = keras.Sequential([keras.Input((2,)), Unsaveable()])
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(model, tmp_path, 17)
    assert [path.name for path in tmp_path.iterdir()] == ["17.keras"]
    assert (tmp_path / "17.keras").read_bytes() == old
