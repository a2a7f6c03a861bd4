"""Whether the states of a model's metrics are sums: over the rows of a batch, and over updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringtrain import hvd

NUM_ROWS = 8
"""rows of the whole batch"""
UNKNOWN_LENGTH = 4
"""of an axis of made-up rows"""
Rows = Callable[[int, int], Any]
"""Function that returns the batch of the rows from one number up to another, of `NUM_ROWS`."""


class StateKinds(NamedTuple):
    """What was seen of metrics, by name."""

    not_over_rows: list[str]
    """their state after a batch is not the sum of those after its halves"""
    not_over_updates: list[str]
    """their state after two updates is not the sum of what each adds to zeros, such as a minimum or the last value"""


def metrics_of(model: keras.Model) -> list[Any]:
    """Metrics of a model besides those of its loss; those of `compile` one by one."""
    compiled, of_loss = model._compile_metrics, model._compile_loss
    excluded = [model._loss_tracker, compiled]
    if of_loss:
        excluded += of_loss.metrics
    ids = {id(metric) for metric in excluded}
    metrics = [metric for metric in model.metrics if id(metric) not in ids]
    if compiled:
        metrics += compiled.metrics
    return metrics


def of_script(model: keras.Model) -> list[str]:
    """Names of metrics that are no class of Keras; all of Keras' add to their state."""
    return [metric.name for metric in metrics_of(model) if not _is_of_keras(metric)]


def _is_of_keras(metric: Any) -> bool:
    return type(metric).__module__.startswith("keras.")


def sums(metrics: Sequence[Any], reset: Callable[[], None], update: Callable[[int, int], None]) -> StateKinds:
    """Updates metrics with a batch, with its halves, and with one half after the other.

    Args:
        reset: Resets the metrics.
        update: Updates the metrics with the rows from one number up to another.
    """
    reset()
    variables: list[Any] = []
    for metric in metrics:
        variables += metric.variables
    at_first = [keras.ops.convert_to_numpy(variable) for variable in variables]

    def states(*bounds: tuple[int, int], from_zeros: bool = False) -> list[list[Any]]:
        for variable, value in zip(variables, at_first, strict=True):  # a reset may do nothing
            first_value = np.zeros_like(value) if from_zeros else value
            variable.assign(first_value)
        for begin, end in bounds:
            update(begin, end)
        return [[_values(variable) for variable in metric.variables] for metric in metrics]

    first, second = (0, NUM_ROWS // 2), (NUM_ROWS // 2, NUM_ROWS)
    names = [metric.name for metric in metrics]
    # A state that is no variable, such as a list, cannot be added up over the ranks.
    elsewhere = [metric.name for metric in metrics if not metric.variables]
    over_rows = elsewhere + _unequal(names, states((0, NUM_ROWS)), states(first), states(second))
    if all(_is_of_keras(metric) for metric in metrics):
        return StateKinds(over_rows, [])
    added = states(first, from_zeros=True), states(second, from_zeros=True)
    over_updates = elsewhere + _unequal(names, states(first, second), states(), *added)
    return StateKinds(over_rows, over_updates)


def _values(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable).astype(float)


def _unequal(names: Sequence[str], expected: list[list[Any]], *summands: list[list[Any]]) -> list[str]:
    """Names of metrics whose states are not the sum of others, but for rounding."""
    unequal = []
    for index, name in enumerate(names):
        for number, state in enumerate(expected[index]):
            total = sum(summand[index][number] for summand in summands)
            if not np.allclose(total, state, rtol=1e-3, atol=1e-6, equal_nan=True):
                unequal.append(name)
                break
    return unequal


def of_test_step(model: keras.Model, rows: Rows) -> StateKinds | None:
    """What is seen of the metrics in steps of evaluation, after which the model is as before; None: nothing."""
    metrics = metrics_of(model)
    if not metrics:
        return StateKinds([], [])
    # What a layer draws or counts differs between steps: nothing is seen then.
    kept = [*hvd.seeds(model), *hvd.global_seed(), *hvd.layers_own_variables(model)]
    before = [keras.ops.convert_to_numpy(variable) for variable in kept]
    of_metrics = [(variable, keras.ops.convert_to_numpy(variable)) for variable in model.metrics_variables]
    try:
        seen = sums(metrics, model.reset_metrics, lambda begin, end: model.test_step(rows(begin, end)))
    except Exception:  # of the script's own code; a step will raise it again
        return None
    finally:
        for variable, value in of_metrics:  # a reset may do nothing
            variable.assign(value)
        is_random = len(hvd.global_seed()) + len(hvd.seeds(model)) + len(hvd.layers_own_variables(model)) > len(kept)
        for variable, value in zip(kept, before, strict=True):
            is_random = is_random or not np.array_equal(variable, value)
            variable.assign(value)
    if is_random:
        return None
    return seen


def made_up_rows(batch: Any) -> Rows | None:
    """Rows with the specification of a batch: numbers between 0 and 1, and classes 0 and 1; None: not of all dense."""
    draw = np.random.default_rng(0)

    def made_up(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, np.ndarray):
            leaf = tf.convert_to_tensor(leaf)
        if not isinstance(leaf, tf.Tensor | tf.TensorSpec):
            raise TypeError
        shape = [NUM_ROWS]
        for size in leaf.shape[1:]:
            shape.append(UNKNOWN_LENGTH if size is None else size)
        if leaf.dtype == tf.string:
            return tf.fill(shape, "a")
        values: Any = draw.uniform(size=shape)
        if not leaf.dtype.is_floating:
            values = values < 0.5
        return tf.cast(values, leaf.dtype)

    try:
        rows = keras.tree.map_structure(made_up, batch)
    except (TypeError, ValueError):
        return None

    def from_to(begin: int, end: int) -> Any:
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], rows)

    return from_to
