"""What every strategy is given, and what it gives back."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import data, models
from ringtrain.config import Config, Numbers
from ringtrain.run import setup

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclass(frozen=True)
class Training:
    """A model, an optimizer, batches and a number of steps, and this process' place among those that train."""

    config: Config
    numbers: Numbers
    data_set: data.DataSet
    num_workers: int
    """each with a batch of its own in every step"""
    rank: int
    """of this process"""
    ports: tuple[int, ...]
    """free ones of this host, one per process and one more"""
    folder: Path
    """that all processes see; rank-0.json is there when rank 0 has trained"""

    @property
    def num_steps(self) -> int:
        """Steps of each worker."""
        return self.numbers.num_steps

    def model(self) -> keras.Model:
        """A new model, the same weights in every process."""
        import keras

        keras.utils.set_random_seed(self.config.seed)
        return setup.find(self.config).build_model(self.data_set.input_shape, self.data_set.num_classes)

    def optimizer(self, model: keras.Model) -> keras.optimizers.Optimizer:
        """Its optimizer, which talks to nobody by itself."""
        from ringtrain.optim import optimizers

        optimizer = optimizers.build(self.config, self.numbers, model)
        optimizer.build(model.trainable_variables)
        return optimizer

    def loss(self) -> keras.losses.Loss:
        """The mean over a batch."""
        return models.cross_entropy(self.config.model.label_smoothing)

    def samples(self, workers: range) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The samples of some workers as arrays, batch after batch: each worker's first, each worker's second, ...

        They are those that ringtrain gives to its ranks, in the same order.
        """
        size, samples = self.numbers.batch_size, self.data_set.train
        order = samples.epoch_order(size * self.num_workers, self.config.seed, 0)
        chosen = order[:, workers.start * size : workers.stop * size].reshape(-1)
        return samples.inputs[chosen], samples.labels[chosen]  # type: ignore[attr-defined]

    def batches(self, workers: range) -> tf.data.Dataset:
        """The same as a pipeline without end, of one worker's batch each time."""
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False  # it can make fit wait for seconds at its end
        batches = tf.data.Dataset.from_tensor_slices(self.samples(workers))
        batches = batches.batch(self.numbers.batch_size, drop_remainder=True).repeat()
        return batches.prefetch(2).with_options(options)


@dataclass
class Trained:
    """What a process saw of it."""

    images_per_end: int
    """samples of all workers that a step trains"""
    ends_s: list[float] = field(default_factory=list)
    """when steps ended, by the clock that all processes of a host share"""
    losses: list[float] = field(default_factory=list)
    """of these steps, on one worker's batch"""
    checksums: list[str] = field(default_factory=list)
    """of each copy of the weights that this process has, in the end"""

    def note(self, loss: Any) -> None:
        """A step has ended."""
        self.ends_s.append(time.time())
        self.losses.append(float(loss))


def checksum(weights: Iterable[Any]) -> str:
    """A checksum of arrays or variables."""
    value = 0
    for weight in weights:
        value = zlib.crc32(np.ascontiguousarray(weight).tobytes(), value)
    return f"{value:08x}"
