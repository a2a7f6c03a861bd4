"""Horovod without ringtrain: a loop written by hand for Keras 3, with Horovod's own tape."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from peers.one_start import Trained, checksum
from peers.training import Training


def run(training: Training) -> Trained:
    """Runs one process per worker; gradients are averaged one by one as they become ready."""
    hvd.init()
    model = training.model()
    optimizer, loss_of = training.optimizer(model), training.loss()
    # Horovod accepts TensorFlow's variables, not the Keras objects around them.
    weights = [variable.value for variable in model.trainable_variables]
    hvd.broadcast_variables([*weights, *(variable.value for variable in optimizer.variables)], root_rank=0)

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    trained = Trained(training.numbers.batch_size * hvd.size())
    for x, y in training.batches(range(hvd.rank(), hvd.rank() + 1)).take(training.num_steps):
        trained.note(step(x, y))
    trained.checksums = [checksum(weights)]
    return trained
