"""State of callbacks: what has changed is saved and restored; arguments, texts and objects are not."""

from __future__ import annotations

import collections
import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.run import callback_state


class Keeps(keras.callbacks.Callback):
    def __init__(self, patience: int = 3, token: str = "secret") -> None:
        super().__init__()
        self.patience, self.token = patience, token
        self.wait, self.best, self.seen = 0, float("inf"), []
        self.weights = None

    def train(self) -> None:
        self.wait, self.best = 2, np.float32(0.5)
        self.seen = [(1, 2.0), {"loss": np.arange(3.0)}]
        self.weights = [np.eye(2), np.arange(3), np.float16(0.1), np.array(2.0)]
        self.token, self.file, self.large = "another secret", object(), 1 << 80


def _saved(*callbacks: keras.callbacks.Callback) -> list[dict[str, object]]:
    """As in a checkpoint: JSON, and arrays in another file."""
    state = callback_state.CallbackState(callbacks)
    for callback in callbacks:
        callback.train()
    states, arrays = state.save()
    text = json.dumps(states)
    assert "secret" not in text and "patience" not in text and "large" not in text
    return callback_state.loaded_callbacks(json.loads(text), arrays)


def test_what_has_changed_is_restored() -> None:
    other = Keeps(patience=5)
    callback_state.restore_callbacks([other], _saved(Keeps()))
    assert (other.wait, other.best, other.patience, other.token) == (2, 0.5, 5, "secret")
    np.testing.assert_equal(other.seen, [[1, 2.0], {"loss": np.arange(3.0)}])
    np.testing.assert_array_equal(other.weights[0], np.eye(2))
    temperature, gate = other.weights[2:]
    assert (temperature.dtype, gate.dtype, gate.shape) == ("float16", "float64", ()), "weights without dimensions"
    assert temperature == np.float16(0.1) and gate == 2.0
    assert not hasattr(other, "file")


def test_callbacks_are_found_by_class_and_order() -> None:
    class Later(Keeps):
        pass

    first, second = Keeps(), Keeps()
    states = _saved(first, Later(), second)
    states[0]["values"]["wait"] = 7
    others = [keras.callbacks.History(), Later(), Keeps(), Keeps()]
    callback_state.restore_callbacks(others, states)
    assert [one.wait for one in others[1:]] == [2, 7, 2]


