"""Script whose callback records in MLflow: examples/mlflow_callback.py."""

from __future__ import annotations

import sys

import keras
import numpy as np

import ringtrain
from examples.mlflow_callback import MLflow

uri, epochs = sys.argv[1:]
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
callbacks = [MLflow(uri, "tracked")]
ringtrain.fit(model, x, x[:, :1], name="tracked", epochs=int(epochs), callbacks=callbacks, verbose=0)
