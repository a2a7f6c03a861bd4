"""A script of a user's own whose ranks train different numbers of batches, which nothing can know before."""

from __future__ import annotations

import keras
import numpy as np

import ringtrain.hvd as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
hvd.broadcast_variables(model.weights, root_rank=0)
batches = ((np.ones((4, 3)), np.ones((4, 1))) for _ in range(5 + hvd.rank()))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(batches, verbose=0, callbacks=callbacks)
