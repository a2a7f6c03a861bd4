"""Where data, model and callbacks of a run come from: see `run.context.Source`.

configured:   the configuration
script:       the script, with `ringtrain.fit`
job:          either's data and model, ready for several ranks
script_model: a compiled model, made ready for several ranks
unlike:       what of a model is not the same on several ranks as in one process, in words
"""

from __future__ import annotations

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
    "model.sync_batch_norm",
    "strategy.name",
    "train.max_time_s",
    "train.check_every_steps",
    "train.jit",
    "train.virtual_ranks",
)
"""Options of a configuration that a script may set; the others are arguments of `fit`, or the script's own."""


def callbacks_in(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks of an argument that Keras' methods take: a list, a nest, one alone, a `CallbackList`, or None."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return tuple(keras.tree.flatten(callbacks)) if callbacks else ()
