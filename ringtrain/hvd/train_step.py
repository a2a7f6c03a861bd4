"""Layers around a model's training step. Their order is fixed, whichever of them is added first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

TrainStep = Callable[[Any], Any]
"""Function of a batch that trains it and returns the logs."""

LAYERS = (
    "jit",  # innermost, in place of Keras' step: forward and backward pass compiled by XLA, which cannot reduce
    "micro-batches",  # in place of Keras' step, too: the stages of a model on several devices
    "rows",  # what `ringtrain prove` notes of the rows of a part
    "ranks",  # parts of this rank's rows, their weights, and sums over all ranks: training.step
    "trainable",  # layers are trained as `compile` has found them: `model_state.freeze_in_training`
    "timing",  # outermost: a step begins when its input is there
)
"""Names, from the innermost layer to the outermost. Below them is the step of the model's class, or its object's."""

OWN, WRAPPERS, COMPOSED = "", "ringtrain_step_layers", "ringtrain_step"
"""name of the step that a script has set on the object; attributes of a model"""


def wrap(model: keras.Model, layer: str, wrapper: Callable[[TrainStep], TrainStep]) -> None:
    """Adds a layer of `LAYERS` around a model's training step, or replaces it; `wrapper` gets the step without it."""
    wrappers = vars(model).setdefault(WRAPPERS, {})
    found = vars(model).get("train_step")
    if found is not None and found is not vars(model).get(COMPOSED):
        # A script has replaced the composed step, and may call it: the layers so far are inside of the script's step,
        # which becomes the innermost one.
        for inside in wrappers:
            wrappers[inside] = lambda step: step
        wrappers[OWN] = lambda _: found
    wrappers[layer] = wrapper  # called again whenever a layer further inside changes
    _compose(model, wrappers)


def unwrap(model: keras.Model, layer: str) -> None:
    """Removes a layer, if it is there."""
    wrappers = vars(model).get(WRAPPERS, {})
    if wrappers.pop(layer, None):
        _compose(model, wrappers)


def has_layer(model: keras.Model, layer: str) -> bool:
    """Returns whether a model's training step has a layer."""
    return layer in vars(model).get(WRAPPERS, {})


def is_set_on_object(model: keras.Model) -> bool:
    """Returns whether a script has set a training step on the object of a model."""
    found = vars(model).get("train_step")
    return has_layer(model, OWN) or (found is not None and found is not vars(model).get(COMPOSED))


def is_own(model: keras.Model) -> bool:
    """Returns whether a model trains by another step than Keras'."""
    return type(model).train_step is not keras.Model.train_step or is_set_on_object(model)


def be_traced_anew(model: keras.Model) -> None:
    """Replaces a training step that is a `tf.function` by its Python function."""
    # A `tf.function` would keep what was traced before training, without the reduction and the update.
    function = getattr(model.train_step, "python_function", None)
    if function is not None:
        vars(model)["train_step"] = function


@contextlib.contextmanager
def inlined_functions() -> Iterator[None]:
    """Context in which a traced function has those that it calls inside, and they keep nothing of it."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def unchanged_afterwards(model: keras.Model) -> Iterator[None]:
    """Context after which a model's training step has the layers that it had before."""
    names = WRAPPERS, COMPOSED, "train_step"
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    if WRAPPERS in before:
        before[WRAPPERS] = dict(before[WRAPPERS])
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)


def _compose(model: keras.Model, wrappers: dict[str, Callable[[TrainStep], TrainStep]]) -> None:
    # Not model.train_step = ...: Keras would track and save the attribute.
    vars(model).pop("train_step", None)
    vars(model).pop(COMPOSED, None)
    step: TrainStep = model.train_step
    for layer in (OWN, *LAYERS):
        if layer in wrappers:
            step = wrappers[layer](step)
    if wrappers:
        vars(model)["train_step"] = vars(model)[COMPOSED] = step
