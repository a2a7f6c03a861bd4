"""Which samples a rank trains and evaluates: every sample once, the same global batches on any number of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which all ranks together see the samples in one epoch.

    Args:
        num_samples: training samples.
        seed: of the run.
        epoch: from 0.

    Returns:
        A permutation of 0 ... num_samples - 1, int64: the same on every rank, another in every epoch.
    """
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def training_shard(num_samples: int, batch_size: int, rank: int, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples that one rank trains in one epoch.

    The epoch's order is cut into global batches, and each of these into one batch per rank: size ranks with batch_size
    see the same global batches as one rank with size * batch_size. What does not fill a global batch is dropped, so
    that every rank makes the same number of steps; another epoch's order drops others.

    Args:
        num_samples: training samples.
        batch_size: samples per step on this rank.
        rank: 0 ... size - 1.
        size: number of ranks.
        seed: of the run.
        epoch: from 0.

    Returns:
        Sample numbers, int64 [steps, batch_size]: row s is this rank's batch of step s.
    """
    steps = num_samples // (size * batch_size)
    order = epoch_order(num_samples, seed, epoch)
    global_batches = order[: steps * size * batch_size].reshape(steps, size, batch_size)
    return global_batches[:, rank]


def evaluation_shard(num_samples: int, rank: int, size: int) -> NDArray[np.int64]:
    """The test samples that one rank evaluates: all ranks' shares together are each sample once.

    Args:
        num_samples: test samples.
        rank: 0 ... size - 1.
        size: number of ranks.

    Returns:
        Sample numbers, int64; shares differ in length by one at most, and may be empty.
    """
    return np.arange(rank, num_samples, size)
