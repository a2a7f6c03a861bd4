"""What of a model is not the same on several ranks as in one process, in words for the plan."""

from __future__ import annotations

from typing import Any

import keras

from ringtrain import hvd
from ringtrain.hvd.keras_patches import compiled_losses, innermost, layers_of
from ringtrain.optim import divided, metric_states
from ringtrain.optim.metric_states import Rows

OF_A_WHOLE_BATCH = ("dice", "tversky", "circle")
"""Keras' losses that are no mean over rows"""


def unlike_one_process(
    model: keras.Model, batch: Any, rows: Rows | None, of_virtual_ranks: bool = False, of_ranks: bool = False
) -> list[str]:
    """Parts of a built model whose results on several ranks are not those of one process, a phrase each.

    Args:
        batch: One of the model's batches, or its specification.
        rows: None: gradients and metrics are tested with made-up rows.
        of_virtual_ranks: One process trains the parts of as many virtual ranks, with the same statistics and random
            numbers for each.
        of_ranks: Whether all ranks call this together, and compare what they have seen.
    """
    is_made_up = rows is None
    if rows is None:
        rows = metric_states.made_up_rows(batch)
    is_known, seen = divided.is_known(model), divided.Comparison()
    if not is_known or (hvd.seeds(model) and not of_virtual_ranks):
        seen = divided.compare(model, batch, rows)
    found = [] if of_virtual_ranks else _of_each_rank(model, seen)
    if of_ranks and len(set(hvd.allgather_object(seen.constants, name="ringtrain_constants"))) > 1:
        found.append(
            "each rank has other numbers in layers or losses that are no weights, such as arrays of NumPy: call"
            " keras.utils.set_random_seed first"
        )
    rank = "virtual rank" if of_virtual_ranks else "rank"
    names = [loss.name for loss in compiled_losses(model) if _function_of(loss.loss) in OF_A_WHOLE_BATCH]
    if names:
        found.append(f"the loss of {', '.join(names)} is a function of a whole batch, here of each {rank}'s rows")
    elif seen.distance is not None:
        found.append(
            f"a batch's gradient is not the mean of its parts' ({seen.distance:.1e} apart): train_step, loss or"
            f" optimizer combine the rows of each {rank} by themselves"
        )
    if seen.error and not is_known:
        found.append(f"gradients of a whole batch and of its parts were not compared: {seen.error}")
    elif is_made_up and not is_known and seen.distance is None:
        found.append(
            "gradients of a whole batch and of its parts were compared with made-up rows, as no batch is read before"
            " training"
        )
    if _merges_rows(model):
        found.append("an embedding's rows that occur several times are added up before the update")
    names = _not_over_rows(model, rows, seen)
    if names:
        found.append(f"{', '.join(names)}: the metric is no sum over rows")
    return found


def _of_each_rank(model: keras.Model, seen: divided.Comparison) -> list[str]:
    """What each rank computes of its own rows, or draws by itself."""
    found = []
    names = [layer.name for layer in layers_of(model) if _pads_to_longest(layer)]
    if names:
        found.append(f"{', '.join(names)} pads to the longest of each rank's texts: give output_sequence_length")
    if any(not hasattr(layer, "device_of_sums") for layer in hvd.batch_norm_layers(model)):
        found.append("batch normalization uses each rank's rows (all rows with model.sync_batch_norm)")
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        found.append("float16 overflows by each rank's gradients, so that other steps may be skipped")
    if seen.draws:
        found.append("random layers draw other numbers on each rank")
    if seen.draws_by_tensorflow:
        found.append("tf.random draws other numbers on each rank")
    return found


def _pads_to_longest(layer: Any) -> bool:
    """Returns whether a layer pads texts to the longest one of what it is given."""
    is_vectorization = isinstance(layer, keras.layers.TextVectorization)
    return is_vectorization and layer._output_mode == "int" and layer._output_sequence_length is None


def _not_over_rows(model: keras.Model, rows: Rows | None, seen: divided.Comparison) -> list[str]:
    """Names of metrics whose state is no sum over rows in training, or else, with Keras' step, in evaluation."""
    if rows is None:
        return []
    sums = seen.metrics or metric_states.of_test_step(model, rows)
    return sums.not_over_rows if sums else []


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
