"""The layers around a model's training step: one order, in one place, whoever adds them first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

TrainStep = Callable[[Any], Any]
"""Function of a batch that trains it and returns the logs."""

LAYERS = (
    "jit",  # innermost, in place of Keras' step: forward and backward pass compiled by XLA, which cannot reduce
    "micro-batches",  # in place of Keras' step, too: the stages of a model on several devices
    "rows",  # what `ringtrain prove` notes of the rows of a part
    "ranks",  # parts of this rank's rows, their weights, and sums over all ranks: optim.step
    "timing",  # outermost: a step begins when its input is there
)
"""Names, from the innermost layer to the outermost."""


def wrap(model: keras.Model, layer: str, wrapper: Callable[[TrainStep], TrainStep]) -> None:
    """Adds a layer around a model's training step, or replaces it.

    Args:
        model: Any Keras model.
        layer: One of `LAYERS`.
        wrapper: Returns the step with this layer, given the step without it. It is called again whenever a layer
            further inside changes.
    """
    wrappers = vars(model).setdefault("ringtrain_step_layers", {})
    if not wrappers and "train_step" in vars(model):
        wrappers[""] = lambda _, own=model.train_step: own  # which a script has set on the object
    wrappers[layer] = wrapper
    _compose(model, wrappers)


def unwrap(model: keras.Model, layer: str) -> None:
    """Removes a layer, if it is there."""
    wrappers = vars(model).get("ringtrain_step_layers", {})
    if wrappers.pop(layer, None):
        _compose(model, wrappers)


def has_layer(model: keras.Model, layer: str) -> bool:
    """Returns whether a model's training step has a layer."""
    return layer in vars(model).get("ringtrain_step_layers", {})


@contextlib.contextmanager
def unchanged_afterwards(model: keras.Model) -> Iterator[None]:
    """Context after which a model's training step has the layers that it had before."""
    names = "ringtrain_step_layers", "train_step"
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    before["ringtrain_step_layers"] = dict(before.get("ringtrain_step_layers", {}))
    try:
        yield
    finally:
        vars(model).pop("train_step", None)
        vars(model).update(before)


def _compose(model: keras.Model, wrappers: dict[str, Callable[[TrainStep], TrainStep]]) -> None:
    # Not model.train_step = ...: Keras would track and save the attribute.
    vars(model).pop("train_step", None)
    step: TrainStep = model.train_step
    for layer in ("", *LAYERS):
        if layer in wrappers:
            step = wrappers[layer](step)
    if wrappers:
        vars(model)["train_step"] = step
