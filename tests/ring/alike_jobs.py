"""What scripts combine in Keras' `fit`, and several ranks must not change; see run_fit.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import (
    CLASSES,
    OUTPUT,
    RANDOM,
    SAME,
    WEIGHTS,
    X,
    Y,
    compiled,
    dense,
    distance,
    equals_one_process,
    options,
)
from keras import layers
from only import only

import ringtrain
from ringtrain import hvd
from ringtrain.config import TrainConfig


def _with_losses(*losses: Any) -> keras.Model:
    """A model with two outputs, of three numbers and of three classes."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    outputs = [layers.Dense(3, name="numbers")(hidden), layers.Dense(3, activation="softmax", name="classes")(hidden)]
    return compiled(keras.Model(inputs, outputs), losses)


def losses_that_count_some_rows() -> None:
    """A class that a loss ignores is in other rows on each rank."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    ignored = np.where(np.arange(100) % 32 < 12, 1, CLASSES)
    equals_one_process(lambda: compiled(dense(), loss), X, ignored, "ignore-class")
    virtual = options(train=TrainConfig(virtual_ranks=4))
    equals_one_process(lambda: compiled(dense(), loss), X, ignored, "ignore-class-virtual", options=virtual)


def losses_of_single_outputs_eagerly() -> None:
    """Keras weighs them by the rows of a batch, which it does not know in graphs."""
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    for name, losses in {"ignoring": ("mse", ignoring), "none": (keras.losses.MeanSquaredError("none"), "mse")}.items():

        def make(losses: Any = losses) -> keras.Model:
            model = _with_losses(*losses)
            model.run_eagerly = True
            return model

        targets = [Y, CLASSES if name == "ignoring" else Y]
        weights = [WEIGHTS, WEIGHTS[::-1]]
        more = {"within": 1e-8, "epochs": 2, "options": options()}
        equals_one_process(make, X[:97], [one[:97] for one in targets], f"eagerly-{name}", **more)
        more["sample_weight"] = [one[:97] for one in weights]
        equals_one_process(make, X[:97], [one[:97] for one in targets], f"eagerly-{name}-weights", **more)


def losses_without_a_reduction() -> None:
    """Keras adds a loss that is reduced to each row of one that is not."""
    error, entropy = keras.losses.MeanSquaredError, keras.losses.SparseCategoricalCrossentropy
    for name, losses in {
        "first": (error(reduction="none"), entropy()),
        "second": (error(), entropy(reduction="none")),
        "both": (error(reduction="none"), entropy(reduction="none")),
    }.items():
        more = {"within": 1e-8, "options": options()}
        equals_one_process(lambda losses=losses: _with_losses(*losses), X, [Y, CLASSES], f"none-{name}", **more)


@only(np=2)
def numbers_of_steps_without_a_batch_size() -> None:
    """Rows are parted into as many batches."""
    sizes = {"batch_size": None, "steps_per_epoch": 3, "validation_data": (X[:70], Y[:70]), "validation_steps": 2}
    ours, reference = compiled(dense()), compiled(dense())
    ringtrain.fit(ours, X, Y, 20, 2, 0, shuffle=False, options=options())  # by position, too
    reference.fit(X, Y, 20, 2, 0, shuffle=False)
    assert distance(ours, reference) < 1e-10
    ours, _ = equals_one_process(lambda: compiled(dense()), X, Y, "steps", **sizes)
    split = {"batch_size": None, "steps_per_epoch": 7, "validation_split": 0.3, "validation_steps": 4}
    equals_one_process(lambda: compiled(dense()), X, Y, "steps-split", **split)
    found = ringtrain.evaluate(ours, X, Y, steps=3, verbose=0)
    np.testing.assert_allclose(found, ours.evaluate(X, Y, steps=3, verbose=0), rtol=1e-9)


class Derived(keras.Model):
    """Makes another number of the states of its metrics."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"rmse": keras.ops.sqrt(logs["loss"])}


def results_that_a_model_derives_from_its_metrics() -> None:
    """Also where the last batch, or all but one, has fewer rows than ranks."""

    def make() -> keras.Model:
        inner = dense()
        return compiled(Derived(inner.inputs, inner.outputs), metrics=["mae"])

    for name, number in (("derived", 65), ("derived-few", 33)):
        held_out = {"validation_data": (X[:number], Y[:number]), "validation_batch_size": 32}
        ours, _ = equals_one_process(make, X[:number], Y[:number], name, **held_out)
        words = {"batch_size": 32, "verbose": 0, "return_dict": True}
        found = ringtrain.evaluate(ours, X[:number], Y[:number], **words)
        for log, value in ours.evaluate(X[:number], Y[:number], **words).items():
            np.testing.assert_allclose(found[log], value, rtol=1e-9, err_msg=log)


