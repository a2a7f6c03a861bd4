"""State of callbacks: what has changed is saved and restored; arguments, texts and objects are not."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from ringtrain.run import model_state


class Keeps(keras.callbacks.Callback):
    def __init__(self, patience: int = 3, token: str = "secret") -> None:
        super().__init__()
        self.patience, self.token = patience, token
        self.wait, self.best, self.seen = 0, float("inf"), []
        self.weights = None

    def train(self) -> None:
        self.wait, self.best = 2, np.float32(0.5)
        self.seen = [(1, 2.0), {"loss": np.arange(3.0)}]
        self.weights = [np.eye(2), np.arange(3)]
        self.token, self.file, self.large = "another secret", object(), 1 << 80


def _saved(*callbacks: keras.callbacks.Callback) -> list[dict[str, object]]:
    """As in a checkpoint: JSON, and arrays in another file."""
    state = model_state.CallbackState(callbacks)
    for callback in callbacks:
        callback.train()
    states, arrays = state.save()
    text = json.dumps(states)
    assert "secret" not in text and "patience" not in text and "large" not in text
    return model_state.loaded_callbacks(json.loads(text), arrays)


def test_what_has_changed_is_restored() -> None:
    other = Keeps(patience=5)
    model_state.restore_callbacks([other], _saved(Keeps()))
    assert (other.wait, other.best, other.patience, other.token) == (2, 0.5, 5, "secret")
    np.testing.assert_equal(other.seen, [[1, 2.0], {"loss": np.arange(3.0)}])
    np.testing.assert_array_equal(other.weights[0], np.eye(2))
    assert not hasattr(other, "file")


def test_callbacks_are_found_by_class_and_order() -> None:
    class Later(Keeps):
        pass

    first, second = Keeps(), Keeps()
    states = _saved(first, Later(), second)
    states[0]["values"]["wait"] = 7
    others = [keras.callbacks.History(), Later(), Keeps(), Keeps()]
    model_state.restore_callbacks(others, states)
    assert [one.wait for one in others[1:]] == [2, 7, 2]


@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_keras_callbacks_that_wait(kind: type) -> None:
    """Restored within a run, they decide as if never interrupted, also with a min_delta, whose sign Keras changes."""

    def begun() -> keras.callbacks.Callback:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.train_on_batch(np.zeros((1, 2)), np.zeros((1, 1)))
        callback = kind("loss", min_delta=0.1, patience=3)
        callback.set_model(model)
        callback.on_train_begin()
        return callback

    losses = [1.0, 0.95, 0.8, 0.75, 0.72]
    whole, part = begun(), begun()
    state = model_state.CallbackState([part])
    for epoch, loss in enumerate(losses):
        whole.on_epoch_end(epoch, {"loss": loss})
    for epoch, loss in enumerate(losses[:2]):
        part.on_epoch_end(epoch, {"loss": loss})
    resumed = begun()
    model_state.restore_callbacks([resumed], model_state.loaded_callbacks(*state.save()))
    for epoch, loss in enumerate(losses[2:], 2):
        resumed.on_epoch_end(epoch, {"loss": loss})
    assert (resumed.best, resumed.wait) == (whole.best, whole.wait) == (0.8, 2)
