"""Jobs of `ringtrain.fit` on every rank in one start: run_fit.py OUTPUT LIMIT_S JOB [JOB ...].

Each job compares what the ranks train with what one process trains by Keras' own `model.fit`. Each rank leaves
OUTPUT/<rank>/<job>: empty if it held, else the traceback.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import alike_jobs
import configured_jobs
import evaluate_jobs
import kept_jobs
import keras
import keras_jobs
import loop_jobs
import numpy as np
import records_jobs
import resume_jobs
import sharded_jobs
import snippet_jobs
import step_jobs
import tensorflow as tf
from fit_alike import (
    CLASSES,
    OUTPUT,
    SAME,
    SEQUENCES,
    WEIGHTS,
    KillAfter,
    Killed,
    X,
    Y,
    compiled,
    dense,
    distance,
    equals_one_process,
    options,
    resumes_and_is_refused,
    whole_job,
)
from on_every_rank import call_each
from only import only, quick

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config import CheckpointConfig, HealthConfig, HvdConfig, ModelConfig


def plain_average(model: keras.Model, x: Any, y: Any, sample_weight: Any = None) -> keras.Model:
    """Horovod's way: each rank's own mean over its rows of a batch, and their average."""
    hvd.DistributedOptimizer(model.optimizer)
    for _ in range(3):
        for begin in range(0, 100, 32):
            rows = np.array_split(np.arange(begin, min(begin + 32, 100)), hvd.size())[hvd.rank()]
            pick = lambda nest: keras.tree.map_structure(lambda leaf: leaf[rows], nest)  # noqa: B023, E731
            model.train_on_batch(pick(x), pick(y), None if sample_weight is None else pick(sample_weight))
    return model


# ---- jobs ----------------------------------------------------------------------------------------------------------


@quick
def arrays_and_metrics() -> None:

    def make() -> keras.Model:
        names = ("AUC", "F1Score", "CosineSimilarity")
        metrics = ["accuracy", *(getattr(keras.metrics, name)(name=name) for name in names)]
        adam = keras.optimizers.Adam(0.01)
        return compiled(dense(activation="softmax"), "categorical_crossentropy", optimizer=adam, metrics=metrics)

    one_hot = np.eye(3)[CLASSES]
    held_out = (X[:37], one_hot[:37])
    _, history = equals_one_process(make, X, one_hot, "arrays", validation_data=held_out, within=1e-6)
    assert (history.run / "summary.json").exists() and (history.run / "model.keras").exists()
    assert {"val_AUC", "val_loss", "F1Score"} <= set(history.history)
    complete = ringtrain.fit(make(), X, one_hot, name="arrays", validation_data=held_out, **SAME, options=options())
    for metric, values in history.history.items():
        np.testing.assert_array_equal(values, complete.history[metric])


@only(np=3)
def the_order_follows_from_seed_and_epoch() -> None:
    from ringtrain.data.sharding import epoch_order

    ours, reference = compiled(dense()), compiled(dense())
    ringtrain.fit(ours, X, Y, batch_size=32, epochs=2, seed=4, verbose=0, options=options())
    for epoch in range(2):
        order = epoch_order(100, 1, 4, epoch).reshape(-1)
        reference.fit(X[order], Y[order], batch_size=32, shuffle=False, verbose=0)
    assert distance(ours, reference) < 1e-10


@only(np=3)
def fewer_rows_than_ranks() -> None:
    """Batches of 32, and a last one of 1 row: normalization by all ranks' rows, one of which does not count."""
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.0)

    def make() -> keras.Model:
        model = dense(*(layer.from_config(layer.get_config()) for layer in layers))
        return compiled(model, metrics=["mae"])

    config = options(model=ModelConfig(sync_batch_norm=True))
    x, y = X[:33], Y[:33]
    equals_one_process(make, x, y, "few", options=config, within=1e-6)
    # Each rank's own statistics: other weights than one process has, but no NaN.
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = ringtrain.fit(model, x, y, batch_size=32, epochs=3, shuffle=False, verbose=0, options=options())
    assert all(np.isfinite(weight).all() for weight in model.get_weights()), "NaN in a moving statistic"
    assert np.isfinite(history.history["mae"]).all()


