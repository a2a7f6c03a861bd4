"""A job of Keras' fit, whose rank 0 is stopped after a step: python stopping_fit.py FOLDER STEP"""

from __future__ import annotations

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import ringtrain
from ringtrain import hvd
from ringtrain.config.sections import Config, HealthConfig, RunConfig

rng = np.random.default_rng(0)
x, y = rng.normal(size=(960, 8)).astype("float32"), rng.integers(0, 3, 960)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch + 1 == int(sys.argv[2]) and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
options = Config(run=RunConfig(directory=sys.argv[1]), health=HealthConfig(stall_timeout=5))
train = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
ringtrain.fit(model, train, epochs=2, callbacks=[Stop()], name="run", options=options)
