"""Job that records when its functions are called, to be compared with the stages of `bench startup`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

NOTES = "RINGTRAIN_TEST_NOTES"
"""variable with the file of rank 0's notes, a line each: a name, and the Unix times of begin and end in seconds"""
PAUSE_S = 0.3
"""seconds that each function waits, so that its time is not in another stage"""


def note(name: str, begin_s: float) -> None:
    time.sleep(PAUSE_S)
    if os.environ.get("HOROVOD_RANK") == "0":
        with Path(os.environ[NOTES]).open("a") as file:
            file.write(f"{json.dumps([name, begin_s, time.time()])}\n")


def data() -> Any:
    begin_s = time.time()
    random = np.random.default_rng(1)
    parts = [(random.normal(size=(num, 8)).astype("float32"), np.arange(num) % 4) for num in (128, 16)]
    note("data", begin_s)
    return parts


def model(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    begin_s = time.time()
    built = keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_classes)])
    note("model", begin_s)
    return built


class Noting(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch < 2:
            note(f"step {batch + 1}", time.time())