class KeepsMore(keras.callbacks.Callback):
    """What averages, replay buffers and counters keep."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last, self.counts = set(), collections.deque(maxlen=2), collections.defaultdict(int)
        self.pair, self.frozen = (0, 0), frozenset()
        self.average, self.native = keras.Variable([0.0, 0.0]), tf.Variable(1)
        self.shadow = [tf.Variable([1.0, 2.0]), tf.constant(3.0)]
        self.metric = keras.metrics.Mean()
        self.table, self.unchanged = np.zeros(3), np.ones(3)
        self.variable_of_script = keras.Variable(5.0)

    def train(self) -> None:
        self.seen |= {(1, 2), (3, 4)}
        self.last.extend([1, 2, 3])
        self.counts[7] += 1
        self.pair, self.frozen = (1, 2), frozenset({1})
        self.average.assign([1.0, 2.0])
        self.native.assign(4)
        self.shadow[0].assign([5.0, 6.0])
        self.shadow[1] = tf.constant(7.0)
        self.metric.update_state([1.0, 3.0])
        self.table[1] = 1.0
        self.unchanged = np.ones(3)
        self.later = keras.Variable(8.0)


def test_containers_variables_and_metrics_are_restored() -> None:
    other = KeepsMore()
    average, shadow = other.average, other.shadow[0]
    other.unchanged, other.variable_of_script = np.zeros(3), keras.Variable(6.0)  # arguments, in a script that changed
    callback_state.restore_callbacks([other], _saved(KeepsMore()))
    assert other.seen == {(1, 2), (3, 4)} and other.frozen == frozenset({1}) and other.pair == (1, 2)
    assert other.last == collections.deque([2, 3]) and other.last.maxlen == 2
    other.counts[8] += 1  # still a defaultdict
    assert other.counts == {7: 1, 8: 1}
    assert other.average is average and other.shadow[0] is shadow, "another object than the callback's functions use"
    np.testing.assert_array_equal(average, [1.0, 2.0])
    np.testing.assert_array_equal(shadow, [5.0, 6.0])
    assert (int(other.native), float(other.shadow[1]), float(other.metric.result())) == (4, 7.0, 2.0)
    np.testing.assert_array_equal(other.table, [0.0, 1.0, 0.0])
    np.testing.assert_array_equal(other.unchanged, np.zeros(3))
    assert float(other.variable_of_script) == 6.0 and float(other.later) == 8.0


def test_variables_of_the_model_are_saved_with_the_model_only() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = KeepsMore()
    callback.weights, callback.layer = model.weights, model.layers[0]
    callback.copy = keras.models.clone_model(model)
    state = callback_state.CallbackState([callback], model)
    for weight in (*model.weights, *callback.copy.weights):
        weight.assign(weight + 1.0)
    states, arrays = state.save()
    assert [*states[0]["values"]] == ["copy"] and len(arrays) == 2


def test_callbacks_of_another_list_are_found_by_their_texts(capsys: Any) -> None:
    states = _saved(Keeps(token="secret"), Keeps(token="secret too"))
    states[1]["values"]["wait"] = 7
    alone, others = Keeps(token="secret too"), [Keeps(token=f"secret {number}") for number in range(3)]
    callback_state.restore_callbacks([alone], states)
    assert alone.wait == 7
    callback_state.restore_callbacks(others, states)
    assert [one.wait for one in others] == [0, 0, 0]
    assert capsys.readouterr().err.count("Keeps begins anew") == 3


def test_a_seed_generator_is_restored_and_an_iterator_named(capsys: Any) -> None:
    class Draws(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seed, self.rates = keras.random.SeedGenerator(1), iter([1.0, 2.0])

        def train(self) -> None:
            keras.random.uniform([], seed=self.seed)

    callback, other = Draws(), Draws()
    state = callback_state.CallbackState([callback])
    state.begin()
    callback.train()
    states, arrays = state.save()
    callback_state.restore_callbacks([other], callback_state.loaded_callbacks(states, arrays))
    assert isinstance(other.seed, keras.random.SeedGenerator)
    np.testing.assert_array_equal(other.seed.state, callback.seed.state)
    assert "Draws.rates changes and cannot be saved" in capsys.readouterr().err


def test_what_changes_and_cannot_be_saved_is_named_once(capsys: Any) -> None:
    class Other:
        number = 0

    class Writes(keras.callbacks.CSVLogger):
        def __init__(self) -> None:
            super().__init__("unwritten.csv")
            self.text, self.inside, self.draw, self.same = "a", Other(), np.random.default_rng(0), Other()

    callback = Writes()
    state = callback_state.CallbackState([callback])
    callback.monitor = len  # as Keras' callbacks prepare a training
    state.begin()
    callback.text, callback.writer = "secret", object()
    callback.draw.random()
    for _ in range(2):
        state.save()
    said = capsys.readouterr().err
    assert said.count("Writes.text changes and cannot be saved (str)") == 1 and said.count("Writes.draw") == 1
    assert said.count("\n") == 2 and "secret" not in said, said


def test_what_an_interrupted_end_has_changed_is_undone() -> None:
    """Values, containers that were changed in place, and attributes that are new, gone, or other objects."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    callback = KeepsMore()
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
    assert callback.seen == set() and callback.last == collections.deque() and not callback.counts
    assert callback.average is average and not np.any(average) and float(callback.metric.result()) == 0
    assert not hasattr(callback, "later")
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1) and int(model.optimizer.iterations) == 0
    assert not any(np.all(weight.numpy() == 3) for weight in model.weights)
