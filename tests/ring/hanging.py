"""A script of a user's own whose ranks wait for each other, at first for a good reason, and then for ever.

Rank 1 waits in a collective while rank 0 evaluates in a graph, until that has been told. Then they train different
numbers of batches, which nothing can know before.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

import ringtrain.hvd as hvd
from ringtrain.hvd.process import PROCESS

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
hvd.broadcast_variables(model.weights, root_rank=0)


def until_told():
    while not PROCESS.monitor.stalls.has_warned:
        time.sleep(0.1)
    return 1.0


@tf.function(autograph=False)
def evaluate():
    return tf.py_function(until_told, [], tf.float32)


if hvd.rank() == 0:
    evaluate()
hvd.allreduce(np.ones(1), name="after_evaluation")
batches = ((np.ones((4, 3)), np.ones((4, 1))) for _ in range(5 + hvd.rank()))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(batches, verbose=0, callbacks=callbacks)
