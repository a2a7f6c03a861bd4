"""Samples that a rank trains and evaluates: every sample once, the same global batches on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def skipped_samples(num_samples: int, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the samples that an epoch, from 0, does not train because they do not fill a global batch.

    They are a rotating subset, in an order that the seed determines. So no sample is left out in two consecutive
    epochs, and over any number of epochs from epoch 0 on, the samples are left out equally often, up to a difference of
    one.
    """
    rest = num_samples % global_batch_size
    order = np.random.default_rng([seed, 0, 1]).permutation(num_samples)  # [seed, epoch] is for the order of an epoch
    return order[(epoch * rest + np.arange(rest)) % num_samples]


def epoch_order(num_samples: int, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of one epoch without `skipped_samples`, [steps, global_batch_size], equal on all ranks."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    trained = np.ones(num_samples, bool)
    trained[skipped_samples(num_samples, global_batch_size, seed, epoch)] = False
    return order[trained[order]].reshape(-1, global_batch_size)


def file_order(samples_per_file: Sequence[int], global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of one epoch for samples that are stored consecutively in files: each rank reads few files.

    The shuffled files are concatenated, samples that are left out are removed, and the sequence is cut into one
    contiguous range per position in a global batch. Each position takes the samples of its range, shuffled, one per
    step. Neighboring positions have neighboring ranges: a rank reads whole files except at both ends of its ranges, and
    a part of one file if there are fewer files than ranks. Sample numbers count through the files in the order of
    `samples_per_file`.
    """
    draw = np.random.default_rng([seed, epoch])
    ends = np.cumsum(samples_per_file)
    num_samples = int(ends[-1])
    line = np.concatenate([np.arange(ends[k] - samples_per_file[k], ends[k]) for k in draw.permutation(len(ends))])
    line = line[~np.isin(line, skipped_samples(num_samples, global_batch_size, seed, epoch))]
    return draw.permuted(line.reshape(global_batch_size, num_samples // global_batch_size), axis=1).T


def training_shard(order: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """Returns the samples that one rank trains in one epoch, [steps, batch_size], from `order` [steps, global batch].

    Each global batch of the order is cut into one batch per rank: size ranks with batch_size train the same global
    batches as one rank with size * batch_size, and all make the same number of steps. `size` must divide the global
    batch size.
    """
    batch_size = order.shape[1] // size
    return order[:, rank * batch_size : (rank + 1) * batch_size]


def part_of(num_samples: int, rank: int, size: int, whole: int = 1) -> tuple[int, int]:
    """Returns start and end (exclusive) of a rank's part, which may be empty, split as by numpy.array_split.

    `whole`: number of samples of which parts are multiples, as `num_samples` is.
    """
    each, more = divmod(num_samples // whole, size)
    first = rank * each + min(rank, more)
    return first * whole, (first + each + (rank < more)) * whole


def evaluation_shard(num_samples: int, rank: int, size: int, whole: int = 1) -> range:
    """Returns one rank's test samples. Shards are disjoint, contiguous, to open few files, and cover the test set.

    `whole`: batch size of which shards are multiples, except for the last sample's.
    """
    begin, end = part_of(-(-num_samples // whole), rank, size)
    return range(begin * whole, min(end * whole, num_samples))
