"""Steps of a model's own: what they get of a batch, and what they return as logs; see run_fit.py."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import SAME, X, Y, compiled, dense, distance, equals_one_process, options, refused, whole_job
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config import Config, TrainConfig


class Raw(keras.Model):
    """Returns a loss that no metric has, under the name of Keras' own metric, and another number."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "twice": 2 * loss}

    def test_step(self, data: Any) -> Any:
        x, y = data
        loss = tf.reduce_mean(tf.square(self(x, training=False) - y))
        return {"loss": loss, "twice": 2 * loss}


class Renamed(Raw):
    """Returns results of metrics, one of them under another name, and leaves one out."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.total = keras.metrics.Mean(name="total")
        self.unused = keras.metrics.Mean(name="unused")

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.total, self.unused]

    def train_step(self, data: Any) -> Any:
        self.total.update_state(tf.square(self(data[0]) - data[1]))
        logs = super().train_step(data)
        return {"loss": self.total.result(), "twice": logs["twice"]}

    def test_step(self, data: Any) -> Any:
        logs = super().test_step(data)
        self.total.update_state(tf.square(self(data[0]) - data[1]))
        return {"error": self.total.result(), "twice": logs["twice"]}


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
    """Variables are rank 0's at first; a metric in a list is named; a layer frozen without `compile` is trained."""
    model = compiled(dense(Untracked()), metrics=[Listed()], run_eagerly=True)
    history: Any = ringtrain.fit(model, X, Y, name="untracked", options=options(), **SAME)
    assert float(model.layers[1].shift.numpy()) == 0.0
    scale = keras.Variable(1.0 + hvd.rank(), trainable=False)

    def scaled(targets: Any, outputs: Any) -> Any:
        return keras.losses.mean_squared_error(targets, outputs) * keras.ops.cast(scale, outputs.dtype)

    ringtrain.fit(compiled(dense(), scaled), X, Y, options=options(), **SAME)
    assert float(scale) == 1.0
    summary = json.loads((history.run / "summary.json").read_text())
    assert any("listed" in text for text in summary["unlike_one_process"]), summary["unlike_one_process"]

    ours, reference = compiled(dense()), compiled(dense())
    for compiles in (False, False, True):
        if compiles:
            compiled(ours)
            compiled(reference)
        ringtrain.fit(ours, X, Y, options=options(), **SAME)
        reference.fit(X, Y, **SAME)
        assert distance(ours, reference) < 1e-10, compiles
        ours.layers[0].trainable = reference.layers[0].trainable = False
    assert not ours.layers[0].trainable