def sparse_inputs_of_a_dense_layer() -> None:
    """One process has the gradient of each row once, which Adam squares."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        inputs = [keras.Input((6,), sparse=True), layers.Dense(8, activation="tanh"), layers.Dense(3)]
        return compiled(keras.Sequential(inputs), optimizer=keras.optimizers.Adam(0.01))

    few = np.where(RANDOM.random(X.shape) < 0.3, X, 0)
    batches = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(few), Y)).batch(32)
    equals_one_process(make, batches, None, "sparse", batch_size=None)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        rows = slice(20 * number, 20 * number + 20)
        return X[rows], (Y[rows], CLASSES[rows])


def losses_of_single_outputs_of_held_out_batches() -> None:
    """Keras counts the end of a dataset of unknown length as one more batch, and not that of a PyDataset."""

    def generated() -> tf.data.Dataset:
        specs = tf.TensorSpec((None, 6)), (tf.TensorSpec((None, 3)), tf.TensorSpec((None,), tf.int64))
        return tf.data.Dataset.from_generator(lambda: map(Batches().__getitem__, range(5)), output_signature=specs)

    losses = "mse", keras.losses.SparseCategoricalCrossentropy()
    _, history = equals_one_process(
        lambda: _with_losses(*losses), X, (Y, CLASSES), "single", validation_data=Batches(), within=1e-6
    )
    again = ringtrain.fit(
        _with_losses(*losses), X, (Y, CLASSES), options=options(), validation_data=generated(), **SAME
    )
    for log, values in history.history.items():
        np.testing.assert_allclose(again.history[log], values, rtol=1e-5, err_msg=log)


class Counted(layers.Layer):
    """Counts steps in a float, and has a moving mean of its inputs."""

    def build(self, _: Any) -> None:
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.steps.assign_add(1.0)
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
        return inputs


class Twice(keras.Model):
    """Updates its weights twice in a step."""

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(inputs, targets, self(inputs, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def states_that_follow_from_weights_alone_where_a_rank_has_no_rows() -> None:
    """A step changes them on every rank alike; what follows from data stays as it is on a rank without rows."""

    def make(*more: layers.Layer) -> keras.Model:
        keras.utils.set_random_seed(3)
        normalized = layers.SpectralNormalization(layers.Dense(6, activation="tanh"))
        return compiled(keras.Sequential([keras.Input(X.shape[1:]), normalized, *more, layers.Dense(Y.shape[1])]))

    few = tf.data.Dataset.from_tensor_slices((X[:1], Y[:1])).batch(1)
    batches = few.concatenate(tf.data.Dataset.from_tensor_slices((X[:64], Y[:64])).batch(32))
    equals_one_process(make, batches, None, "without-rows", batch_size=None)

    def twice() -> keras.Model:
        inner = make()
        return compiled(Twice(inner.inputs, inner.outputs))

    equals_one_process(twice, batches, None, "without-rows-twice", logs=False, batch_size=None)
    for eager in (False, True):
        ours = make(Counted())
        ours.run_eagerly = eager
        ringtrain.fit(ours, batches, options=options(), epochs=2, verbose=0)
        assert float(ours.layers[1].steps) == 6
        assert hvd.allgather_object(float(ours.layers[1].mean)) == [float(ours.layers[1].mean)] * hvd.size()


@only(np=2)
def gradients_that_a_fit_leaves_for_the_next_one() -> None:
    """Three of four micro-steps are left over."""

    def make() -> keras.Model:
        return compiled(dense(), optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=4))

    ours, reference = make(), make()
    for epochs in (1, 2):
        words = {**SAME, "batch_size": 15, "epochs": epochs}
        ringtrain.fit(ours, X, Y, options=options(), **words)
        reference.fit(X, Y, **words)
        for slot, expected in zip(ours.optimizer.variables, reference.optimizer.variables, strict=True):
            np.testing.assert_allclose(slot, expected, atol=1e-10, err_msg=slot.path)
        assert distance(ours, reference) < 1e-10


class Signed(keras.optimizers.SGD):
    """Takes the signs of all gradients, with names of arguments of its own."""

    def apply(self, gradients: Any, variables: Any = None) -> None:
        super().apply([keras.ops.sign(gradient) for gradient in gradients], variables)


def optimizers_that_change_gradients_first() -> None:
    """They get the reduced ones: the sign of a mean is no mean of signs."""
    equals_one_process(lambda: compiled(dense(), optimizer=Signed(0.01)), X, Y, "signed")
    accumulating = {"batch_size": 25, "epochs": 2}  # with as many batches as there are micro-steps
    make = lambda: compiled(dense(), optimizer=Signed(0.01, gradient_accumulation_steps=2))  # noqa: E731
    equals_one_process(make, X, Y, "signed-accumulating", **accumulating)


class Scaled(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs[0]) * inputs[1]


@only(np=2)
def a_number_beside_the_rows_of_a_batch() -> None:
    def batches() -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((X[:96], Y[:96])).batch(32)
        return rows.map(lambda x, y: ((x, tf.constant(0.5, tf.float64)), y))

    words = {"epochs": 2, "verbose": 0}
    ours, reference = compiled(Scaled()), compiled(Scaled())
    ringtrain.fit(ours, batches(), options=options(), **words)
    reference.fit(batches(), **words)
    assert distance(ours, reference) < 1e-10


class OneBatchMore(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.train_on_batch(X[:8], Y[:8])


def callbacks_that_train_a_batch() -> None:
    """The same whole batch on every rank."""
    ours, reference = compiled(dense()), compiled(dense())
    ringtrain.fit(ours, X, Y, options=options(), callbacks=[OneBatchMore()], **SAME)
    reference.fit(X, Y, callbacks=[OneBatchMore()], **SAME)
    assert distance(ours, reference) < 1e-10


@only(np=2)
def a_cache_in_a_file_of_all_ranks() -> None:
    """One process can write it: rank 0 reads for all."""

    def batches(name: str) -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices((X[:96], Y[:96])).map(lambda x, y: (2 * x, y))
        return rows.cache(str(OUTPUT / name)).batch(32)

    ours, reference = compiled(dense()), compiled(dense())
    words = {"epochs": 2, "verbose": 0}
    held_out = f"held-out-{hvd.size()}"
    ringtrain.fit(ours, batches("ours"), validation_data=batches(held_out), options=options(), **words)
    reference.fit(batches(f"reference-{hvd.rank()}"), **words)
    assert distance(ours, reference) < 1e-10


class StopAt(keras.callbacks.Callback):
    """Asks for the end in one of its methods."""

    def __init__(self, hook: str, number: int) -> None:
        super().__init__()
        setattr(self, hook, lambda now, logs=None: self._stop(now == number))

    def _stop(self, is_due: bool) -> None:
        if is_due:
            self.model.stop_training = True


@only(np=2)
def stops_that_a_callback_asks_for() -> None:
    """After as many steps as Keras makes."""
    for hook, number in {"on_epoch_begin": 1, "on_train_batch_begin": 1, "on_train_batch_end": 2}.items():
        ours, reference = compiled(dense()), compiled(dense())
        words = {**SAME, "batch_size": 20}
        words["validation_data"] = (X[:40], Y[:40])
        history = ringtrain.fit(ours, X, Y, options=options(), callbacks=[StopAt(hook, number)], **words)
        expected = reference.fit(X, Y, callbacks=[StopAt(hook, number)], **words)
        assert history.epoch == expected.epoch and ours.stop_training, hook
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=1e-6, err_msg=f"{hook} {name}")
        assert int(ours.optimizer.iterations) == int(reference.optimizer.iterations), hook
        assert distance(ours, reference) < 1e-10

    # On one rank alone, as of a script that gives callbacks to one.
    ours = compiled(dense())
    callbacks = [StopAt("on_train_batch_end", 2)] * (hvd.rank() == 1)
    ringtrain.fit(ours, X, Y, options=options(), callbacks=callbacks, **{**SAME, "batch_size": 20})
    assert int(ours.optimizer.iterations) == 3

    # Of one that runs on rank 0 alone.
    class Named(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)

    saved = Named(str(OUTPUT / "saved.keras"))
    ringtrain.fit(compiled(dense()), X, Y, options=options(), callbacks=[saved], **SAME)
