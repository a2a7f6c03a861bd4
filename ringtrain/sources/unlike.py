"""What of a model is not the same on several ranks as in one process, in words for the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ringtrain import hvd
from ringtrain.hvd.keras_patches import innermost, layers_of
from ringtrain.optim import divided

OF_A_WHOLE_BATCH = ("dice", "tversky", "circle")
"""Keras' losses that are no mean over rows"""


def unlike_one_process(model: keras.Model, batch: Any, rows: Callable[[int, int], Any] | None) -> list[str]:
    """Parts of a built model whose results on several ranks are not those of one process, a phrase each.

    Args:
        batch: One of the model's batches, or its specification.
        rows: Returns the batch of the rows from one number up to another, of at least `divided.NUM_ROWS`. None: neither
            gradients nor metrics are tested.
    """
    found = []
    is_known, seen = divided.is_known(model), divided.Comparison()
    if not is_known or hvd.seeds(model):
        seen = divided.compare(model, batch, rows)
    if any(not hasattr(layer, "device_of_sums") for layer in hvd.batch_norm_layers(model)):
        found.append("batch normalization uses each rank's rows (all rows with model.sync_batch_norm)")
    if seen.draws:
        found.append("random layers draw other numbers on each rank")
    if seen.draws_by_tensorflow:
        found.append("tf.random draws other numbers on each rank")
    losses = model._compile_loss._flat_losses if model._compile_loss else []
    names = [one.name for one in losses if _function_of(one.loss) in OF_A_WHOLE_BATCH]
    if names:
        found.append(f"the loss of {', '.join(names)} is a function of a whole batch, here of each rank's rows")
    elif seen.distance is not None:
        found.append(
            f"a batch's gradient is not the mean of its parts' ({seen.distance:.1e} apart): train_step, loss or"
            " optimizer combine the rows of each rank by themselves"
        )
    if seen.error and not is_known:
        found.append(f"gradients of a whole batch and of its parts were not compared: {seen.error}")
    if _merges_rows(model):
        found.append("an embedding's rows that occur several times are added up before the update")
    names = list(dict.fromkeys([*not_summed(model, rows), *seen.metrics])) if rows else []
    if names:
        found.append(f"{', '.join(names)}: the metric is no sum over rows")
    return found


def _merges_rows(model: keras.Model) -> bool:
    """Returns whether an update with the sum of a row's gradients differs from Keras' with its parts."""
    if not any(isinstance(layer, keras.layers.Embedding) for layer in layers_of(model)):
        return False
    for optimizer in map(innermost, hvd.optimizers_of(model)):
        if not isinstance(optimizer, keras.optimizers.SGD) and optimizer.adds_up_rows:
            return True
    return False


def _function_of(loss: Any) -> str:
    """Name of the function of a loss, which may be given as a class, a function or a text."""
    return str(getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)).lower()


def not_summed(model: keras.Model, rows: Callable[[int, int], Any]) -> list[str]:
    """Names of metrics whose state after two halves of a batch is not the sum of their states after each."""
    metrics = divided.metrics_of(model)
    if not metrics:
        return []

    kept = [*hvd.seeds(model), *hvd.global_seed(), *hvd.weights_of_one_rank(model)]
    before = [keras.ops.convert_to_numpy(variable) for variable in kept]
    of_metrics = [(variable, keras.ops.convert_to_numpy(variable)) for variable in model.metrics_variables]

    def states(begin: int, end: int) -> list[list[Any]]:
        model.reset_metrics()
        model.test_step(rows(begin, end))
        return [[keras.ops.convert_to_numpy(variable) for variable in metric.variables] for metric in metrics]

    try:
        pairs = zip(metrics, states(0, 4), states(4, 8), states(0, 8), strict=True)
        names = [
            one.name for one, *each in pairs if not all(itertools.starmap(divided.is_sum, zip(*each, strict=True)))
        ]
    except Exception:  # of the script's own code; a step will raise it again
        return []
    finally:
        for variable, value in of_metrics:  # a reset may do nothing
            variable.assign(value)
        is_random = len(hvd.global_seed()) + len(hvd.seeds(model)) > len(kept)
        for variable, value in zip(kept, before, strict=True):
            is_random = is_random or not np.array_equal(variable, value)
            variable.assign(value)
    return [] if is_random else names
