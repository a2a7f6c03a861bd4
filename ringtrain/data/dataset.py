"""Training and test data of a run, in memory or read on demand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.data.row_order import evaluation_shard

if TYPE_CHECKING:
    from ringtrain.data.arrays import NumberedRows
    from ringtrain.data.streams import Stream


class Split:
    """Rows, numbered from 0: `NumberedRows`, or the batches of a `Stream`."""

    is_of_rank_0 = False
    """whether rank 0 alone reads them"""
    is_shard = False
    """whether they are those of this rank alone, instead of all ranks' together"""
    may_end_early = False
    """whether an epoch can have fewer batches than the first"""
    advice = (
        "give random operations of the dataset a seed, the same on all ranks, or pass ringtrain.from_rank_0(dataset);"
        " do not shard it"
    )
    """advice for the error about ranks with different batches"""

    def __len__(self) -> int:
        raise NotImplementedError

    def shard(self, number: int, num_shards: int, whole: int = 1) -> range:
        """Samples of a part of an evaluation; see `evaluation_shard`."""
        if self.is_shard:
            return range(len(self))
        return evaluation_shard(len(self), number, num_shards, whole)

    def part(self, numbers: Sequence[int]) -> tf.data.Dataset | None:
        """Batches with these numbers, if samples are stored in batches."""
        return None

    def begin_evaluation(self) -> None:
        """Begins to read for an evaluation."""

    def end(self, was_stopped: bool = False) -> None:
        """Ends an epoch, which a callback may have stopped early, or an evaluation.

        Leaves shuffles, caches and hooks as one process does. Of one that an earlier process has read, nothing is open.
        """

    def checksum(self) -> int:
        """Checksum by which ranks compare their data; without one, the number of samples."""
        return len(self)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        """Batches of pairs of an epoch, int64 [], and row numbers, int64 [up to batch_size]; seed None: evaluation."""
        raise NotImplementedError


@dataclass(frozen=True)
class DataSet:
    """Training and test data of a run."""

    train: NumberedRows | Stream
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]
    of_classes: bool = False
    """whether each row's target is an integer class"""


def spaced(total: int, count: int) -> NDArray[np.int64]:
    """Returns up to `count` numbers below `total`, evenly spaced."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64))


def evaluation_batches(samples: Split, numbers: range, batch_size: int) -> tf.data.Dataset:
    """Returns batches of the samples with these successive numbers; the last batch may be smaller."""
    part = samples.part(numbers)
    if part is not None:
        return ahead(part)

    def numbers_of_batch(begin: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + batch_size, numbers.stop)
        return tf.constant(0, tf.int64), tf.range(begin, end)

    order = tf.data.Dataset.range(numbers.start, numbers.stop, batch_size).map(numbers_of_batch)
    # Of an unknown number of batches, Keras would count the end as one in the losses of single outputs.
    known = tf.data.experimental.assert_cardinality(math.ceil(len(numbers) / batch_size))
    return ahead(samples.batches(order, batch_size, seed=None).apply(known))


def ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Prepares two batches while the model trains another."""
    options = tf.data.Options()
    # autotuning can delay the end of fit by seconds, and with it all other ranks
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)
