"""Which samples a rank trains and evaluates: every sample once, the same global batches on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def left_out(num_samples: int, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples that an epoch does not train, since they do not fill a global batch.

    They take turns: all samples stand in a circle, whose order the seed decides, and each epoch leaves out the next
    few. So no sample is left out in two epochs running, and over any number of epochs from the first on, no sample
    is left out more than once more often than another.

    Args:
        global_batch_size: samples per step on all ranks.
        epoch: from 0.

    Returns:
        Sample numbers, int64 [num_samples % global_batch_size].
    """
    rest = num_samples % global_batch_size
    circle = np.random.default_rng([seed, 0, 1]).permutation(num_samples)  # [seed, epoch] are the epochs' own orders
    return circle[(epoch * rest + np.arange(rest)) % num_samples]


def epoch_order(num_samples: int, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which all ranks together see the samples in one epoch: a permutation without those left out.

    Args:
        global_batch_size: samples per step on all ranks.
        epoch: from 0.

    Returns:
        Sample numbers, int64 [steps, global_batch_size], none twice: the same on every rank, other in every epoch.
    """
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    trained = np.ones(num_samples, bool)
    trained[left_out(num_samples, global_batch_size, seed, epoch)] = False
    return order[trained[order]].reshape(-1, global_batch_size)


def file_order(samples_per_file: Sequence[int], global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch for samples that lie one behind the other in files: each rank reads few of the files.

    The files are shuffled and laid end to end, those left out are taken away, and the line is cut into as many equal
    lengths as a global batch has places. Each place takes the samples of its own length, shuffled, one per step.
    Neighbouring places have neighbouring lengths: a rank reads whole files but for the first and the last of its
    stretch, and where there are fewer files than ranks it reads a part of one.

    Args:
        samples_per_file: sample numbers count through the files in this order.
        global_batch_size: samples per step on all ranks.
        epoch: from 0.

    Returns:
        Sample numbers, int64 [steps, global_batch_size], as from epoch_order.
    """
    draw = np.random.default_rng([seed, epoch])
    ends = np.cumsum(samples_per_file)
    num_samples = int(ends[-1])
    line = np.concatenate([np.arange(ends[k] - samples_per_file[k], ends[k]) for k in draw.permutation(len(ends))])
    line = line[~np.isin(line, left_out(num_samples, global_batch_size, seed, epoch))]
    return draw.permuted(line.reshape(global_batch_size, num_samples // global_batch_size), axis=1).T


def training_shard(order: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """The samples that one rank trains in one epoch.

    The order comes in global batches, and each of these is cut into one batch per rank: size ranks with batch_size see
    the same global batches as one rank with size * batch_size, and all make the same number of steps.

    Args:
        order: of the epoch, sample numbers [steps, global batch size].
        rank: 0 ... size - 1.
        size: number of ranks, a divisor of the global batch size.

    Returns:
        Sample numbers, int64 [steps, batch_size]: row s is this rank's batch of step s.
    """
    batch_size = order.shape[1] // size
    return order[:, rank * batch_size : (rank + 1) * batch_size]


def part_of(num_samples: int, rank: int, size: int) -> tuple[int, int]:
    """One rank's part of samples that need not divide evenly, as numpy.array_split has it.

    Args:
        rank: 0 ... size - 1.

    Returns:
        The first, and the one after the last: parts differ in length by one at most, and may be empty.
    """
    each, more = divmod(num_samples, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def evaluation_shard(num_samples: int, rank: int, size: int) -> NDArray[np.int64]:
    """The test samples that one rank evaluates: all ranks' shares together are each sample once.

    Args:
        rank: 0 ... size - 1.

    Returns:
        Sample numbers, int64, neighbours (a rank opens few files); shares differ in length by one at most, and may be
        empty.
    """
    return np.arange(*part_of(num_samples, rank, size))
