"""A script as a user has it, for the commands that take one; its values may come from a sweep."""

from __future__ import annotations

import argparse

import keras
import numpy as np

import ringtrain

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--rows", type=int, default=200)
arguments = parser.parse_args()

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x = draw.normal(size=(arguments.rows, 8)).astype("float32")
units = ringtrain.trial().get("units", 16)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(arguments.lr), "mse")
ringtrain.fit(
    model,
    x,
    x.sum(axis=1, keepdims=True),
    batch_size=32,
    epochs=arguments.epochs,
    validation_split=0.25,
    callbacks=[keras.callbacks.CSVLogger("log.csv")],
)