def masks_and_two_outputs() -> None:
    """Unequal lengths, weights in the divisor, loss weights, kernel and activity regularization."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        sequence, flat = keras.Input((5, 4), name="sequence"), keras.Input((6,), name="flat")
        steps = keras.layers.LSTM(5, return_sequences=True)(keras.layers.Masking()(sequence))
        a = keras.layers.Dense(2, name="a", kernel_regularizer="l2")(steps)
        b = keras.layers.Dense(1, name="b", activity_regularizer="l2")(keras.layers.Dense(4)(flat))
        losses = {"a": "mse", "b": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}
        model = keras.Model({"sequence": sequence, "flat": flat}, {"a": a, "b": b})
        more = {"metrics": {"b": ["mae"]}, "weighted_metrics": {"a": ["mae"]}, "loss_weights": {"a": 0.3, "b": 2.0}}
        return compiled(model, losses, **more)

    x = {"sequence": SEQUENCES, "flat": X}
    y = {"a": np.stack([Y[:, :2]] * 5, 1), "b": Y[:, 2:]}
    weights = {"a": np.ones((100, 1)), "b": WEIGHTS}
    ours, _ = whole_job(make, x, y, "masks", sample_weight=weights, validation_data=(x, y))
    assert distance(plain_average(make(), x, y, weights), ours) > 1e-4, "the ranks' plain average is the same"


@only(np=3)
def reductions() -> None:
    for reduction in ("sum", "none"):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        sgd = {"optimizer": keras.optimizers.SGD(0.001)}
        make = lambda: compiled(dense(), loss, **{"optimizer": keras.optimizers.SGD(0.001)})  # noqa: B023, E731
        ours, _ = equals_one_process(make, X, Y, f"reduction-{reduction}")
        assert distance(plain_average(compiled(dense(), loss, **sgd), X, Y), ours) > 1e-4


@only(np=2)
def weights_of_samples_and_classes() -> None:
    def make() -> keras.Model:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(dense(), loss, weighted_metrics=["accuracy"], metrics=["accuracy"])

    equals_one_process(make, X, CLASSES, "classes", class_weight={0: 1.0, 1: 0.2, 2: 3.0})
    equals_one_process(make, X, CLASSES, "weights", sample_weight=WEIGHTS, validation_split=0.2)


@only(np=3)
def accumulated_updates() -> None:
    """Unequal parts of batches whose gradients Keras averages into one update."""

    def make() -> keras.Model:
        return compiled(dense(), optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=3), metrics=["mae"])

    equals_one_process(make, X[:97], Y[:97], "accumulated")


@only(np=2)
def eagerly() -> None:
    """By `run_eagerly`, and where functions of TensorFlow are not compiled, also with a sparse gradient."""

    def make() -> keras.Model:
        return compiled(dense(), run_eagerly=True)

    def embedding() -> keras.Model:
        keras.utils.set_random_seed(3)
        layers = [keras.Input((6,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        return compiled(keras.Sequential(layers), optimizer=keras.optimizers.Adam(0.01))

    equals_one_process(make, X[:33], Y[:33], "eagerly", epochs=1)
    tf.config.run_functions_eagerly(True)
    try:
        words = np.abs(X[:33] * 4).astype(int) % 9
        equals_one_process(embedding, words, Y[:33], "eager-functions", epochs=2)
    finally:
        tf.config.run_functions_eagerly(False)


class OwnStep(keras.Model):
    """A step of its own, with a number in its logs that is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(3)
        self.mean = keras.metrics.Mean("own")

    def call(self, inputs: Any) -> Any:
        return self.last(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        self.mean.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"own": self.mean.result(), "half": loss / 2}


@only(np=2)
@quick
def own_train_step() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(4)
        model = OwnStep()
        model.build((None, 6))
        return compiled(model)

    _, history = equals_one_process(make, X, Y, "own-step", logs=False)
    assert len(set(hvd.allgather_object(str(history.history)))) == 1, "ranks have different logs"
    assert {"own", "half"} <= set(history.history)


@only(np=2)
def mixed_float16() -> None:
    """An overflow on one rank skips the step on all of them."""
    keras.config.set_dtype_policy("mixed_float16")
    try:

        def make() -> keras.Model:
            return compiled(dense(dtype="float32"), optimizer=keras.optimizers.SGD(0.05))

        saves = options(checkpoint=CheckpointConfig(every_steps=1))
        trained = equals_one_process(make, X, Y, "mixed", within=2e-3, logs=False, options=saves)
        resumes_and_is_refused(*trained, make, X, Y, "mixed", options=saves)
        model, x = make(), X.copy()
        x[32 + 16 :, 0] = np.where(np.arange(52) == 0, 1e7, x[48:, 0])  # on the last rank, in the second step
        ringtrain.fit(model, x, Y, batch_size=32, epochs=1, shuffle=False, verbose=0, options=options())
        hvd.check_in_sync(model)
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
    finally:
        keras.config.set_dtype_policy("float32")


def _pairs(**shuffle: Any) -> tf.data.Dataset:
    pairs = tf.data.Dataset.from_tensor_slices((X[:97], Y[:97]))
    return (pairs.shuffle(97, **shuffle) if shuffle else pairs).batch(32)


