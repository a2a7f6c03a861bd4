"""A script with `ringtrain.fit` whose steps take longer while ranks are missing: elastic_fit.py NUM_RANKS."""

from __future__ import annotations

import sys
import time

import keras
import numpy as np

import ringtrain
import ringtrain.hvd as hvd

WAIT_S = 0.5


class Counting(keras.callbacks.Callback):
    """Counts what it sees; lets a lost rank come back."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self.begins = self.steps = 0
        self.epochs: list[int] = []

    def on_train_begin(self, logs=None):
        self.begins += 1

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if hvd.size() < self.num_ranks:
            time.sleep(WAIT_S)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def main() -> None:
    ringtrain.start()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(314, 8)).astype("float32")
    y = np.tanh(x.sum(1, keepdims=True))
    hidden = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.BatchNormalization()]
    model = keras.Sequential([*hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    counting = Counting(int(sys.argv[1]))
    reducing = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    more = {"callbacks": [counting, reducing], "validation_data": (x[:50], y[:50])}
    history = ringtrain.fit(model, x, y, name="run", batch_size=16, epochs=6, **more)
    seen = f"{counting.begins} {counting.steps} {counting.epochs}"
    print(f"RESULT {history.checksum} {history.history} {seen}", flush=True)


main()
