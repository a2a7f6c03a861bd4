"""One process: `ringtrain.fit` and Keras' `fit` give the same weights, history and callback events, bit for bit.

So does a run that is killed within an epoch and resumed, of a model and callbacks that keep all kinds of state.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain
from ringtrain.config import Config, RunConfig

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(100, 6)), RANDOM.normal(size=(100, 3))
WORDS = RANDOM.integers(0, 9, (96, 6))
"""of which each occurs several times in a batch"""


class Events(keras.callbacks.Callback):
    """Records each call, with its number and the names of its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for when in ("train", "test", "epoch", "train_batch", "test_batch"):
            for edge in ("begin", "end"):
                name = f"on_{when}_{edge}"
                setattr(self, name, functools.partial(self.record, name))

    def record(self, name: str, *number: Any, logs: Any = None) -> None:
        self.seen.append(
            (name, *(one if isinstance(one, int) else sorted(one or {}) for one in number), sorted(logs or {}))
        )


class Stops(keras.callbacks.Callback):
    """Ends training within the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 10:
            self.model.stop_training = True


def fitted(fit: Any, build: Any, x: Any, *stops: Any) -> tuple[list[Any], dict[str, list[float]], list[Any], bool]:
    model, events, held_out = build(), Events(), (x[: len(x) // 2], Y[: len(x) // 2])
    callbacks = [keras.callbacks.ReduceLROnPlateau("loss", patience=9), *stops, events]
    history = fit(model, x, validation_data=held_out, callbacks=callbacks, batch_size=16, epochs=3, verbose=0)
    return model.get_weights(), history.history, events.seen, model.stop_training


def dense(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model.compile(metrics=["mae"], **options)
    return model


def of_words(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(9, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class Largest(keras.metrics.Metric):
    """Keeps a maximum, which is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_pred))))

    def result(self) -> Any:
        return self.value


class Temperature(keras.layers.Layer):
    """Has a weight without dimensions."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.scale


class Lookahead(keras.optimizers.SGD):
    """Keeps variables that Keras does not track: an optimizer within it, and one of TensorFlow."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner = {"of all": [keras.optimizers.Adam(0.1)]}
        self.inner["of all"][0].build(variables)
        self.calls = tf.Variable(1.0, trainable=False)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = learning_rate / tf.cast(self.calls.assign_add(1.0), learning_rate.dtype)
        self.inner["of all"][0].update_step(gradient, variable, rate)


class Freezes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.layers[0].trainable = False


class Killed(BaseException):
    pass


class Kills(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 18:
            raise Killed


def resumes(folder: str, name: str, optimizer: Any, run_eagerly: bool) -> None:
    """Killed within the third epoch, and called again when it is complete."""
    options = {"run.directory": folder, "checkpoint.every_steps": 1}

    def script(name: str, *callbacks: Any) -> tuple[Any, ...]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), Temperature(), keras.layers.Dense(3)])
        model.compile(optimizer(), "mse", metrics=[Largest()], run_eagerly=run_eagerly)
        best = keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=2, restore_best_weights=True)
        words = {"batch_size": 16, "epochs": 9, "verbose": 0, "shuffle": False, "options": options}
        history = ringtrain.fit(model, X, Y, name=name, callbacks=[best, Freezes(), *callbacks], **words)
        trainable = [layer.trainable for layer in model.layers]
        return (
            history.history,
            history.checksum,
            trainable,
            model.stop_training,
            [w.tolist() for w in model.get_weights()],
        )

    whole = script(f"{name}-whole")
    assert whole[2] == [False, True, True] and len(whole[0]["loss"]) == 3 and whole[3], whole
    try:
        script(name, Kills())
    except Killed:
        for _ in range(2):
            assert script(name) == whole, name
    else:
        raise AssertionError("was not killed")


def main() -> None:
    options = Config(run=RunConfig(directory=sys.argv[1]))
    adam = keras.optimizers.Adam
    for x, build, *stops in (
        (X, lambda: dense(optimizer=adam(0.01), loss="mse")),
        (X, lambda: dense(optimizer=adam(0.01), loss="mse"), Stops()),
        (X, lambda: dense(optimizer=adam(0.01), loss="mse", steps_per_execution=3)),
        (X, lambda: dense(optimizer=adam(0.01, use_ema=True), loss="mse", steps_per_execution=3)),
        (WORDS, lambda: of_words(adam(0.01))),
        (WORDS, lambda: of_words(adam(0.01, global_clipnorm=0.01))),
    ):
        y = Y[: len(x)]

        def ours(model: keras.Model, x: Any, **arguments: Any) -> Any:
            return ringtrain.fit(model, x, y, shuffle=False, options=options, **arguments)  # noqa: B023

        def keras_(model: keras.Model, x: Any, **arguments: Any) -> Any:
            return model.fit(x, y, shuffle=False, **arguments)  # noqa: B023

        results, expected = fitted(ours, build, x, *stops), fitted(keras_, build, x, *stops)
        for weight, other in zip(results[0], expected[0], strict=True):
            np.testing.assert_array_equal(weight, other)
        assert results[1] == expected[1], (results[1], expected[1])
        assert results[3] == expected[3] == bool(stops)
        events = zip(results[2], expected[2], strict=False)
        assert results[2] == expected[2], [pair for pair in events if pair[0] != pair[1]][:3]
    resumes(sys.argv[1], "nadam", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(), 8.0), False)
    resumes(sys.argv[1], "lookahead", lambda: Lookahead(0.1), run_eagerly=True)
    print("bit for bit")


if __name__ == "__main__":
    main()
