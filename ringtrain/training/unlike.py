"""What of a model may not be the same on several ranks as in one process, in words for the plan.

The words follow from classes alone: whether it makes a difference in a job, `ringtrain prove` measures.
"""

from __future__ import annotations

from typing import Any

import keras

from ringtrain import hvd
from ringtrain.hvd import train_step
from ringtrain.hvd.keras_patches import compiled_losses, innermost, layers_of, metrics_of_script

OF_A_WHOLE_BATCH = ("dice", "tversky", "circle")
"""Keras' losses that are no mean over rows"""


def unlike_one_process(model: keras.Model, of_virtual_ranks: bool = False) -> list[str]:
    """Parts of a built model whose results on several ranks may not be those of one process, a phrase each."""
    found = [] if of_virtual_ranks else _of_each_rank(model)  # all have the same statistics and random numbers
    rank = "virtual rank" if of_virtual_ranks else "rank"
    names = [loss.name for loss in compiled_losses(model) if _function_of(loss.loss) in OF_A_WHOLE_BATCH]
    if names:
        found.append(f"the loss of {', '.join(names)} is a function of a whole batch, here of each {rank}'s rows")
    if _merges_rows(model):
        found.append("an embedding's rows that occur several times are added up before the update")
    return found


def own_code(model: keras.Model) -> list[str]:
    """What code of a script's own gets on several ranks, a phrase each: whether its results differ is up to it."""
    found = []
    if train_step.is_own(model):
        found.append(
            f"{type(model).__name__}.train_step gets each rank's rows: means over rows, and losses of compute_loss, are"
            " those of the whole batch"
        )
    names = metrics_of_script(model)
    if names:
        found.append(f"the states of {', '.join(names)} are added up over the ranks, as sums over rows are")
    return found


def _of_each_rank(model: keras.Model) -> list[str]:
    """What each rank computes of its own rows, or draws by itself."""
    found = []
    names = [layer.name for layer in layers_of(model) if _pads_to_longest(layer)]
    if names:
        found.append(f"{', '.join(names)} pads to the longest of each rank's texts: give output_sequence_length")
    if any(not hasattr(layer, "device_of_sums") for layer in hvd.batch_norm_layers(model)):
        found.append("batch normalization uses each rank's rows (all rows with model.sync_batch_norm)")
    if any(layer.compute_dtype == "float16" for layer in layers_of(model)):
        found.append("float16 overflows by each rank's gradients, so that other steps may be skipped")
    if any(map(_draws, layers_of(model))):
        found.append("random layers draw other numbers on each rank")
    return found


def _draws(layer: Any) -> bool:
    """Returns whether a layer may draw random numbers; recurrent ones have a seed also without dropout."""
    rates = [getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")]
    return bool(layer._seed_generators) and rates != [0, 0]


def _pads_to_longest(layer: Any) -> bool:
    """Returns whether a layer pads texts to the longest one of what it is given."""
    is_vectorization = isinstance(layer, keras.layers.TextVectorization)
    return is_vectorization and layer._output_mode == "int" and layer._output_sequence_length is None


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
