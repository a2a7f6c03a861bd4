"""Input of every baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import data, models
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import Config
from ringtrain.training import configured

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclass(frozen=True)
class Training:
    """Model, optimizer, batches, number of steps, and the rank of this process among the workers."""

    config: Config
    numbers: Numbers
    data_set: data.DataSet
    num_workers: int
    """each with its own batch in every step"""
    rank: int
    """of this process"""
    ports: Sequence[int]
    """unused ports of this host, one more than processes"""
    folder: Path
    """shared by all processes; rank-0.json exists when rank 0 has trained"""

    @property
    def num_steps(self) -> int:
        """Steps of each worker."""
        return self.numbers.num_steps

    def model(self) -> keras.Model:
        """Builds a new model with the same weights in every process."""
        import keras

        keras.utils.set_random_seed(self.config.seed)
        return configured.find(self.config).build_model(self.data_set.input_shape, self.data_set.num_classes)

    def optimizer(self, model: keras.Model) -> keras.optimizers.Optimizer:
        """Builds the optimizer, without communication."""
        from ringtrain.optim import optimizers

        optimizer = optimizers.build(self.config, self.numbers, model)
        optimizer.build(model.trainable_variables)
        return optimizer

    def loss(self) -> keras.losses.Loss:
        """Mean loss over a batch."""
        return models.cross_entropy(self.config.model.label_smoothing)

    def samples(self, workers: range) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The samples of some workers as arrays, batch after batch: each worker's first, each worker's second, ...

        They are those that ringtrain gives to its ranks, in the same order.
        """
        size, rows = self.numbers.batch_size, self.data_set.train
        order = rows.order_of_pass(size * self.num_workers, self.config.seed, 0)
        places = range(workers.start * size, workers.stop * size)
        chosen = np.concatenate([order.rows(step, places) for step in range(order.num_whole)])
        inputs, labels = rows.nest  # type: ignore[attr-defined]
        return inputs[chosen], labels[chosen]

    def batches(self, workers: range) -> tf.data.Dataset:
        """The same samples as an endless pipeline of one worker's batch at a time."""
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False  # it can delay the end of fit by seconds
        batches = tf.data.Dataset.from_tensor_slices(self.samples(workers))
        batches = batches.batch(self.numbers.batch_size, drop_remainder=True).repeat()
        return batches.prefetch(2).with_options(options)
