"""Kinds of job that people bring to `ringtrain.fit`, each a few seconds long: python tests/matrix/jobs.py NAME ...

Nothing of them is made for ringtrain: data and models are as in a script with `model.fit`.
"""

from __future__ import annotations

import io
import math
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ringtrain
import ringtrain.errors

ROWS, EPOCHS, BATCH = 107, 3, 16
"""rows that no number of ranks divides, with a smaller last batch"""


def draw(seed=0):
    return np.random.default_rng(seed)


def numbers(rows=ROWS, width=8):
    x = draw().normal(size=(rows, width)).astype("float32")
    return x, np.tanh(x @ draw(1).normal(size=(width, 1))).astype("float32")


def texts(rows=ROWS, length=10, words=30):
    """Word numbers, 0 behind the end of a text, and the parity of its first two words."""
    x = draw(2).integers(1, words, (rows, length))
    x[np.arange(length) >= draw(3).integers(3, length + 1, (rows, 1))] = 0
    return x, (x[:, 0] + x[:, 1]) % 2


def dense(*outputs, dropout=0.2):
    return keras.Sequential([layers.Dense(16, "relu"), layers.Dropout(dropout), *outputs])


current = ""
"""name of the job that runs"""


def fit(model, *data, **options):
    return ringtrain.fit(model, *data, **{"name": current, "epochs": EPOCHS, **options})


def sample_weights():
    x, y = numbers()
    model = dense(layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.01), "mse", weighted_metrics=["mae"])
    weight = draw(4).uniform(0.5, 2, len(x))
    return fit(model, x, y, sample_weight=weight, batch_size=BATCH, validation_split=0.1)


def inputs_and_outputs_with_masks():
    x, y = texts()
    words = keras.Input((10,), dtype="int64", name="words")
    extra = keras.Input((8,), name="extra")
    hidden = layers.Embedding(30, 8, mask_zero=True)(words)
    hidden = layers.LSTM(8, return_sequences=True)(hidden)
    each = layers.Dense(30, "softmax", name="each")(hidden)
    whole = layers.Dense(1, "sigmoid", name="whole")(layers.Concatenate()([layers.LSTM(8)(hidden), extra]))
    model = keras.Model({"words": words, "extra": extra}, {"each": each, "whole": whole})
    model.compile("adam", {"each": "sparse_categorical_crossentropy", "whole": "binary_crossentropy"})
    given = {"words": x, "extra": numbers()[0]}
    return fit(model, given, {"each": np.roll(x, -1, 1), "whole": y.astype("float32")}, batch_size=BATCH)