@only(np=3)
def datasets() -> None:
    """Shuffled by a seed, with a last batch of one row, and validated by batches, of which one rank may have none."""
    for shuffle in ({}, {"seed": 3}):
        ours, reference = (compiled(dense(), metrics=["mae"]) for _ in range(2))
        held_out = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(16)
        arguments: dict[str, Any] = {"epochs": 3, "verbose": 0, "validation_data": held_out}
        history = ringtrain.fit(ours, _pairs(**shuffle), options=options(), **arguments)
        expected = reference.fit(_pairs(**shuffle), shuffle=False, **arguments)
        assert distance(ours, reference) < 1e-10
        for metric, values in expected.history.items():
            np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)


class Shuffled(keras.utils.PyDataset):
    """Batches of 32 of 97 rows, in an order of their own in each epoch."""

    num_batches = 4

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.draw, self.order = np.random.RandomState(7), np.arange(97)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * 32 : (index + 1) * 32]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.draw.shuffle(self.order)


class Divided(Shuffled):
    """The same, of which each rank makes its own rows."""

    def rows(self, index: int, begin: int, end: int) -> Any:
        rows = self.order[index * 32 : (index + 1) * 32][begin:end]
        return X[rows], Y[rows]


def _generated(num_batches: int = 99) -> Any:
    for index in range(num_batches):
        rows = np.arange(index, index + 30 - index % 4) % 100
        yield X[rows], Y[rows]


@only(np=2)
def py_datasets_and_generators() -> None:
    """As `fit` of one process, although killed and resumed."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "py": lambda: {"x": Shuffled(workers=2), "shuffle": False, "validation_data": Shuffled()},
        "rows": lambda: {"x": Divided(workers=2), "shuffle": False},
        "generator": lambda: {"x": _generated(), "steps_per_epoch": 4},
        "endless": lambda: {"x": _pairs(seed=3).repeat(), "steps_per_epoch": 5},
    }
    for name, make in kinds.items():
        more: dict[str, Any] = {"epochs": 3, "verbose": 0}
        ours, reference = (compiled(dense(), metrics=["mae"]) for _ in range(2))
        saves: dict[str, Any] = {"name": name, "options": options(checkpoint=CheckpointConfig(every_steps=1))}
        with contextlib.suppress(Killed):
            ringtrain.fit(compiled(dense(), metrics=["mae"]), **make(), **more, **saves, callbacks=[KillAfter(6)])
            raise AssertionError("was not killed")
        history = ringtrain.fit(ours, **make(), **more, **saves)
        expected = reference.fit(**make(), **more)
        assert distance(ours, reference) < 1e-10, name
        for metric, values in expected.history.items():
            np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)


@only(np=2)
def variable_lengths() -> None:
    """Batches of other lengths, for layers that cannot be built with a length of 1; the last ones are of one row."""
    lengths, draw = (8, 10, 9, 12), np.random.default_rng(1)
    batches = [
        (draw.normal(size=(9 - 2 * i, length, 2)), draw.normal(size=(9 - 2 * i, 1))) for i, length in enumerate(lengths)
    ]

    class Lengths(keras.utils.PyDataset):
        num_batches = 4

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    class Pooled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [keras.layers.Conv1D(4, 3), keras.layers.MaxPooling1D(3), keras.layers.Reshape((-1, 2))]
            self.parts += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]

        def call(self, inputs: Any) -> Any:
            for part in self.parts:
                inputs = part(inputs)
            return inputs

    def functional() -> keras.Model:
        inputs = keras.Input((None, 2))
        return keras.Model(inputs, Pooled().call(inputs))

    spec = (tf.TensorSpec([None, None, 2], tf.float64), tf.TensorSpec([None, 1], tf.float64))
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"x": tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)},
        lambda: {"x": Lengths(), "shuffle": False},
        lambda: {"x": (batch for _ in range(3) for batch in batches), "steps_per_epoch": 4},
    ]
    for make, model in itertools.product(kinds, (functional, Pooled)):
        trained = []
        for train in (functools.partial(ringtrain.fit, options=options()), keras.Model.fit):
            keras.utils.set_random_seed(3)
            trained.append(compiled(model(), metrics=["mae"]))
            history = train(trained[-1], **make(), epochs=2, verbose=0)
            np.testing.assert_allclose(history.history["mae"], trained[0].history.history["mae"], rtol=1e-6)
        assert distance(*trained) < 1e-10


@only(np=2)
def random_pipelines() -> None:
    """Of a pipeline that would give each rank other batches, all train rank 0's; a resume goes on."""
    tf.random.set_seed(None)
    noise = keras.layers.GaussianNoise(0.1, seed=hvd.rank())
    for name, transform in {
        "shuffled": lambda pairs: pairs.shuffle(97).batch(32),
        "parallel": lambda pairs: pairs.batch(8).map(
            lambda x, y: (tf.random.shuffle(x, seed=1), y), num_parallel_calls=4
        ),
        "seeds": lambda pairs: pairs.batch(32).map(lambda x, y: (noise(x, training=True), y)),
    }.items():
        pairs = tf.data.Dataset.from_tensor_slices((X[:97], Y[:97]))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            model = compiled(dense())
            tf.random.set_seed(None)  # dense() has set one
            ringtrain.fit(model, transform(pairs), epochs=2, options=options())
        assert hvd.rank() or "rank 0, as each rank would get other batches from " in said.getvalue(), (
            name,
            said.getvalue(),
        )
        hvd.check_in_sync(model)
    pairs = tf.data.Dataset.from_tensor_slices((X[:97], Y[:97])).batch(32)
    foreign = pairs.map(lambda x, y: (tf.numpy_function(lambda x: x + hvd.rank(), [x], x.dtype), y))
    try:
        foreign = foreign.map(lambda x, y: (tf.ensure_shape(x, [None, 6]), y))
        ringtrain.fit(compiled(dense()), foreign, verbose=0, options=options())
    except ringtrain.errors.DataError as error:
        assert "other batches than rank 0, by step 1: it has map with a Python function: " in str(error), error
    else:
        raise AssertionError("trained with other batches")


