"""A text classifier with `ringtrain.fit` that takes its time, as long as a file is there: killed_text.py EPOCHS"""

from __future__ import annotations

import sys

import keras
import numpy as np
from holding import Holding
from recording import Recording

import ringtrain

ROWS, WORDS, LENGTH = 403, 50, 12


def main() -> None:
    keras.utils.set_random_seed(3)
    draw = np.random.default_rng(0)
    x = draw.integers(1, WORDS, (ROWS, LENGTH))
    x[np.arange(LENGTH) >= draw.integers(3, LENGTH + 1, (ROWS, 1))] = 0  # texts end early
    y = (x[:, 0] + x[:, 1]) % 2
    layers = [
        keras.layers.Embedding(WORDS, 8, mask_zero=True),
        keras.layers.LSTM(16),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, "sigmoid"),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    history = ringtrain.fit(
        model, x, y, name="run", epochs=int(sys.argv[1]), validation_split=0.1, callbacks=[Recording(), Holding(0.15)]
    )
    print(f"RESULT {history.checksum} {history.history}", flush=True)


main()
