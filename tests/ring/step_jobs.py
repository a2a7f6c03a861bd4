"""Steps with numbers, variables or failures that differ between ranks, and steps that XLA compiles; see run_fit.py."""

from __future__ import annotations

import functools
import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import SAME, WEIGHTS, X, Y, compiled, dense, equals_one_process, options, refused
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config import TrainConfig
from ringtrain.errors import RingtrainError
from ringtrain.hvd import train_step


class Noise(keras.layers.Layer):
    """Notes random numbers of TensorFlow in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        seen = tf.numpy_function(self._note, [tf.random.normal([])], tf.float32)
        return inputs + tf.cast(0 * tf.ensure_shape(seen, []), inputs.dtype)

    def _note(self, number: Any) -> Any:
        self.seen.append(float(number))
        return number


@only(np=2)
def numbers_of_tensorflow_differ_between_ranks() -> None:
    """Also if the script has given rank 0 a small seed."""
    for seed in (0, 1):
        noise = Noise()
        model = compiled(dense(noise))
        keras.utils.set_random_seed(seed)
        ringtrain.fit(model, X, Y, name=f"noise-{seed}", options=options(), **SAME)
        of_ranks = hvd.allgather_object(noise.seen[-6:])
        assert not {*of_ranks[0]} & {*of_ranks[1]}, of_ranks


class Prepared(keras.Model):
    """Scales rows in `fit` and `evaluate`, as the tasks of KerasHub do; validation has the rows of `fit`."""

    def fit(self, x: Any, y: Any, validation_data: Any, **more: Any) -> Any:
        if isinstance(validation_data, tf.data.Dataset):
            validation_data = validation_data.map(lambda held_out, targets: (held_out / 2, targets))
        else:
            validation_data = (validation_data[0] / 2, validation_data[1])
        return super().fit(x / 2, y, validation_data=validation_data, **more)

    def evaluate(self, x: Any = None, y: Any = None, **more: Any) -> Any:
        if not more.get("_use_cached_eval_dataset"):
            x = x / 2
        return super().evaluate(x, y, **more)


def _prepared() -> keras.Model:
    inputs = keras.Input((6,))
    return compiled(Prepared(inputs, dense()(inputs)))


@only(np=2)
def rows_that_a_fit_prepares_are_evaluated_as_they_are() -> None:
    equals_one_process(_prepared, X, Y, "prepared-in-fit", validation_data=(X[:40], Y[:40]))
    of_unknown_length = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(20).filter(lambda *_: True)
    equals_one_process(_prepared, X, Y, "prepared-unknown-length", validation_data=of_unknown_length)


class Untracked(keras.layers.Layer):
    """Has a variable that Keras does not track, with another value on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = tf.Variable(float(hvd.rank()), trainable=False)

    def call(self, inputs: Any) -> Any:
        return inputs + tf.cast(self.shift, inputs.dtype)


class Listed(keras.metrics.Metric):
    """Has its state in a list."""

    def __init__(self) -> None:
        super().__init__(name="listed")
        self.seen: list[float] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen += np.ravel(y_pred).tolist()

    def result(self) -> Any:
        return float(np.median(self.seen or [0.0]))

    def reset_state(self) -> None:
        self.seen = []


@only(np=2)
def what_keras_does_not_track() -> None:
    """Variables are rank 0's at first; a metric in a list is named."""
    model = compiled(dense(Untracked()), metrics=[Listed()], run_eagerly=True)
    history: Any = ringtrain.fit(model, X, Y, name="untracked", options=options(), **SAME)
    assert float(model.layers[1].shift.numpy()) == 0.0
    scale = keras.Variable(1.0 + hvd.rank(), trainable=False)

    def scaled(targets: Any, outputs: Any) -> Any:
        return keras.losses.mean_squared_error(targets, outputs) * keras.ops.cast(scale, outputs.dtype)

    ringtrain.fit(compiled(dense(), scaled), X, Y, options=options(), **SAME)
    assert float(scale) == 1.0
    summary = json.loads((history.run / "summary.json").read_text())
    assert any("listed" in text for text in summary["own_code"]), summary["own_code"]


