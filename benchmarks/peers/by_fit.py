"""Keras' own fit: in one process, or under a tf.distribute strategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from peers.one_start import Trained, watch
from peers.training import Training


def alone(training: Training) -> Trained:
    """Trains in one process without a strategy."""
    return fit(training, tf.distribute.get_strategy(), training.batches(range(1)))


def fit(training: Training, strategy: tf.distribute.Strategy, batches: Any) -> Trained:
    """Compiles and fits."""
    with strategy.scope():
        model = training.model()
        model.compile(training.optimizer(model), training.loss(), metrics=["accuracy"], jit_compile=False)
    watched = watch()
    model.fit(batches, epochs=1, steps_per_epoch=training.num_steps, callbacks=[watched], shuffle=False, verbose=0)
    watched.trained.images_per_end = training.numbers.batch_size * training.num_workers
    return watched.trained
