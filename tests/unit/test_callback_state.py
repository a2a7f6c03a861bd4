"""State of callbacks: numbers, texts, arrays and variables that have changed are restored; arguments are not."""

from __future__ import annotations

import collections
import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.checkpoint import callback_state


class Keeps(keras.callbacks.Callback):
    """Callback with all kinds of attributes that are saved."""

    def __init__(self, patience: int = 3, token: str = "secret") -> None:
        super().__init__()
        self.patience, self.token, self.phase = patience, token, "first"
        self.wait, self.best, self.seen, self.weights = 0, float("inf"), [], None
        self.counts, self.pair, self.same = {}, (0, 0), [1]
        self.average, self.native = keras.Variable([0.0, 0.0]), tf.Variable(1)
        self.shadow = [tf.Variable([1.0, 2.0]), None]
        self.metric, self.seed = keras.metrics.Mean(), keras.layers.Dropout(0.5, seed=1)
        self.table, self.unchanged = np.zeros(3), np.ones(3)
        self.variable_of_script = keras.Variable(5.0)

    def train(self) -> None:
        self.wait, self.best, self.phase = 2, np.float32(0.5), "second"
        self.seen = [(1, 2.0), {"loss": np.arange(3.0)}]
        self.weights = [np.eye(2), np.float16(0.1), np.array(2.0)]
        self.counts[7], self.pair, self.table[1] = 1, (1, 2), 1.0
        self.average.assign([1.0, 2.0])
        self.native.assign(4)
        self.shadow[0].assign([5.0, 6.0])
        self.metric.update_state([1.0, 3.0])
        self.seed(np.ones(3), training=True)
        self.unchanged = np.ones(3)
        self.later, self.file = keras.Variable(8.0), object()


def _saved(*callbacks: keras.callbacks.Callback) -> callback_state.State:
    """As in a checkpoint: JSON, and arrays in another file."""
    state = callback_state.CallbackState(callbacks)
    for callback in callbacks:
        callback.train()
    states, arrays = state.save()
    text = json.dumps(states)
    assert "secret" not in text and "patience" not in text
    return json.loads(text), arrays


def test_what_has_changed_is_restored() -> None:
    """Arguments are those of the script, which may have changed."""
    trained, other = Keeps(), Keeps(patience=5, token="another secret")
    average, shadow, same = other.average, other.shadow[0], other.same
    other.unchanged, other.variable_of_script = np.zeros(3), keras.Variable(6.0)
    callback_state.restore_callbacks([other], _saved(trained))
    assert (other.patience, other.token) == (5, "another secret") and not hasattr(other, "file")
    assert (other.wait, other.best, other.phase, type(other.best)) == (2, 0.5, "second", np.float32)
    assert type(other.seen[0]) is tuple
    np.testing.assert_equal(other.seen, [(1, 2.0), {"loss": np.arange(3.0)}])
    np.testing.assert_array_equal(other.weights[0], np.eye(2))
    temperature, gate = other.weights[1:]
    assert (temperature.dtype, gate.dtype, gate.shape) == ("float16", "float64", ()), "weights without dimensions"
    assert temperature == np.float16(0.1) and gate == 2.0
    assert other.counts == {7: 1} and other.pair == (1, 2) and other.same is same
    assert other.average is average and other.shadow[0] is shadow, "another object than the callback's functions use"
    np.testing.assert_array_equal(average, [1.0, 2.0])
    np.testing.assert_array_equal(shadow, [5.0, 6.0])
    assert (int(other.native), float(other.metric.result())) == (4, 2.0)
    np.testing.assert_array_equal(other.table, [0.0, 1.0, 0.0])
    np.testing.assert_array_equal(other.unchanged, np.zeros(3))
    assert float(other.variable_of_script) == 6.0 and float(other.later) == 8.0
    for seed, of_other in zip(trained.seed.variables, other.seed.variables, strict=True):
        np.testing.assert_array_equal(seed, of_other)


def test_callbacks_are_found_by_class_and_order(capsys: Any) -> None:
    class Later(Keeps):
        pass

    first, second = Keeps(), Keeps()
    states, arrays = _saved(first, Later(), second)
    states[0]["values"]["wait"] = 7
    others = [keras.callbacks.History(), Later(), Keeps(), Keeps()]
    callback_state.restore_callbacks(others, (states, arrays))
    assert [one.wait for one in others[1:]] == [2, 7, 2]
    alone = [Later(), Keeps()]
    callback_state.restore_callbacks(alone, (states, arrays))
    assert [one.wait for one in alone] == [2, 0]
    assert "the state of 2 Keeps is not restored: the callbacks have 1 now" in capsys.readouterr().err


def test_variables_of_the_model_are_saved_with_the_model_only() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = Keeps()
    callback.weights, callback.layer = model.weights, model.layers[0]
    callback.copy = keras.models.clone_model(model)
    state = callback_state.CallbackState([callback], model)
    for weight in (*model.weights, *callback.copy.weights):
        weight.assign(weight + 1.0)
    states, arrays = state.save()
    assert [*states[0]["values"]] == ["copy"] and len(arrays) == 2


def test_what_changes_and_cannot_be_saved_is_named_once(capsys: Any) -> None:
    class Other:
        number = 0

    class Writes(keras.callbacks.CSVLogger):
        def __init__(self) -> None:
            super().__init__("unwritten.csv")
            self.inside, self.kept, self.last = Other(), len, collections.deque(maxlen=2)

    callback = Writes()
    state = callback_state.CallbackState([callback])
    callback.monitor_op = len  # as Keras' callbacks prepare a training
    state.save()
    for number in range(2):
        callback.writer, callback.inside.number = object(), number
        callback.last.append(number)
        state.save()
    callback.late = set()  # it is new since training has begun
    state.save()
    said = capsys.readouterr().err
    assert [said.count(f"Writes.{name} changes") for name in ("last", "inside", "late")] == [1, 1, 1], said
    assert said.count("\n") == 3, said


def test_what_an_interrupted_end_has_changed_is_undone() -> None:
    """Values, containers that were changed in place, and attributes that are new, gone, or other objects."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    callback = Keeps()
    callback.history, callback.timer = {"loss": [1.0]}, object()
    timer, average = callback.timer, callback.average
    before = callback_state.Snapshot(model, [callback])
    callback.train()
    callback.history["loss"].append(2.0)
    del callback.timer
    for variable in (*model.variables, *model.optimizer.variables):
        variable.assign(keras.ops.ones_like(variable) * 3)
    before.restore()
    assert callback.history == {"loss": [1.0]} and callback.timer is timer
    assert callback.pair == (0, 0) and not callback.counts and not callback.table.any()
    assert callback.average is average and not np.any(average) and float(callback.metric.result()) == 0
    assert not hasattr(callback, "later")
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1) and int(model.optimizer.iterations) == 0
    assert not any(np.all(weight.numpy() == 3) for weight in model.weights)


def test_a_rank_that_continues_has_the_state_of_another_one() -> None:
    """Also an attribute that has changed here only."""
    ahead, behind = Keeps(), Keeps()
    states = [callback_state.SharedCallbackState([callback], None) for callback in (ahead, behind)]
    ahead.phase = "second"
    behind.wait = 1
    states[0].restore(states[1].save())
    assert (ahead.phase, ahead.wait) == ("first", 1)
