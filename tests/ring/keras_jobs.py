"""Kinds of Keras' own examples, small, with `ringtrain.fit(model, ...)` for `model.fit(...)`; see run_fit.py."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from fit_alike import (
    CLASSES,
    OUTPUT,
    SAME,
    WEIGHTS,
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
from keras import layers
from only import only

import ringtrain
from ringtrain import hvd
from ringtrain.config import CheckpointConfig, ModelConfig, TrainConfig
from ringtrain.errors import RingtrainError
from ringtrain.hvd import train_step

DRAW = np.random.default_rng(1)
IMAGES, PIXELS = DRAW.normal(size=(70, 8, 8, 1)), DRAW.integers(0, 3, (70, 8, 8))
TEXTS = DRAW.integers(1, 20, (70, 6)) * (np.arange(6) < DRAW.integers(1, 7, 70)[:, None])


@only(np=2)
def segmentation() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((8, 8, 1))
        small = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
        large = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(small)
        outputs = layers.Conv2D(3, 1, activation="softmax")(layers.Concatenate()([inputs, large]))
        iou = keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")
        return compiled(keras.Model(inputs, outputs), "sparse_categorical_crossentropy", metrics=[iou, "accuracy"])

    whole_job(make, IMAGES, PIXELS, "segmentation", validation_split=0.2)


@only(np=2)
def texts_with_masks_and_lstm() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        parts = [
            keras.Input((None,)),
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(5),
            layers.Dense(1, activation="sigmoid"),
        ]
        return compiled(keras.Sequential(parts), "binary_crossentropy", metrics=["accuracy"])

    whole_job(make, TEXTS, (TEXTS[:, :1] % 2).astype(float), "texts", class_weight={0: 1.0, 1: 3.0})


@only(np=2)
def multi_label() -> None:
    def make() -> keras.Model:
        auc = keras.metrics.AUC(multi_label=True, num_labels=3, name="auc")
        return compiled(dense(activation="sigmoid"), "binary_crossentropy", metrics=[auc, "binary_accuracy"])

    whole_job(make, X, (Y > 0).astype(float), "labels", within=1e-6)


@only(np=2)
def averaged_weights() -> None:
    """The model has the moving average of its weights in the end, and continues without it after a resume."""

    def make() -> keras.Model:
        adamw = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.02, 12), use_ema=True, ema_momentum=0.9)
        loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
        return compiled(dense(activation="softmax"), loss, optimizer=adamw)

    one_hot = np.eye(3)[CLASSES]
    whole_job(make, X, one_hot, "ema")


@only(np=2)
def rates_that_begin_at_0() -> None:
    """A warm-up from 0, a rate that a callback sets, and optimizers by variable, whose own rate Keras leaves at 0."""
    warm_up = keras.optimizers.schedules.CosineDecay(0.0, 8, warmup_target=0.1, warmup_steps=4)
    by_epoch = keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 * epoch)
    make = lambda optimizer: compiled(dense(), optimizer=optimizer)  # noqa: E731
    sgd = keras.optimizers.SGD
    _, history = equals_one_process(lambda: make(sgd(warm_up)), X, Y, "warm-up")
    numbers = json.loads((history.run / "summary.json").read_text())["numbers"]
    assert (numbers["initial_learning_rate"], numbers["learning_rate"]) == (0.0, 0.1)
    equals_one_process(lambda: make(sgd(0.0)), X, Y, "later", callbacks=[by_epoch])

    def by_variable() -> keras.Model:
        return make(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd(0.1), {".*/bias": sgd(0.01)})))

    _, history = equals_one_process(by_variable, X, Y, "by-variable")
    assert json.loads((history.run / "summary.json").read_text())["numbers"]["learning_rate"] in (0.01, 0.1)


@only(np=2)
def nothing_to_train() -> None:
    """Keras warns of a model without trainable weights, and evaluates it in every epoch; it may have no weights."""
    for number, layer in enumerate((layers.Rescaling(0.5), layers.Dense(6, trainable=False))):
        make = lambda layer=layer: compiled(keras.Sequential([keras.Input((6,)), layer]))  # noqa: E731
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            equals_one_process(make, X, X, f"nothing-{number}", validation_split=0.2)


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
    model = compiled(keras.Sequential([keras.Input((6,)), Picky(), layers.Dense(3)]))
    held_out = (np.full((1, 6), 2000.0), np.zeros((1, 3)))
    try:
        ringtrain.fit(model, X, Y, validation_data=held_out, name="picky", options=options(), **SAME)
        raise AssertionError("nothing was raised")
    except (tf.errors.InvalidArgumentError, RingtrainError) as error:
        assert isinstance(error, RingtrainError) == (hvd.rank() > 0), error
        assert hvd.rank() == 0 or ("rank 0 on " in str(error) and "InvalidArgumentError" in str(error)), error
    assert hvd.allgather_object(hvd.rank(), name="after_picky") == list(range(hvd.size()))


@only(np=2)
def fine_tuning() -> None:
    """Another head on a saved model, whose layers are frozen, then the last of them trained, too."""
    path = OUTPUT / f"backbone-{hvd.size()}-{hvd.rank()}.keras"
    dense(layers.BatchNormalization()).save(path)

    def make(first_trained: int) -> keras.Model:
        keras.utils.set_random_seed(3)
        backbone = keras.Sequential(keras.saving.load_model(path).layers[:-1])
        for layer in backbone.layers[:first_trained]:
            layer.trainable = False
        return compiled(keras.Sequential([keras.Input((6,)), backbone, layers.Dense(3)]), metrics=["mae"])

    ours, _ = whole_job(lambda: make(2), X, Y, "frozen")
    before = make(2).layers[0].get_weights()
    np.testing.assert_array_equal(ours.layers[0].get_weights()[0], before[0])
    ours, _ = equals_one_process(
        lambda: make(0), X, Y, "thawed", options=options(model=ModelConfig(sync_batch_norm=True)), within=1e-6
    )
    assert np.abs(ours.layers[0].get_weights()[0] - before[0]).max() > 0


class Prepared(keras.Sequential):
    """Prepares its data in a fit of its own, and makes batches, as the tasks of KerasHub do."""

    def fit(
        self, x: Any = None, y: Any = None, batch_size: Any = None, validation_split: float = 0.0, **more: Any
    ) -> Any:
        rows = int(len(x) * (1 - validation_split))
        parts = [
            tf.data.Dataset.from_tensor_slices((2 * x[some], y[some])) for some in (slice(rows), slice(rows, None))
        ]
        train, held_out = (part.batch(batch_size).map(lambda x, y: (x + 1, y)) for part in parts)
        return super().fit(train, validation_data=held_out, **more)


@only(np=2)
def a_fit_of_its_own() -> None:
    def make() -> keras.Model:
        return compiled(Prepared(dense().layers), metrics=["mae"])

    whole_job(make, X, Y, "prepared", validation_split=0.1)
    assert "fit" not in vars(keras.Model)


class Distilled(keras.Model):
    """Learns the targets and what a teacher says, by a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = dense(), dense(layers.Dense(5))
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any) -> Any:
        taught = keras.losses.MeanSquaredError()(self.teacher(x, training=False), y_pred)
        return 0.3 * super().compute_loss(x, y, y_pred, *more, **named) + 0.7 * taught


