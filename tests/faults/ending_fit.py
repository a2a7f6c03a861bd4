"""A script with `ringtrain.fit` that loses ranks where epochs and training end: ending_fit.py FOLDER HAS_DEATHS"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np

import ringtrain
import ringtrain.hvd as hvd

FOLDER = Path(sys.argv[1])
HAS_DEATHS = sys.argv[2] == "1"
LAST_STEP = 46
"""within the fifth epoch, which ends after it as if it had all of its 10 steps"""


class Dies(keras.callbacks.Callback):
    """Ends rank 0 at the end of an epoch, and the next rank 0 at the end of training; stops training in between."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == LAST_STEP:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 3:
            self.die("epoch")

    def on_train_end(self, logs=None):
        self.die("training", lost=FOLDER / "run" / "checkpoints" / "step-00000050")

    def die(self, name, lost=None):
        note = FOLDER / name
        if HAS_DEATHS and hvd.rank() == 0 and not note.exists():
            note.touch()
            if not lost:
                threading.Thread(target=time.sleep, args=(600,)).start()  # it outlives the failure
                raise ValueError("this rank is bad")
            shutil.rmtree(lost)  # with the disk of the host
            os.kill(os.getpid(), signal.SIGKILL)


class Multiplies(keras.callbacks.Callback):
    """Changes what it keeps, and a learning rate, at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.product, self.epochs, self.before = 1.0, [], object()

    def on_epoch_begin(self, epoch, logs=None):
        self.before = object()  # cannot be saved

    def on_epoch_end(self, epoch, logs=None):
        del self.before
        self.product *= 1.5
        self.epochs.append(epoch)
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.9


def main() -> None:
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")
    y = np.tanh(x.sum(1, keepdims=True))
    model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9, use_ema=True, ema_momentum=0.9), "mse", metrics=["mae"])
    multiplies = Multiplies()
    best = keras.callbacks.ModelCheckpoint(str(FOLDER / "best.keras"), "val_loss", save_best_only=True)
    history = ringtrain.fit(
        model,
        x,
        y,
        name="run",
        batch_size=16,
        epochs=9,
        validation_data=(x[:50], -y[:50]),  # gets worse
        callbacks=[multiplies, best, keras.callbacks.CSVLogger(str(FOLDER / "log.csv")), Dies()],
    )
    kept = f"{multiplies.product} {multiplies.epochs}"
    print(f"RESULT {history.checksum} {history.history} {history.epoch} {kept}", flush=True)


main()