def _queue(num_batches: int = 99) -> Any:
    """Batches that differ between ranks, as those of a queue would."""
    for index, (x, y) in enumerate(_generated(num_batches)):
        yield x + hvd.rank(), y
        if index == 20:
            raise ValueError("queue closed")


@only(np=2)
def batches_of_rank_0() -> None:
    """Rank 0's generator trains all ranks, killed and resumed; its end and its error end all ranks."""

    def sent(make: Any, *arguments: int) -> Any:
        return ringtrain.from_rank_0(make(*arguments) if hvd.rank() == 0 else None)

    def fit(name: str, batches: Any, held_out: Any, *callbacks: Any, steps: int = 4) -> tuple[keras.Model, Any]:
        model = compiled(dense(), metrics=["mae"])
        config = options(checkpoint=CheckpointConfig(every_steps=1))
        given: dict[str, Any] = {"epochs": 3, "verbose": 0, "name": name, "options": config, "callbacks": callbacks}
        given |= {"steps_per_epoch": steps, "validation_data": held_out, "validation_steps": 2}
        return model, ringtrain.fit(model, batches, **given)

    reference = compiled(dense(), metrics=["mae"])
    pair = tuple(np.concatenate(parts) for parts in zip(*_generated(2), strict=True))
    more: dict[str, Any] = {"validation_data": pair, "validation_batch_size": 30, "verbose": 0}
    expected = reference.fit(_generated(), steps_per_epoch=4, epochs=3, **more)
    with contextlib.suppress(Killed):
        fit("sent", sent(_queue), sent(_queue, 3), KillAfter(6))
        raise AssertionError("was not killed")
    ours, history = fit("sent", sent(_queue), sent(_queue, 3))
    assert distance(ours, reference) < 1e-10
    assert set(history.history) == set(expected.history)
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)
    for words, arguments in (
        ("the data ended after 5 batches", (sent(_queue, 5), None)),
        ("rank 0 cannot read its batches: |ValueError: queue closed", (sent(_queue), None)),
        ("has other batches than rank 0, by step 1", (_queue(), None)),
        ("has other validation data", (_generated(), _queue())),
        ("expected batches; of arrays, pass all", (sent(lambda: X), None)),
    ):
        try:
            fit("", *arguments, steps=10)
        except ringtrain.errors.RingtrainError as error:
            assert all(word in str(error) for word in words.split("|")), error
        else:
            raise AssertionError(f"trained in spite of {words}")


@only(np=2)
def what_rank_0_has_read_alone_it_reads_later() -> None:
    """A shuffle that training and validation share, in one call and in later ones, has the orders of one process."""

    def made() -> tuple[tf.data.Dataset, tf.data.Dataset]:
        pairs = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, seed=7)
        noise = pairs.map(lambda x, y: (x + 0 * tf.random.normal([6], dtype=x.dtype), y), num_parallel_calls=2)
        return pairs.batch(16), noise.batch(16)

    ours, reference = compiled(dense()), compiled(dense())
    train, noise = made()
    of_keras, noise_of_keras = made()
    more: dict[str, Any] = {"epochs": 2, "verbose": 0}
    for x, held_out, x_of_keras, held_out_of_keras in (
        (train, noise, of_keras, noise_of_keras),
        (noise, None, noise_of_keras, None),
        (train, None, of_keras, None),
    ):
        history = ringtrain.fit(ours, x, validation_data=held_out, options=options(), **more)
        expected = reference.fit(x_of_keras, validation_data=held_out_of_keras, **more)
        assert distance(ours, reference) < 1e-10
        np.testing.assert_allclose(list(history.history.values()), list(expected.history.values()), rtol=1e-6)
    # Metrics of validation are those of all rows also in an order of rank 0's own.
    unseeded = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100).batch(16)
    tf.random.set_seed(None)
    history = ringtrain.fit(ours, X, Y, validation_data=unseeded, options=options(), **more)
    loss = ours.evaluate(X, Y, batch_size=100, verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][-1], loss, rtol=1e-6)