@only(np=2)
def distillation() -> None:
    whole_job(lambda: compiled(Distilled(), metrics=["mae"]), X, Y, "distilled", logs=False)


class Sampling(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, parts: Any) -> Any:
        mean, log_variance = parts
        noise = keras.random.normal(keras.ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.mean, self.log_variance, self.decoder = layers.Dense(2), layers.Dense(2), layers.Dense(6)
        self.sampling = Sampling()
        self.divergence = keras.metrics.Mean("divergence")

    def call(self, x: Any) -> Any:
        mean, log_variance = self.mean(x), self.log_variance(x)
        each = -0.5 * (1 + log_variance - mean**2 - keras.ops.exp(log_variance))
        self.add_loss(keras.ops.mean(keras.ops.sum(each, axis=1)))
        self.divergence.update_state(keras.ops.sum(each, axis=1))
        return self.decoder(self.sampling([mean, log_variance]))


@only(np=2)
def vae() -> None:
    """Ranks draw different noise and train one model, nearly that of one process; resumed, as never interrupted."""

    def make() -> keras.Model:
        return compiled(VAE(), optimizer=keras.optimizers.Adam(0.02))

    whole, reference = make(), make()
    arguments = {"batch_size": 32, "epochs": 8, "verbose": 0}
    more = {**arguments, "shuffle": True, "options": options(checkpoint=CheckpointConfig(every_steps=1))}
    history = ringtrain.fit(whole, X, X, name="vae", **more)
    hvd.check_in_sync(whole)
    states = hvd.allgather_object(tuple(np.ravel(whole.sampling.seed_generator.state.numpy())))
    assert len(set(states)) == hvd.size()
    resumes_and_is_refused(whole, history, make, X, X, "vae", **more)
    expected = reference.fit(X, X, **arguments).history
    assert set(expected) == set(history.history)
    np.testing.assert_allclose(history.history["loss"][-1], expected["loss"][-1], rtol=0.15)


class GAN(keras.Model):
    """Two networks, two optimizers, and a step of its own; it has no `call`."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.d_tracker, self.g_tracker = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def train_step(self, batch: Any) -> dict[str, Any]:
        real, noise = batch
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            logits = keras.ops.concatenate([self.discriminator(real), self.discriminator(self.generator(noise))])
            ones = keras.ops.ones_like(self.discriminator(real))
            d_loss = entropy(keras.ops.concatenate([ones, 0 * ones]), logits)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            logits = self.discriminator(self.generator(noise))
            g_loss = entropy(keras.ops.ones_like(logits), logits)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


@only(np=2)
def gan() -> None:
    """Both optimizers average, are saved, and resumed; the model is that of one process, since the noise is data."""

    def make() -> GAN:
        model = GAN()
        model.compile(keras.optimizers.Adam(0.01, beta_1=0.5), keras.optimizers.Adam(0.02, beta_1=0.5))
        return model

    arguments = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    more = {**arguments, "options": options(checkpoint=CheckpointConfig(every_steps=1))}
    whole, reference = make(), make()
    history = ringtrain.fit(whole, X, Y, name="gan", **more)
    reference.fit(X, Y, **arguments)
    assert distance(whole, reference) < 1e-10
    hvd.check_in_sync(whole)
    resumed = resumes_and_is_refused(whole, history, make, X, Y, "gan", **more)
    for ours, theirs in zip(whole.g_optimizer.variables, resumed.g_optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@only(np=2)
def from_files() -> None:
    """Lines of CSV files, decoded by tf.data, and the same numbers as a table."""
    path = OUTPUT / f"table-{hvd.size()}-{hvd.rank()}.csv"
    np.savetxt(path, np.hstack([X, Y]), delimiter=",", fmt="%.17g")

    def lines() -> tf.data.Dataset:
        rows = tf.data.TextLineDataset([str(path)]).map(lambda line: tf.stack(tf.io.decode_csv(line, [[0.0]] * 9)))
        return rows.map(lambda row: (row[:6], row[6:])).batch(32)

    def make() -> keras.Model:
        normalize = layers.Normalization()
        normalize.adapt(X)
        model = keras.Sequential([keras.Input((6,)), normalize, *dense().layers])
        return compiled(model, "huber", metrics=["mae", keras.metrics.R2Score(name="r2")])

    another_order = lambda lines, _: (lines.shuffle(4, seed=1), None)  # noqa: E731
    whole_job(make, lines(), None, "lines", another_order, batch_size=None, within=1e-5, logs=False)
    table = pd.read_csv(path, header=None)
    whole_job(make, table.iloc[:, :6], table.iloc[:, 6:], "table", validation_split=0.2)


@only(np=2)
def large_arrays() -> None:
    """Ranks hold them once per host, and a row that is another on one rank, of which no checksum knows, is named."""
    x, y = np.zeros((1000, 10_000)), np.resize(Y, (1000, 3))
    x[:, :6] = np.resize(X, (1000, 6))

    def make() -> keras.Model:
        inputs = keras.Input((10_000,))
        return compiled(keras.Model(inputs, dense()(inputs[:, :6])))

    equals_one_process(make, x, y, "large")
    in_memory = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    assert f"{x.ctypes.data + 4096 & ~4095:x}" in in_memory, in_memory
    x[1] += hvd.rank()  # of rank 1's own pages
    assert hvd.allgather_object(float(x[1, 9]), name="row_of_large") == [0.0, 1.0]
    try:
        ringtrain.fit(make(), x.copy(), y, name="large-1", options=options(), **SAME)
        raise AssertionError("nothing was raised")
    except RingtrainError as error:
        assert "rank 1 has another array, float64 (1000, 10000), from row 1 on," in str(error), error


class RowsSinceTheStart(keras.metrics.Metric):
    """Rows of all epochs and validations: nothing resets them."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], self.count.dtype))

    def result(self) -> Any:
        return self.count + 0.0

    def reset_state(self) -> None:
        """Does nothing."""


@only(np=2)
def metrics_that_are_never_reset() -> None:
    def make() -> keras.Model:
        return compiled(dense(), metrics=["mae", RowsSinceTheStart()])

    equals_one_process(make, X, Y, "never_reset", validation_data=(X[:20], Y[:20]), epochs=3)


@only(np=2)
def several_steps_per_call() -> None:
    def make() -> keras.Model:
        return compiled(dense(), metrics=["mae"], steps_per_execution=2)

    equals_one_process(make, X, Y, "steps-per-call")


@only(np=3)
def hooks_of_an_evaluation() -> None:
    """They are called on a rank without a batch, too: what they change is shared."""

    class Halves(keras.callbacks.Callback):
        num_begun = 0

        def on_test_begin(self, logs: Any = None) -> None:
            self.num_begun += 1

        def on_test_end(self, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5

    hooks = [Halves()]
    held_out = {"validation_data": (X[:20], Y[:20]), "validation_batch_size": 32}
    ours, _ = equals_one_process(lambda: compiled(dense()), X, Y, "hooks", callbacks=hooks, **held_out)
    assert hooks[0].num_begun == 2 * SAME["epochs"], "of both trainings"
    assert float(ours.optimizer.learning_rate) == np.float32(0.05 / 8)


@only(np=3)
def compiled_by_xla() -> None:
    """Unequal parts, by the option or as compiled; what XLA cannot do is named, or trained without it."""

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if train_step.has_layer(self.model, "ranks"):  # not in Keras' own fit
                compiles.add(train_step.has_layer(self.model, "jit"))

    def make() -> keras.Model:
        return compiled(dense(), jit_compile=True)

    compiles: set[bool] = set()
    note = {"callbacks": [Noting()]}
    xla = options(train=TrainConfig(jit=True))
    equals_one_process(lambda: compiled(dense()), X, Y, "xla", options=xla, **note)
    equals_one_process(make, X, Y, "xla_as_compiled", **note)
    assert compiles == {True}
    compiles.clear()
    equals_one_process(make, X, Y, "no-xla", sample_weight=WEIGHTS, **note)
    assert compiles == {False}

    # A loss whose divisor follows from all ranks' weights is summed over them.

    def masked() -> keras.Model:
        keras.utils.set_random_seed(3)
        embedding = layers.Embedding(20, 4, mask_zero=True)
        return compiled(keras.Sequential([keras.Input((None,)), embedding, layers.Dense(1)]), jit_compile=True)

    equals_one_process(masked, TEXTS, TEXTS[..., None] / 20, "no-xla-masked", **note)
    assert compiles == {False}

    own = compiled(dense())
    own.train_step = functools.partial(keras.Model.train_step, own)
    for model, weights, problem in (
        (make(), WEIGHTS, "masks, sample or class weights"),
        (own, None, "has a train_step of its own"),
    ):
        try:
            ringtrain.fit(model, X, Y, sample_weight=weights, name="refused", **SAME, options=xla)
        except ringtrain.errors.ConfigError as error:
            assert "train.jit: " in str(error) and problem in str(error), error
        else:
            raise AssertionError(problem)
