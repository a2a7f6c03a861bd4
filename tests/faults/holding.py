"""A callback that lets a run take its time, as long as a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import keras

HOLD = "RINGTRAIN_TEST_HOLD"
"""variable with the file's path"""
STEP_S = 0.05


class Holding(keras.callbacks.Callback):
    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__()
        self.step_s = step_s

    def on_train_batch_end(self, batch, logs=None) -> None:
        if Path(os.environ[HOLD]).exists():
            time.sleep(self.step_s)