def tf_data_from_files():
    folder = Path(tempfile.gettempdir()) / "ringtrain-matrix"
    folder.mkdir(exist_ok=True)
    x, y = numbers()
    for number in range(4):
        own = folder / f"rows-{number}.csv.{os.getpid()}"
        np.savetxt(own, np.hstack([x, y])[number::4], delimiter=",")
        own.replace(folder / f"rows-{number}.csv")
    files = tf.data.Dataset.list_files(str(folder / "rows-*.csv"), shuffle=False)
    lines = files.interleave(tf.data.TextLineDataset, cycle_length=2)
    rows = lines.map(lambda line: tf.strings.to_number(tf.strings.split(line, ",")))
    rows = rows.map(lambda row: (tf.ensure_shape(row[:-1], [8]), tf.ensure_shape(row[-1:], [1])))
    batches = rows.shuffle(50, seed=1).batch(BATCH).prefetch(2)
    batches = batches.apply(tf.data.experimental.assert_cardinality(math.ceil(ROWS / BATCH)))
    model = dense(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return fit(model, batches)


def rows_of_files():
    """Tar files in WebDataset's layout."""
    folder = Path(tempfile.gettempdir()) / "ringtrain-matrix-tar"
    folder.mkdir(exist_ok=True)
    x, y = numbers()
    for number, part in enumerate(np.array_split(np.arange(ROWS), 5)):
        own = folder / f".{number}.tar.{os.getpid()}"
        with tarfile.open(own, "w") as file:
            for row in part.tolist():
                for ending, values in (("x.npy", x[row]), ("y.npy", y[row])):
                    content = io.BytesIO()
                    np.save(content, values)
                    member = tarfile.TarInfo(f"{row:03}.{ending}")
                    member.size = content.tell()
                    content.seek(0)
                    file.addfile(member, content)
        if not (folder / f"{number}.tar").exists():
            own.rename(folder / f"{number}.tar")
    model = dense(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return fit(model, ringtrain.Records(folder, inputs="x.npy", target="y.npy"), batch_size=BATCH)


def py_dataset_with_workers():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return math.ceil(ROWS / BATCH)

        def __getitem__(self, index):
            x, y = numbers()
            return x[index * BATCH : (index + 1) * BATCH], y[index * BATCH : (index + 1) * BATCH]

    model = dense(layers.BatchNormalization(), layers.Dense(1))
    model.compile("rmsprop", "mae")
    return fit(model, Batches(workers=2))


def generator():
    def batches():
        order = draw(5)
        x, y = numbers()
        while True:
            chosen = order.integers(0, ROWS, BATCH)
            yield x[chosen], y[chosen]

    model = dense(layers.Dense(1))
    model.compile("adam", "mse")
    return fit(model, batches(), steps_per_epoch=6)


def generator_of_rank_0():
    def batches():
        x, y = numbers()
        while True:
            chosen = np.random.default_rng().integers(0, ROWS, BATCH)
            yield x[chosen], y[chosen]

    model = dense(layers.Dense(1))
    model.compile("adam", "mse")
    return fit(model, ringtrain.from_rank_0(batches()), steps_per_epoch=6)


def text_with_class_weights():
    x, y = texts()
    hidden = [layers.Embedding(30, 8, mask_zero=True), layers.LSTM(8), layers.Dropout(0.3)]
    model = keras.Sequential([*hidden, layers.Dense(1, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return fit(model, x, y, class_weight={0: 1.0, 1: 2.0}, batch_size=BATCH)


def transformer():
    x, y = texts()
    words = keras.Input((10,), dtype="int64")
    hidden = layers.Embedding(30, 8)(words) + layers.Embedding(10, 8)(np.arange(10))
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(hidden, hidden)
    hidden = layers.LayerNormalization()(hidden + attended)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(8)(layers.Dense(16, "relu")(hidden)))
    classes = layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(words, classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
    return fit(model, x, y, batch_size=BATCH)


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.decoder = layers.Dense(16, "relu"), dense(layers.Dense(8), dropout=0.0)
        self.mean, self.log_variance, self.sampling = layers.Dense(2), layers.Dense(2), Sampling()
        self.total, self.divergence = keras.metrics.Mean("loss"), keras.metrics.Mean("kl_loss")

    @property
    def metrics(self):
        return [self.total, self.divergence]

    def call(self, x):
        hidden = self.hidden(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return mean, log_variance, self.decoder(self.sampling([mean, log_variance]))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_variance, decoded = self(x, training=True)
            divergence = -0.5 * (1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance))
            divergence = keras.ops.mean(keras.ops.sum(divergence, axis=1))
            total = keras.ops.mean(keras.ops.sum(keras.ops.square(x - decoded), axis=1)) + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.divergence.update_state(divergence)
        return {"loss": self.total.result(), "kl_loss": self.divergence.result()}


def variational_autoencoder():
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.01))
    return fit(model, numbers()[0], batch_size=BATCH)


class OfTheGuide(keras.Model):
    """The step of Keras' guide, which returns the results of all compiled metrics as one log."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=keras.ops.shape(x)[0])
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def weights_that_divide():
    x, y = numbers()
    inputs = keras.Input((8,))
    model = OfTheGuide(inputs, layers.Dense(1)(layers.Dense(16, "relu")(inputs)))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    return fit(model, x, y, sample_weight=draw(4).uniform(0.1, 2, len(x)), batch_size=BATCH)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_true - y_pred))))

    def result(self):
        return keras.ops.copy(self.value)


def metric_of_an_extreme():
    model = dense(layers.Dense(1))
    model.compile("adam", "mse", metrics=[Largest()])
    return fit(model, *numbers(), batch_size=BATCH)


class Adversarial(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(8)])
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss

    def train_step(self, real):
        rows = keras.ops.shape(real)[0]
        fake = self.generator(keras.random.normal((rows, 4), seed=self.seed_generator))
        labels = keras.ops.concatenate([keras.ops.ones((rows, 1)), keras.ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            of_discriminator = self.loss_fn(labels, self.discriminator(keras.ops.concatenate([fake, real], axis=0)))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(of_discriminator, weights), weights, strict=True))
        noise = keras.random.normal((rows, 4), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            of_generator = self.loss_fn(keras.ops.zeros((rows, 1)), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(of_generator, weights), weights, strict=True))
        return {"d_loss": of_discriminator, "g_loss": of_generator}


def adversarial():
    model = Adversarial()
    optimizers = keras.optimizers.Adam(0.001), keras.optimizers.Adam(0.002)
    model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    return fit(model, numbers()[0], batch_size=BATCH)


def fine_tuning():
    x, y = numbers()
    base = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.BatchNormalization()])
    model = keras.Sequential([base, layers.Dense(1)])
    base.trainable = False
    model.compile("adam", "mse")
    fit(model, x, y, name=f"{current}-frozen", batch_size=BATCH, epochs=2)
    base.trainable = True
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return fit(model, x, y, batch_size=BATCH)


def several_labels():
    x, _ = numbers()
    y = (x[:, :3] > 0).astype("float32")
    model = dense(layers.Dense(3, "sigmoid"))
    auc = keras.metrics.AUC(multi_label=True, num_labels=3, name="auc")
    model.compile("adam", "binary_crossentropy", metrics=[auc, "binary_accuracy"])
    return fit(model, x, y, batch_size=BATCH, validation_data=(x[:20], y[:20]))


def moving_average():
    x, y = numbers()
    model = dense(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse")
    stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    return fit(model, x, y, batch_size=BATCH, callbacks=[stop])


def mixed_precision():
    x, y = numbers()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = dense(layers.Dense(1, dtype="float32"))
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)), "mse")
    return fit(model, x, y, batch_size=BATCH)


def half_precision():
    """Gradients overflow at the first loss scales, in one part of a batch."""
    x, y = numbers()
    y[5] *= 3000
    keras.config.set_dtype_policy("mixed_float16")
    model = dense(layers.Dense(1, dtype="float32"), dropout=0.0)
    model.compile(keras.optimizers.SGD(1e-5), "mse", metrics=["mae"])
    history = fit(model, x, y, batch_size=BATCH)
    history.history["loss scale"] = [float(model.optimizer.dynamic_scale)]
    return history


def keras_hub_task():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=10
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    x, y = texts()
    given = {"token_ids": x, "padding_mask": x != 0, "segment_ids": np.zeros_like(x)}
    return fit(model, given, y, batch_size=BATCH)


JOBS = (
    sample_weights,
    inputs_and_outputs_with_masks,
    tf_data_from_files,
    rows_of_files,
    py_dataset_with_workers,
    generator,
    generator_of_rank_0,
    text_with_class_weights,
    transformer,
    variational_autoencoder,
    weights_that_divide,
    metric_of_an_extreme,
    adversarial,
    fine_tuning,
    several_labels,
    moving_average,
    mixed_precision,
    half_precision,
    keras_hub_task,
)


if __name__ == "__main__":
    named = {job.__name__: job for job in JOBS}
    for current in sys.argv[1:] or named:
        keras.utils.clear_session()
        keras.config.set_dtype_policy("float32")
        keras.utils.set_random_seed(3)
        try:
            history = named[current]()
        except ringtrain.errors.ConfigError as error:
            print(f"REFUSED {current} {error}", flush=True)
        else:
            print(f"RESULT {current} {history.checksum} {history.history}", flush=True)
