"""Where data, model and callbacks of a run come from: see `run.context.Source`.

configured:   the configuration
script:       the script, with `ringtrain.fit`
script_model: its model, made ready for several ranks
unlike:       what of a model is not the same on several ranks as in one process, in words
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OPTIONS = (
    "run.directory",
    "run.mirror",
    "checkpoint.",
    "device.",
    "health.",
    "hvd.",
    "elastic.commit_every_steps",
    "tracking.",
    "chaos",
    "model.not_averaged",
    "model.sync_batch_norm",
    "optimizer.jit",
    "strategy.name",
    "train.max_time_s",
    "train.check_every_steps",
    "train.jit",
    "train.virtual_ranks",
)
"""Options of a configuration that a script may set; the others are arguments of `fit`, or the script's own."""
ON_RANK_0 = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger")
"""Keras' callbacks that write files or show progress."""


def on_rank(callbacks: Sequence[Any], rank: int) -> list[Any]:
    """Callbacks of a script that run on a rank."""
    return [one for one in callbacks if rank == 0 or not classes_of(one) & {*ON_RANK_0}]


def classes_of(callback: Any) -> set[str]:
    """Names of the class of an object and of those that it derives from."""
    return {kind.__name__ for kind in type(callback).__mro__}


def callbacks_in(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks of an argument that Keras' methods take: a list, a nest, one alone, a `CallbackList`, or None."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return tuple(keras.tree.flatten(callbacks)) if callbacks else ()
