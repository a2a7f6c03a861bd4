"""Gradients of a part of a batch, which the optimizer keeps while the model's step would apply them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ringtrain.hvd.keras_patches import set_untracked
from ringtrain.hvd.reduction import scaled


class LossIsKnown(Exception):
    """Ends the step of a part for which the loss is enough."""


@contextlib.contextmanager
def gradients_kept(model: keras.Model, num_parts: Any, until_loss: bool = False) -> Iterator[dict[int, Any]]:
    """Context in which a model's optimizer keeps gradients, by the weight's id, instead of applying them."""
    optimizer = model.optimizer
    kept: dict[int, Any] = {}
    scale_loss = optimizer.scale_loss
    is_scaled = False

    # With a loss scale, a part's loss is its summand in the mean over all parts: gradients of a mean over few rows are
    # larger than those over all rows, and would overflow in float16 at a smaller scale.
    def scale_summand(loss: Any) -> Any:
        nonlocal is_scaled
        if until_loss:
            raise LossIsKnown  # Keras scales it when it is complete
        is_scaled = True
        return scale_loss(loss) / tf.cast(num_parts, loss.dtype)

    def keep(pairs: Any) -> None:
        for gradient, variable in pairs:
            if is_scaled and gradient is not None:
                gradient = scaled(gradient, num_parts)  # after the backward pass, in the weight's own type
            kept[id(variable)] = gradient

    names: dict[str, Any] = {"apply_gradients": keep}
    if until_loss or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        names["scale_loss"] = scale_summand
    before = {name: vars(optimizer).pop(name) for name in names if name in vars(optimizer)}  # a script's own
    set_untracked(optimizer, **names)
    try:
        yield kept
    finally:
        for name in names:
            del vars(optimizer)[name]
        if before:
            set_untracked(optimizer, **before)