@only(np=2)
def another_order_on_a_rank_is_refused() -> None:
    keras.utils.set_random_seed(hvd.rank())
    dataset = _pairs(reshuffle_each_iteration=True)
    try:
        ringtrain.fit(compiled(dense()), dataset, epochs=2, verbose=0, options=options())
    except ringtrain.errors.DataError as error:
        # dense() has set the same seed on all ranks, but after the dataset was made.
        assert "rank 1 on" in str(error) and "other batches than rank 0, by step 1" in str(error), error
    else:
        raise AssertionError("trained with other batches")

    def from_batch_13_on() -> Any:
        for index, (x, y) in enumerate(_generated()):
            yield x + hvd.rank() * (index >= 13), y

    try:
        ringtrain.fit(compiled(dense()), from_batch_13_on(), steps_per_epoch=40, verbose=0, options=options())
    except ringtrain.errors.DataError as error:
        assert "other batches than rank 0, by step 20" in str(error), error
    else:
        raise AssertionError("trained with other batches later")
    try:
        ringtrain.fit(compiled(dense()), X, Y, validation_data=_pairs(seed=hvd.rank()), verbose=0, options=options())
    except ringtrain.errors.ConfigError as error:
        assert "rank 1 on" in str(error) and "other validation data than rank 0" in str(error), error
    else:
        raise AssertionError("validated with other batches")


@only(np=2)
def fitted_before() -> None:
    """The step that Keras has traced before does not reduce gradients: it is traced anew, and once more for Keras.

    Afterwards the model is Keras' own again, which one rank alone can train and every rank can train once more.
    """

    def make() -> keras.Model:
        model = compiled(dense(), metrics=["mae"])
        model.fit(X[:32], Y[:32], shuffle=False, verbose=0)
        return model

    ours, _ = equals_one_process(make, X, Y, "fitted")
    before = ours.get_weights()
    if hvd.rank() == 0:
        ours.fit(X, Y, verbose=0)
        ours.set_weights(before)
    hvd.allgather_object(0, name="rank_0_has_trained_alone")
    assert "train_step" not in vars(ours) and "apply" not in vars(ours.optimizer)


@only(np=2)
def fitted_twice() -> None:
    """With options of the optimizer, which is Keras' own again after each fit, unless it is sharded."""

    def make() -> keras.Model:
        return compiled(dense(keras.layers.BatchNormalization()), optimizer=keras.optimizers.Adam(0.01))

    for num_fits, more in (
        (2, {"model": ModelConfig(sync_batch_norm=True), "hvd": HvdConfig(compression="powersgd:1")}),
        (1, {"hvd": HvdConfig(local_steps=2, outer_optimizer="nesterov")}),
    ):
        model = make()
        model.fit(X[:32], Y[:32], verbose=0)
        attributes, num_variables = set(vars(model.optimizer)), len(model.optimizer.variables)
        for _ in range(num_fits):
            ringtrain.fit(model, X, Y, batch_size=32, verbose=0, options=options(**more))
            hvd.check_in_sync(model)
            assert type(model.optimizer) is keras.optimizers.Adam, type(model.optimizer).__mro__
            assert type(model.layers[1]) is keras.layers.BatchNormalization
            assert set(vars(model.optimizer)) == attributes and len(model.optimizer.variables) == num_variables
    model, more = make(), {"optimizer.sharded": True, "run.directory": options().run.directory}
    for _ in range(2):
        ringtrain.fit(model, X, Y, batch_size=32, verbose=0, options=more)
    assert int(model.optimizer.iterations) == 8
    parts = make()
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.01), {".*/bias": keras.optimizers.Adam(0.01)})
    parts.compile(keras.optimizers.MultiOptimizer(optimizers), "mse")
    for _ in range(2):
        ringtrain.fit(parts, X, Y, batch_size=32, verbose=0, options=options())
        hvd.check_in_sync(parts)
    try:
        ringtrain.fit(model, X, Y, verbose=0, options=options())
    except ringtrain.errors.ConfigError as error:
        assert "the optimizer is sharded since an earlier fit" in str(error)
    else:
        raise AssertionError("trained with other options than before")


