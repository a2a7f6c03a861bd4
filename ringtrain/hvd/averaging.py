"""Verification that the update of an optimizer receives the ranks' gradients combined."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.errors import OutOfSync
from ringtrain.hvd.backend import horovod
from ringtrain.hvd.distributed import Bypassed, distribute
from ringtrain.hvd.keras_patches import distributed, innermost, set_untracked
from ringtrain.hvd.reduction import OP_WORDS, averaged_by_adasum

OF_REDUCTION = " (the reduction alone was tested)"
"""added to the result of `check_averaging` if the optimizer changes gradients, or no copy of it can be made"""


def check_averaging(optimizer: Any) -> str:
    """Verifies, by a small collective, that an update receives the ranks' gradients combined.

    Known vectors pass all steps of the optimizer before its update, including overridden methods, loss scaling and
    accumulation. This uses a new optimizer of the same class and settings, so that the given one keeps its state. If
    none can be made, or it changes gradients, the vectors pass the reduction only.

    Args:
        optimizer: Distributed optimizer.

    Returns:
        "averaged", "summed" or "combined by Adasum", with "(the reduction alone was tested)" if the vectors passed only
        that; "left to this rank" outside of the optimizer's process set.

    Raises:
        OutOfSync: The optimizer is not distributed, or the result differs from the expected one.
    """
    inner = innermost(optimizer)
    reduction = getattr(inner, "reduction", None)
    if reduction is None:
        raise OutOfSync(f"{type(optimizer).__name__} reduces no gradients: wrap it in hvd.DistributedOptimizer")
    if not reduction.process_set.included():
        return "left to this rank"
    if isinstance(inner, keras.optimizers.MultiOptimizer) and not inner.built:
        raise OutOfSync(f"{type(inner).__name__} has no parts before it is built: compile and build it first")

    def alone(length: int) -> Callable[[Any], Any]:
        variable = keras.Variable(np.zeros(length), dtype="float32", name="probe")
        return lambda vector: reduction([vector], [variable], [False])[0]

    parts = [optimizer]
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        parts = inner.optimizers
    words = OP_WORDS[reduction.op]
    for part in parts:
        send: Callable[[int], Callable[[Any], Any]] = functools.partial(probe, part)
        if not hands_on(part):
            send = alone
            words = OP_WORDS[reduction.op] + OF_REDUCTION
        result = reduction.trial(send)
        num_ranks, device = result.shape[-1], getattr(reduction, "device_dense", "")
        divisor = {"averaged": num_ranks, "summed": 1}.get(OP_WORDS[reduction.op])
        if divisor is None:
            gpus = tf.config.list_logical_devices("GPU")
            divisor = averaged_by_adasum(device, gpus, horovod.nccl_built(), horovod.local_size())
        expected = reduction.accumulated_scale / divisor
        if not np.allclose(result, expected, rtol=1e-2):  # bfloat16 has 8 bits
            raise OutOfSync(
                f"{type(part).__name__}: the reduction of {num_ranks} ranks gave {result.tolist()}, expected"
                f" {expected} everywhere"
            )
    return words


def probe(optimizer: Any, length: int, reduction: Any = None) -> Callable[[Any], tf.Tensor]:
    """Returns a function that sends a vector of `length` through an unclipped copy of an optimizer to its update."""
    # A user's schedule need not be registered with Keras.
    simpler = {"learning_rate": 1.0, "use_ema": False}
    inner = innermost(optimizer)
    settings = {name: simpler.get(name, value) for name, value in inner.get_config().items()}
    twin = single = type(inner).from_config(settings)
    if not distributed(single):
        distribute(single, reduction, 1)
    elif reduction is not None:
        set_untracked(single, reduction=reduction)
    if optimizer is not inner:
        twin = type(optimizer)(single, initial_scale=optimizer.initial_scale)
    single.clipnorm = single.global_clipnorm = single.clipvalue = single.weight_decay = None
    set_untracked(single, update_step=lambda gradient, variable, rate: variable.assign(gradient))
    single.prepare_probe()
    received = keras.Variable(np.zeros(length), dtype="float32", name="probe")
    twin.build([received])

    def send(vector: Any) -> tf.Tensor:
        for _ in range(single.gradient_accumulation_steps or 1):
            twin.apply_gradients([(twin.scale_loss(vector), received)])
        return tf.convert_to_tensor(received.value)

    return send


def hands_on(optimizer: Any) -> bool:
    """Returns whether gradients reach an optimizer's update unchanged; False also without a complete `get_config`."""
    vector = np.array([3.0, -7.0, 2.0], np.float32)
    try:
        received = probe(optimizer, len(vector), _Local())(tf.constant(vector))
    except Bypassed:
        raise
    except Exception:  # raised by user code; the first step checks again whether it reduces
        return False
    return bool(np.allclose(received, vector, rtol=1e-3))


def refuse_bypassing(optimizer: Any) -> None:
    """Raises ValueError for an optimizer whose `apply_gradients` bypasses the method that reduces."""
    if type(optimizer).apply_gradients is keras.optimizers.Optimizer.apply_gradients:
        return
    try:
        hands_on(optimizer)
    except Bypassed as error:
        raise ValueError(f"DistributedOptimizer: {error}") from error


class _Local:
    """Replacement for a `Reduction` that returns this rank's gradients."""

    def __call__(self, gradients: Any, variables: Any, local: Any) -> list[Any]:
        return list(gradients)

    def true_on_all_ranks(self, flag: Any) -> Any:
        return flag
