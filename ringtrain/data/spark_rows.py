"""Samples that another process streams to this rank: only its part of the data."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.config.sections import DataConfig
from ringtrain.data import row_order
from ringtrain.data.arrays import Arrays, NumberedRows
from ringtrain.data.classes import checked
from ringtrain.data.dataset import DataSet
from ringtrain.data.row_order import Order
from ringtrain.errors import DataError
from ringtrain.protocol.env import FEED

SPLITS = ("training", "test")


class Shard(NumberedRows):
    """Rows of which only this rank's part is in memory; they have no checksum, since each rank has others."""

    kind, on_resume = "rows of Spark", "each rank gets its part again"

    def __init__(self, own: Arrays, total: int, rank: int, size: int) -> None:
        self.own, self._num_samples, self.shuffle = own, total, True
        # Row numbers count through the parts: a batch's places of a rank, also in the last one, are those of its part.
        self._parts = [row_order.part_of(total, number, size) for number in range(size)]
        self.rank = rank

    def shard(self, number: int, num_shards: int, whole: int = 1) -> range:
        return range(*self._parts[self.rank])

    def _shuffled(self, global_batch_size: int, seed: int, epoch: int) -> Order:
        num_whole, size = len(self) // global_batch_size, len(self._parts)
        in_batches, rest = [], []
        for rank, (first, end) in enumerate(self._parts):
            begin, stop = row_order.part_of(global_batch_size, rank, size)
            order = first + row_order.permutation(end - first, seed * size + rank, epoch)
            in_batches.append(order[: num_whole * (stop - begin)])
            rest.append(order[num_whole * (stop - begin) :])
        return Order(np.concatenate([*in_batches, *rest]), global_batch_size, size)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        first, end = self._parts[self.rank]

        def own_numbers(epoch: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # Of a last batch in which this rank has no row, it gets the number of another rank's, which does not count.
            is_own = (numbers >= first) & (numbers < end)
            return epoch, tf.where(is_own, numbers - first, 0)

        return self.own.batches(order.map(own_numbers), batch_size, seed)


def spark(config: DataConfig, environ: Mapping[str, str] = os.environ) -> DataSet:
    """Reads this rank's rows of `--spark-data`, from a pipe that slows down the executor if this process is slower."""
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
    own: Any = made.train, made.test
    splits = [Shard(rows, total, rank, size) for rows, total in zip(own, totals, strict=True)]
    return dataclasses.replace(made, train=splits[0], test=splits[1])