class Subclass(keras.Model):
    """Without weights before its first batch, and with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(3)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        for part in self.parts:
            inputs = part(inputs, training=training) if isinstance(part, keras.layers.Dropout) else part(inputs)
        return inputs


@only(np=2)
def unbuilt_and_unseeded() -> None:
    """Ranks that begin with different weights train rank 0's; they drop different units."""
    keras.utils.set_random_seed(hvd.rank())
    model = compiled(Subclass(), metrics=["mae"])
    ringtrain.fit(model, X, Y, batch_size=30, epochs=2, verbose=0, options=options())
    hvd.check_in_sync(model)
    states = hvd.allgather_object([int(v) for one in model.parts[1:2] for v in one.seed_generator.state.numpy()])
    assert len({tuple(state) for state in states}) == hvd.size()


class OwnLogger(keras.callbacks.CSVLogger):
    """Derived from a callback that runs on rank 0 only."""


@only(np=2)
@quick
def early_stopping() -> None:
    """Stops after the same epoch as one process, with the best epoch's weights; callbacks that write run on rank 0."""

    def callbacks(*writing: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        return [stop, keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_lr=1e-3), *writing]

    def make() -> keras.Model:
        return compiled(dense(), optimizer=keras.optimizers.SGD(0.4))

    ours, reference = make(), make()
    arguments = {"batch_size": 32, "epochs": 30, "shuffle": False, "verbose": 0, "validation_data": (X[:20], -Y[:20])}
    logs = [OUTPUT / f"{hvd.rank()}-{number}.csv" for number in range(2)]
    best = OUTPUT / f"best-{hvd.rank()}.keras"
    writing = [OwnLogger(logs[0]), keras.callbacks.CSVLogger(logs[1]), keras.callbacks.ModelCheckpoint(best)]
    history = ringtrain.fit(ours, X, Y, name="stops", callbacks=callbacks(*writing), options=options(), **arguments)
    assert [path.exists() for path in (*logs, best)] == [hvd.rank() == 0] * 3
    expected = reference.fit(X, Y, callbacks=callbacks(), **arguments)
    assert len(history.epoch) == len(expected.epoch) < 30
    assert distance(ours, reference) < 1e-6
    # A run that its callbacks have ended is complete: again the best weights.
    once_more = make()
    again = ringtrain.fit(once_more, X, Y, name="stops", callbacks=callbacks(), options=options(), **arguments)
    assert again.history == history.history and distance(once_more, ours) == 0


def _resumable() -> keras.Model:
    keras.utils.set_random_seed(5)  # of the units that are dropped
    model = dense(keras.layers.Dropout(0.2))
    return compiled(model, optimizer=keras.optimizers.Adam(0.01), metrics=["mae"])


def _run(name: str, *callbacks: keras.callbacks.Callback) -> tuple[keras.Model, Any, keras.callbacks.Callback]:
    model = _resumable()
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.05)
    config = options(checkpoint=CheckpointConfig(every_steps=1))
    arguments = {"batch_size": 32, "epochs": 3, "validation_data": (X[:40], Y[:40]), "verbose": 0}
    history = ringtrain.fit(model, X, Y, name=name, callbacks=[plateau, *callbacks], options=config, **arguments)
    return model, history, plateau


@only(np=3)
def killed_and_resumed() -> None:
    """After a step within an epoch, after an epoch, and in the last epoch: as if never interrupted."""
    model, history, plateau = _run("uninterrupted")
    for num_steps in (2, 2, 7):
        with contextlib.suppress(Killed):
            _run("killed", KillAfter(num_steps))
            raise AssertionError("was not killed")
    resumed, again, its_plateau = _run("killed")
    assert distance(model, resumed) == 0
    assert history.history == again.history and history.epoch == again.epoch
    assert history.checksum == again.checksum
    assert (plateau.best, plateau.wait) == (its_plateau.best, its_plateau.wait)
    # Once complete, it is not trained again.
    _, complete, _ = _run("uninterrupted", KillAfter(0))
    assert complete.history == history.history
    assert complete.checksum == history.checksum


class Noise(keras.layers.Layer):
    """Adds random numbers without a seed of their own, and keeps the first of the last batch."""

    def build(self, shape: Any) -> None:
        self.last = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        noise = keras.random.normal(keras.ops.shape(inputs), dtype=inputs.dtype)
        self.last.assign(noise[0, 0])
        return inputs + noise


