"""Custom Keras callback that adds a metric to each epoch.

horovodrun -np 2 -H localhost:2 python -m ringtrain.train --train.callbacks examples.own_callbacks:WeightNorm
"""

import keras
from keras import ops


class WeightNorm(keras.callbacks.Callback):
    """Adds weight_norm, the L2 norm of all trainable weights; equal on all ranks, since the weights are."""

    def on_epoch_end(self, epoch, logs=None):
        squares = [ops.sum(ops.square(weight)) for weight in self.model.trainable_weights]
        logs["weight_norm"] = float(ops.sqrt(sum(squares)))
