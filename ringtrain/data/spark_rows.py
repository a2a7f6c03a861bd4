"""Samples that another process streams to this rank: only its part of the data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.config import DataConfig
from ringtrain.data import row_order
from ringtrain.data.dataset import DataSet, Split, checked
from ringtrain.errors import DataError
from ringtrain.protocol.env import FEED

if TYPE_CHECKING:
    import tensorflow as tf

SPLITS = ("training", "test")


@dataclass(frozen=True)
class Shard(Split):
    """Split of which only this rank's part is in memory; it has no checksum, since each rank has other samples.

    Sample numbers count through the parts, rank after rank, each as long as in `row_order.part_of`.
    """

    samples: Split
    """This rank's part."""
    total: int
    """Samples of all ranks."""
    rank: int
    size: int

    def __len__(self) -> int:
        return self.total

    def epoch_order(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the order of one epoch: the columns of a rank are samples of its part."""
        steps, batch_size = self.total // global_batch_size, global_batch_size // self.size
        columns = []
        for rank in range(self.size):
            first, last = row_order.part_of(self.total, rank, self.size)
            local = row_order.epoch_order(last - first, batch_size, seed * self.size + rank, epoch)
            columns.append(first + local[:steps])
        return np.hstack(columns)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        first, _ = row_order.part_of(self.total, self.rank, self.size)
        return self.samples.batches(order.map(lambda epoch, numbers: (epoch, numbers - first)), batch_size, seed)


def spark(config: DataConfig, environ: Mapping[str, str] = os.environ) -> DataSet:
    """Reads this rank's part of the rows given to `ringtrain launch --launcher spark --spark-data`.

    They come through a pipe, which slows down the executor if this process is slower, and stay in memory. Raises
    DataError if no rows are streamed or if they end too early.
    """
    fields = environ.get(FEED, "").split()
    if len(fields) != 6:
        raise DataError(
            f"{config.name}: no rows are streamed to this process: start it with ringtrain launch --launcher spark"
            f" --spark-data module:function -- python -m ringtrain.train --data.name {config.name}"
        )
    descriptor, rank, size, num_train, num_test, num_classes = map(int, fields)
    totals = num_train, num_test
    inputs: list[NDArray[Any] | None] = [None, None]
    parts = [row_order.part_of(total, rank, size) for total in totals]
    labels = [np.full(last - first, -1) for first, last in parts]
    try:
        with os.fdopen(descriptor, "rb") as pipe:
            while (row := pickle.load(pipe)) is not None:
                split, index, sample, label = row
                array = inputs[split]
                if array is None:
                    array = inputs[split] = np.zeros((len(labels[split]), *sample.shape), sample.dtype)
                array[index], labels[split][index] = sample, label
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise DataError(f"{config.name}: the row stream was interrupted: see Spark's error above ({error})") from error
    except ValueError as error:
        raise DataError(f"{config.name}: rows differ in shape or type: {error}") from error
    for split, (local, total) in enumerate(zip(labels, totals, strict=True)):
        missing = int((local < 0).sum())
        if missing:
            raise DataError(
                f"{config.name}: {missing} of {len(local)} rows of rank {rank} did not arrive, of {total}"
                f" {SPLITS[split]} rows: --spark-data must return the same rows each time: cache or store them"
            )
    train, test = zip(inputs, labels, strict=True)
    made = checked(config.name, train, test, num_classes)
    shards = [Shard(samples, total, rank, size) for samples, total in zip((made.train, made.test), totals, strict=True)]
    return DataSet(shards[0], shards[1], made.num_classes, made.input_shape)
