"""Keras' own fit: in one process, or under a tf.distribute strategy."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ringtrain.lab.bench.baselines.training import Trained, Training, checksum


class Watch(keras.callbacks.Callback):
    """Callback that records when steps end; `latest` is the newest instance, for callers that only named the class."""

    latest: Watch | None = None

    def __init__(self, images_per_end: int = 0) -> None:
        super().__init__()
        self.trained = Trained(images_per_end)
        Watch.latest, self.sum = self, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        so_far = float((logs or {})["loss"]) * (len(self.trained.losses) + 1)  # Keras reports the mean so far
        self.trained.note(so_far - self.sum)
        self.sum = so_far

    def on_train_end(self, logs: Any = None) -> None:
        copies = [getattr(weight.value, "values", (weight.value,)) for weight in self.model.trainable_variables]
        self.trained.checksums = [checksum(copy) for copy in zip(*copies, strict=True)]


def alone(training: Training) -> Trained:
    """Trains in one process without a strategy."""
    return fit(training, tf.distribute.get_strategy(), training.batches(range(1)))


def fit(training: Training, strategy: tf.distribute.Strategy, batches: Any) -> Trained:
    """Compiles and fits."""
    with strategy.scope():
        model = training.model()
        model.compile(training.optimizer(model), training.loss(), metrics=["accuracy"], jit_compile=False)
    watch = Watch(training.numbers.batch_size * training.num_workers)
    model.fit(batches, epochs=1, steps_per_epoch=training.num_steps, callbacks=[watch], shuffle=False, verbose=0)
    return watch.trained
