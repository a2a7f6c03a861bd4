"""Callback of slow_links.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.config.sections import DataConfig

FILE = "RINGTRAIN_ACCURACY_FILE"
EVERY = 64
"""steps of an epoch between two evaluations: rounds of 8 and of 32 have ended"""


class Accuracy(keras.callbacks.Callback):
    """Appends [step, test accuracy] to a file; each rank evaluates its part of the test samples."""

    def on_train_begin(self, logs: Any = None) -> None:
        test = data.source(DataConfig(name="keras.datasets.fashion_mnist:load_data"))().test
        own = data.evaluation_shard(len(test), hvd.rank(), hvd.size(), 500)
        self.batches, self.num_test = data.evaluation_batches(test, own, 500), len(test)
        self.predict = tf.function(lambda x: self.model(x, training=False), autograph=False)
        self.step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if (batch + 1) % EVERY == 0:
            self.note()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note()

    def note(self) -> None:
        right = [np.sum(np.argmax(self.predict(x), -1) == np.ravel(y)) for x, y in self.batches]
        total = hvd.allreduce(np.float64(sum(right)), op=hvd.Sum, name="accuracy_over_steps")
        if hvd.rank() == 0:
            with Path(os.environ[FILE]).open("a") as file:
                file.write(f"{json.dumps([self.step, float(total) / self.num_test])}\n")
