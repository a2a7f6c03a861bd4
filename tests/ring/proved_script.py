"""A script with ringtrain.fit for ringtrain prove, right or with the fault that its first argument names."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringtrain

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Nudge(keras.callbacks.Callback):
    """Wrong: rank 0 alone changes its weights."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if ringtrain.hvd.rank() == 0:
            weight = self.model.trainable_variables[0]
            weight.assign(weight * 0.999)


class Noise(keras.callbacks.Callback):
    """Wrong: random numbers that no checkpoint holds."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        weight = self.model.trainable_variables[0]
        weight.assign(weight * (1 + 0.01 * np.random.random()))


class Clock(keras.metrics.Mean):
    """Wrong: reads the clock."""

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.timestamp() % 1000)


class Sneaking(keras.Model):
    """Wrong: half of an update is made outside of the optimizer."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def rows() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(211, 6)).astype("float32")
    return x, (x[:, :1] - x[:, 1:2] ** 2).astype("float32")


def drawn() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Wrong: other batches in every start."""
    x, y = rows()
    while True:
        chosen = np.random.randint(0, len(x), 20)
        yield x[chosen], y[chosen]


def build() -> keras.Model:
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs))
    kind = Sneaking if FAULT == "step" else keras.Model
    model = kind(inputs, outputs)
    metrics = ["mae", *([Clock(name="clock")] if FAULT == "clock" else [])]
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics)
    return model


def main() -> None:
    if FAULT != "seed":
        keras.utils.set_random_seed(3)
    x, y = rows()
    model = build()
    callbacks = {"callback": [Nudge()], "noise": [Noise()]}.get(FAULT, [])
    options: dict[str, Any] = {"epochs": 9, "callbacks": callbacks, "verbose": 0}
    if FAULT == "shuffle":
        tf.random.set_seed(int(time.time() * 1000))
        ringtrain.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).shuffle(211).batch(20), **options)
    elif FAULT == "generator":
        np.random.seed(None)
        ringtrain.fit(model, drawn(), steps_per_epoch=10, **options)
    elif FAULT == "two":
        ringtrain.fit(model, x, y, batch_size=20, name="first", **options)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(211, seed=1).batch(20)
        ringtrain.fit(model, dataset, resume="runs/first", **{**options, "epochs": 18})
    else:
        ringtrain.fit(model, x, y, batch_size=20, validation_split=0.1, **options)


if __name__ == "__main__":
    main()