@only(np=2)
def numbers_without_a_seed_of_their_own() -> None:
    """Other ones on each rank, continued by a resume; afterwards those of all ranks are the same again."""

    def fitted(name: str, *callbacks: keras.callbacks.Callback) -> keras.Model:
        keras.utils.set_random_seed(6)
        model = compiled(dense(Noise()))
        config = options(checkpoint=CheckpointConfig(every_steps=1), model=ModelConfig(not_averaged=("*",)))
        ringtrain.fit(model, X, Y, name=name, callbacks=callbacks, options=config, **SAME)
        return model

    model = fitted("noise")
    numbers = hvd.allgather_object(float(model.layers[1].last))
    assert len(set(numbers)) == hvd.size(), numbers
    following = hvd.allgather_object(keras.random.normal((3,)).numpy().tolist())
    assert all(one == following[0] for one in following), following
    with contextlib.suppress(Killed):
        fitted("noise-killed", KillAfter(6))
        raise AssertionError("was not killed")
    assert distance(model, fitted("noise-killed")) == 0
    assert keras.random.normal((3,)).numpy().tolist() == following[0]


class Once(keras.callbacks.Callback):
    """Calls a function with the model on the last rank, after the third step of its first run."""

    def __init__(self, call: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.call, self.left = call, 3

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and hvd.rank() == hvd.size() - 1:
            self.call(self.model)


@only(np=2)
@quick
def a_signal_saves_and_ends_all() -> None:
    """SIGTERM or SIGINT to one rank ends all after the same step; what is saved is resumed. So does a callback."""

    def run(name: str, *callbacks: Any, chaos: str = "") -> tuple[keras.Model, Any]:
        model, arguments = _resumable(), {"batch_size": 32, "epochs": 2, "verbose": 0, "callbacks": callbacks}
        config = options(chaos=chaos, health=HealthConfig(agree_every_steps=1))
        return model, ringtrain.fit(model, X, Y, name=name, options=config, **arguments)

    reference, _ = run("undisturbed")
    interrupt = Once(lambda model: os.kill(os.getpid(), signal.SIGINT))
    for name, callbacks, chaos in (("ended", (), "rank=1 step=3 mode=sigterm"), ("interrupted", (interrupt,), "")):
        try:
            run(name, *callbacks, chaos=chaos)
        except (SystemExit, KeyboardInterrupt) as end:
            assert getattr(end, "code", None) == (143 if chaos else None)
        else:
            raise AssertionError("not ended")
        resumed, history = run(name, *callbacks, chaos=chaos)  # the fault happens once
        assert distance(reference, resumed) == 0
        assert len(history.history["loss"]) == 2
    _, history = run("stopped", Once(lambda model: setattr(model, "stop_training", True)))
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "a callback"
    assert summary["global_step"] == 4 and {*hvd.allgather_object(tuple(history.epoch))} == {(0,)}, (
        "its epoch has ended"
    )


@only(np=2)
def a_signal_after_the_last_step_ends_a_complete_run() -> None:
    """The script ends when its results are there. The same script then goes on."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    model, arguments = _resumable(), {"batch_size": 32, "epochs": 1, "verbose": 0, "options": options()}
    ends = keras.callbacks.LambdaCallback(on_train_end=lambda logs: os.kill(os.getpid(), signal.SIGTERM))
    try:
        ringtrain.fit(model, X, Y, name="ended-late", callbacks=[ends], **arguments)
    except SystemExit as end:
        assert end.code == 143
    else:
        raise AssertionError("not ended")
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    again = _resumable()
    history = ringtrain.fit(again, X, Y, name="ended-late", **arguments)
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "" and (history.run / "model.keras").exists()
    assert distance(again, model) == 0


@only(np=2)
def a_loss_of_nan_is_named() -> None:
    y = Y.copy()
    y[-1] = np.nan  # in the last batch, on the last rank that has a row of it
    model = compiled(dense())
    try:
        ringtrain.fit(model, X, y, batch_size=32, epochs=2, shuffle=False, verbose=0, options=options())
    except ringtrain.errors.NonFiniteLoss as error:
        assert f"on rank {hvd.size() - 1}" in str(error) and "epoch 1, batch 4" in str(error), error
    else:
        raise AssertionError("trained on")


@only(np=2)
def another_run_is_not_resumed() -> None:
    """A checkpoint of another batch, rate, optimizer, loss, model or of other data is refused, with the fix."""
    arguments: dict[str, Any] = {"epochs": 1, "verbose": 0, "options": options()}
    ringtrain.fit(compiled(dense()), X, Y, name="another", batch_size=32, **arguments)
    adam, faster = keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.1)
    given: Any
    for words, given, batch_size in (
        ("set batch_size so that they are equal, or give fit another name", compiled(dense()), 16),
        (
            "optimizer.learning_rate = 0.05, this run has 0.1: use the same value, or give fit",
            compiled(dense(), optimizer=faster),
            32,
        ),
        ("was made with optimizer.name = 'SGD', this run has 'Adam'", compiled(dense(), optimizer=adam), 32),
        ("was made with number of layers 2, this run has 3", compiled(dense(keras.layers.Dense(8))), 32),
        ("was made with loss mse, this run has mae: give fit another name", compiled(dense(), "mae"), 32),
        ("was made with another training data: give fit another name", Y + 1, 32),
    ):
        model, y = (compiled(dense()), given) if isinstance(given, np.ndarray) else (given, Y)
        try:
            ringtrain.fit(model, X, y, name="another", batch_size=batch_size, **arguments)
        except ringtrain.errors.RingtrainError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"resumed in spite of {words}")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        arguments["epochs"] = 2
        source = f"{options().run.directory}/another"
        ringtrain.fit(compiled(dense()), X, Y + 1, name="on-purpose", batch_size=32, resume=source, **arguments)
    assert said.getvalue().count("was saved with another training data: ") == (hvd.rank() == 0), said.getvalue()


@quick
def resumed_by_other_ranks() -> None:
    """Begun by 2 ranks and ended by 3: the weights of one process, or of 3 ranks from the beginning."""

    def make() -> keras.Model:
        return compiled(dense(), metrics=["mae"])

    rows = {"x": X, "y": Y, "batch_size": 32}
    config = options("handed-over", checkpoint=CheckpointConfig(every_steps=1))
    for name, given in {"in-order": rows | {"shuffle": False}, "shuffled": rows, "stream": {}}.items():

        def fit(*callbacks: Any, train: Any = ringtrain.fit, given: Any = given, **more: Any) -> Any:
            model, plateau = make(), keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.05)
            held_out = {"validation_data": (X[:40], Y[:40]), "epochs": 3, "verbose": 0}
            # make() has set the global seed, on which the order of tf.data depends, too.
            arguments = (given or {"x": _pairs(seed=3)}) | held_out | more
            history = train(model, **arguments, callbacks=[plateau, *callbacks])
            return model, history, (plateau.best, plateau.wait, model.optimizer.learning_rate.numpy())

        if hvd.size() == 2:
            with contextlib.suppress(Killed):
                fit(KillAfter(6), name=name, options=config)
                raise AssertionError("was not killed")
            continue
        ours, history, states = fit(name=name, options=config)
        if name == "in-order":
            reference, expected, its_states = fit(train=keras.Model.fit)
        else:
            reference, expected, its_states = fit(name=f"{name}-whole", options=config)
        assert distance(ours, reference) < 1e-10, name
        np.testing.assert_allclose(states, its_states, rtol=1e-6)
        np.testing.assert_allclose(history.history["mae"], expected.history["mae"], rtol=1e-6)
        assert len(history.epoch) == 3


@only(np=2)
@quick
def what_differs_is_refused() -> None:
    """Other data or another model on one rank, data that are no arrays, a model that is not compiled."""
    compressed = options(hvd=HvdConfig(compression="fp16"))
    for words, arguments in (
        ("has other training data than rank 0", {"y": Y + hvd.rank()}),
        ("expected arrays in memory", {"x": iter(())}),
        ("not compiled", {"model": dense()}),
        (
            "options set hvd.compression, but the optimizer is distributed already",
            {
                "model": compiled(dense(), optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD())),
                "options": compressed,
            },
        ),
        (
            "has another layer 2 than rank 0",
            {"model": compiled(dense(*map(keras.layers.Dense, range(8, 8 + hvd.rank()))))},
        ),
    ):
        given = {"model": compiled(dense()), "x": X, "y": Y, "options": options()} | arguments
        try:
            ringtrain.fit(given["model"], given["x"], given["y"], verbose=0, options=given["options"])
        except ringtrain.errors.RingtrainError as error:
            assert all(word in str(error) for word in words.split("|")), error
        else:
            raise AssertionError(f"trained in spite of {words}")


MODULES = (
    alike_jobs,
    keras_jobs,
    kept_jobs,
    loop_jobs,
    configured_jobs,
    evaluate_jobs,
    records_jobs,
    resume_jobs,
    sharded_jobs,
    snippet_jobs,
    step_jobs,
)


def main() -> None:
    hvd.init()
    jobs = globals() | {name: value for module in MODULES for name, value in vars(module).items()}

    def job(name: str) -> Any:
        keras.config.set_floatx("float32" if name == "arrays_and_metrics" else "float64")
        keras.utils.clear_session()
        return jobs[name]

    call_each(sys.argv[3:], job, OUTPUT / str(hvd.size()) / str(hvd.rank()), float(sys.argv[2]))


if __name__ == "__main__":
    main()