class Triplets(keras.Model):
    """Calls a part of itself for each of three tensors, in which its own `call` has another form."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def call(self, anchor: Any, near: Any, far: Any) -> Any:
        return self.inner(anchor), self.inner(near), self.inner(far)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            anchor, near, far = (self.inner(part) for part in data)
            loss = tf.reduce_mean(tf.square(anchor - near) - tf.tanh(tf.square(anchor - far)))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Labeled(keras.Model):
    """Trains on rows without targets and, in the same batch, fewer rows with targets, by its compiled `loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def train_step(self, data: Any) -> Any:
        unlabeled, (x, y) = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.loss(y, self.inner(x))) + tf.reduce_mean(tf.square(self.inner(unlabeled)))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"labeled": loss}


class LabeledFirst(Labeled):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data[::-1])


class Decorated(Raw):
    """Trains in a `tf.function`."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Inner(Raw):
    """Trains in a `tf.function` that its step calls."""

    @tf.function
    def _train(self, data: Any) -> Any:
        return super().train_step(data)

    def train_step(self, data: Any) -> Any:
        return self._train(data)


class Tracking(keras.Model):
    """Gives trackers the mean of the rows that it gets: Keras' own of the loss, and one of the model's."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for metric in self.metrics:
            if metric.name in ("loss", "tracked"):
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


def _of(kind: Any) -> keras.Model:
    layers = dense()
    return compiled(kind(layers.inputs, layers.outputs), None)


@only(np=3)
def trackers_of_an_own_step() -> None:
    """A mean of a rank's rows counts by their number, which is not the same on all ranks."""

    def make() -> keras.Model:
        layers = dense()
        return compiled(Tracking(layers.inputs, layers.outputs), metrics=["mae"])

    equals_one_process(make, X, Y * np.arange(100)[:, None], "trackers", batch_size=16)


@only(np=2)
def logs_of_an_own_step() -> None:
    """Those of Keras, in training and validation, also after a kill: only what a step returns."""
    held_out = {"validation_data": (X[:64], Y[:64]), "validation_batch_size": 16}
    for kind in (Raw, Renamed):
        ours, _ = whole_job(lambda kind=kind: _of(kind), X, Y, kind.__name__, **held_out)
        logs = ringtrain.evaluate(ours, X[:70], Y[:70], batch_size=16, verbose=0, return_dict=True)
        expected = ours.evaluate(X[:70], Y[:70], batch_size=16, verbose=0, return_dict=True)
        assert logs.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(logs[name], value, rtol=1e-9, err_msg=name)


@only(np=2)
def logs_of_an_own_step_of_virtual_ranks() -> None:
    for kind in (Raw, Renamed):
        equals_one_process(lambda kind=kind: _of(kind), X, Y, f"virtual-{kind.__name__}", options=_virtual())


def _is_named(history: Any) -> bool:
    """Whether a run says that a loss has no number per row."""
    summary = json.loads((history.run / "summary.json").read_text())
    return "of_columns has no number per row" in str(summary["unlike_one_process"])


def _virtual() -> Config:
    return options(train=TrainConfig(virtual_ranks=4))


@only(np=2)
def results_of_a_batch_with_fewer_rows_than_ranks() -> None:
    """The row that a rank without rows trains in their place counts in no metric."""
    ours, reference = _of(Renamed), _of(Renamed)
    history = ringtrain.fit(ours, X[:33], Y[:33], options=options(), **SAME)
    expected = reference.fit(X[:33], Y[:33], **SAME)
    assert distance(ours, reference) < 1e-10
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-9)


@only(np=2)
def steps_that_are_functions_of_tensorflow() -> None:
    """Training does not use the graph that was traced before it; a second fit is trained, too."""
    for kind in (Decorated, Inner):
        ours, reference = _of(kind), _of(kind)
        for _ in range(2):
            history = ringtrain.fit(ours, X[:96], Y[:96], options=options(), **SAME)
            expected = reference.fit(X[:96], Y[:96], **SAME)
            np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-9)
        assert distance(ours, reference) < 1e-10


@only(np=2)
def data_that_are_not_those_of_the_call() -> None:
    def make() -> keras.Model:
        return compiled(Triplets(), None)

    batches = tf.data.Dataset.from_tensor_slices((X, X[::-1], np.roll(X, 7, 0))).batch(20)
    ours, reference = make(), make()
    ringtrain.fit(ours, batches, epochs=2, verbose=0, options=options())
    reference.fit(batches, epochs=2, verbose=0)
    assert distance(ours, reference) < 1e-10


@only(np=2)
def losses_that_mix_the_rows_of_batches() -> None:
    """They are named by the numbers that they return; another loss of the script's own is not."""

    def of_columns(y: Any, outputs: Any) -> Any:
        return tf.reduce_sum(tf.square(y - outputs), 0) / tf.reduce_sum(tf.square(y), 0)

    def of_rows(y: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.square(y - outputs), -1)

    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    for loss, mixes in ((of_columns, True), (of_rows, False)):
        assert _is_named(ringtrain.fit(compiled(dense(), loss), batches, verbose=0, options=options())) is mixes


def tensors_with_different_numbers_of_rows() -> None:
    """Each is divided by its own rows; where that does not work, nothing is trained."""

    def made(num_labeled: int) -> tf.data.Dataset:
        labeled = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48])).batch(num_labeled)
        return tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(X[:96]).batch(12), labeled))

    ours, reference = (compiled(Labeled(), keras.losses.MeanSquaredError()) for _ in range(2))
    history = ringtrain.fit(ours, made(6), epochs=2, verbose=0, options=options())
    expected = reference.fit(made(6), epochs=2, verbose=0)
    assert distance(ours, reference) < 1e-10
    assert history.history.keys() == expected.history.keys()
    np.testing.assert_allclose(history.history["labeled"], expected.history["labeled"], rtol=1e-9)
    # Parts of virtual ranks, with the larger tensor first and last.
    for kind, in_order in ((Labeled, lambda *parts: parts), (LabeledFirst, lambda *parts: parts[::-1])):
        ours, reference = (compiled(kind(), keras.losses.MeanSquaredError()) for _ in range(2))
        batches = made(4).map(in_order)
        ringtrain.fit(ours, batches, epochs=2, verbose=0, options=_virtual())
        reference.fit(batches, epochs=2, verbose=0)
        assert distance(ours, reference) < 1e-10
    model = compiled(Labeled(), keras.losses.MeanSquaredError())
    refused("tensors with 12 and 5 rows", lambda: ringtrain.fit(model, made(5), verbose=0, options=options()))


class OfOneName(Raw):
    """Returns the results of two metrics that have the same name, of which the second is always right."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.first, self.second = keras.metrics.MeanSquaredError(), keras.metrics.MeanSquaredError()

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), **self._both(data)}

    def test_step(self, data: Any) -> Any:
        return self._both(data)

    def _both(self, data: Any) -> Any:
        self.first.update_state(data[1], self(data[0]))
        self.second.update_state(data[1], data[1])
        return {"of_first": self.first.result(), "of_second": self.second.result()}


def metrics_of_one_name() -> None:
    """Each log is that of its own metric, also where a rank has no rows, in validation, and by `evaluate`."""
    held_out = {"validation_data": (X[:33], Y[:33]), "validation_batch_size": 32}
    ours, reference = _of(OfOneName), _of(OfOneName)
    history = ringtrain.fit(ours, X[:65], Y[:65], options=options(), **SAME, **held_out)
    expected = reference.fit(X[:65], Y[:65], **SAME, **held_out)
    for name in ("of_first", "of_second", "val_of_first", "val_of_second"):
        np.testing.assert_allclose(history.history[name], expected.history[name], rtol=1e-9, err_msg=name)
    logs = ringtrain.evaluate(ours, X, Y, batch_size=16, verbose=0, return_dict=True)
    for name, value in ours.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True).items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-9, err_msg=name)


class Sharpness(keras.Model):
    """Moves its weights, computes the gradient there, and moves them back."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_weights
        for move in (True, False):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, weights)
            if move:
                moves = [gradient / 3 for gradient in gradients]
                for weight, by in zip(weights, moves, strict=True):
                    weight.assign_add(by)
        for weight, by in zip(weights, moves, strict=True):
            weight.assign_sub(by)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@only(np=2)
def weights_that_a_step_moves_and_moves_back() -> None:
    """Each rank rounds its own moves: afterwards all have rank 0's weights, in each step. Virtual ranks refuse it."""
    checked = options(train=TrainConfig(check_every_steps=1))
    for eager in (False, True):
        layers = dense()
        model = compiled(Sharpness(layers.inputs, layers.outputs), run_eagerly=eager)
        history = ringtrain.fit(model, X, Y, options=checked, **SAME)
        assert len(set(hvd.allgather_object(history.checksum))) == 1
    layers = dense()
    model = compiled(Sharpness(layers.inputs, layers.outputs))
    refused("besides the update", lambda: ringtrain.fit(model, X, Y, options=_virtual(), **SAME))


@only(np=2)
def a_state_for_each_row_of_a_batch() -> None:
    """Is refused, as ranks have parts of the rows."""
    layers = [keras.Input((5, 4), batch_size=32), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)]
    model, x, y = compiled(keras.Sequential(layers)), np.ones((64, 5, 4)), np.ones((64, 1))
    refused("is stateful", lambda: ringtrain.fit(model, x, y, options=options(), **SAME))


@only(np=2)
def a_number_of_rows_that_a_step_takes_for_granted() -> None:
    """The error names the line, and says that a step gets a part of the rows."""

    class Granted(Raw):
        def train_step(self, data: Any) -> Any:
            return super().train_step((data[0] + tf.ones([32, 1], tf.float64), data[1]))

    class Reshaping(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.reshape(inputs, (32, 8))

    for model in (_of(Granted), compiled(dense(Reshaping())), compiled(dense(Reshaping()), run_eagerly=True)):
        words = "get this rank's part of the first axis"
        try:
            ringtrain.fit(model, X[:64], Y[:64], options=options(), **SAME)
        except ringtrain.errors.ConfigError as error:
            assert words in str(error) and "step_jobs.py:" in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError("trained other shapes")


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