@only(np=2)
def a_number_of_rows_that_a_step_takes_for_granted() -> None:
    """The error names the line, and says that a step gets a part of the rows."""

    class Granted(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step((data[0] + tf.ones([32, 1], tf.float64), data[1]))

    class Reshaping(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.reshape(inputs, (32, 8))

    plain = dense()
    for model in (Granted(plain.inputs, plain.outputs), dense(Reshaping())):
        text = refused(
            "get this rank's part of the first axis",
            lambda model=model: ringtrain.fit(compiled(model), X[:64], Y[:64], options=options(), **SAME),
        )
        assert "step_jobs.py:" in text and "\n" not in text, text


class _Keeps(keras.layers.Layer):
    """A layer with numbers that are no weight, by another seed on each rank or the same."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(seed).normal(size=6)

    def call(self, inputs: Any) -> Any:
        return inputs * self.numbers


@only(np=2)
def numbers_that_no_rank_shares_are_named() -> None:
    """As of NumPy without a seed: each rank would train another model."""
    for name, seed in {"shared": 1, "own": hvd.rank()}.items():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), _Keeps(seed), keras.layers.Dense(3)])
        history: Any = ringtrain.fit(compiled(model), X, Y, name=f"numbers-{name}", options=options(), **SAME)
        summary = json.loads((history.run / "summary.json").read_text())
        is_named = "each rank has other numbers in this array" in str(summary["unlike_one_process"])
        assert is_named == (name == "own"), summary["unlike_one_process"]


class Picky(keras.layers.Layer):
    """Cannot compute a batch of evaluation whose first number is above 1000."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            return x
        with tf.control_dependencies([tf.debugging.assert_less(x[0, 0], tf.cast(1000, x.dtype))]):
            return tf.identity(x)


@only(np=2)
def a_failure_of_evaluation_on_one_rank_is_raised_on_all() -> None:
    """Rank 0 alone has a row to evaluate; scripts may catch the error, and continue together."""
    model = compiled(keras.Sequential([keras.Input((6,)), Picky(), keras.layers.Dense(3)]))
    held_out = (np.full((1, 6), 2000.0), np.zeros((1, 3)))
    try:
        ringtrain.fit(model, X, Y, validation_data=held_out, name="picky", options=options(), **SAME)
        raise AssertionError("nothing was raised")
    except (tf.errors.InvalidArgumentError, RingtrainError) as error:
        assert isinstance(error, RingtrainError) == (hvd.rank() > 0), error
        assert hvd.rank() == 0 or ("rank 0 on " in str(error) and "InvalidArgumentError" in str(error)), error
    assert hvd.allgather_object(hvd.rank(), name="after_picky") == list(range(hvd.size()))


@only(np=3)
def compiled_by_xla() -> None:
    """Unequal parts, by the option or as compiled; what XLA cannot do is named, or trained without it."""

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if train_step.has_layer(self.model, "ranks"):  # not in Keras' own fit
                compiles.add(train_step.has_layer(self.model, "jit"))

    compiles: set[bool] = set()
    by_option = {"options": options(train=TrainConfig(jit=True))}
    equals_one_process(lambda: compiled(dense()), X, Y, "xla", callbacks=[Noting()], **by_option)
    equals_one_process(lambda: compiled(dense(), jit_compile=True), X, Y, "xla-compiled", callbacks=[Noting()])
    assert compiles == {True}
    compiles.clear()
    weights = {"sample_weight": WEIGHTS}
    equals_one_process(lambda: compiled(dense(), jit_compile=True), X, Y, "no-xla", callbacks=[Noting()], **weights)
    assert compiles == {False}
    own = compiled(dense())
    own.train_step = functools.partial(keras.Model.train_step, own)
    fit = lambda model, **more: ringtrain.fit(model, X, Y, **SAME, **by_option, **more)  # noqa: E731
    refused("masks, sample or class weights", lambda: fit(compiled(dense()), **weights))
    refused("has a train_step of its own", lambda: fit(own))
