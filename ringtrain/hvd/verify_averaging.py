"""Verification that a distributed optimizer combines the gradients of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ringtrain.errors import OutOfSync
from ringtrain.hvd.backend import Adasum, Average
from ringtrain.hvd.keras_patches import innermost, reduction_of
from ringtrain.hvd.reduction import OP_WORDS


def check_averaging(optimizer: Any) -> str:
    """Verifies, by a small collective, that an optimizer combines the ranks' gradients.

    Each rank sends another known vector through the optimizer's reduction. Weights and slots stay as they are.

    Args:
        optimizer: Distributed optimizer.

    Returns:
        "averaged", "summed" or "combined by Adasum"; "left to this rank" outside of the optimizer's process set.

    Raises:
        OutOfSync: The optimizer is not distributed, or the result differs from the expected one.
    """
    inner = innermost(optimizer)
    reduction = reduction_of(inner)
    if reduction is None:
        raise OutOfSync(f"{type(optimizer).__name__} reduces no gradients: wrap it in hvd.DistributedOptimizer")
    if not reduction.process_set.included():
        return "left to this rank"
    if isinstance(inner, keras.optimizers.MultiOptimizer) and not inner.built:
        raise OutOfSync(f"{type(inner).__name__} has no parts before it is built: compile and build it first")

    for part in getattr(inner, "optimizers", [inner]):
        result = reduction.trial(innermost(part))
        num_ranks = result.shape[-1]
        expected = reduction.accumulated_scale
        if reduction.op == Average:
            expected /= num_ranks
        elif reduction.op == Adasum:
            expected = float(result.max())  # Horovod may average over the GPUs of a host before
        if not np.allclose(result, expected, rtol=1e-2):  # float16 has 11 bits
            raise OutOfSync(
                f"{type(part).__name__}: the reduction of {num_ranks} ranks gave {result.tolist()}, expected"
                f" {expected} everywhere"
            )
    return OP_WORDS[reduction.op]
