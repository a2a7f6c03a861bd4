"""A script with ringtrain.fit for ringtrain prove, right or with the fault "callback"."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

import ringtrain

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Nudge(keras.callbacks.Callback):
    """Wrong: rank 0 alone changes its weights."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if ringtrain.hvd.rank() == 0:
            weight = self.model.trainable_variables[0]
            weight.assign(weight * 0.999)


def rows() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(211, 6)).astype("float32")
    return x, (x[:, :1] - x[:, 1:2] ** 2).astype("float32")


def build() -> keras.Model:
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def main() -> None:
    keras.utils.set_random_seed(3)
    x, y = rows()
    callbacks = [Nudge()] if FAULT == "callback" else []
    ringtrain.fit(build(), x, y, batch_size=20, validation_split=0.1, epochs=9, callbacks=callbacks, verbose=0)


if __name__ == "__main__":
    main()
