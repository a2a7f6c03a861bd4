"""Jobs of `ringtrain.fit` in which each rank has batches of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import KillAfter, Killed, X, Y, compiled, dense, distance, options
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config import CheckpointConfig
from ringtrain.errors import ConfigError, DataError

MORE: dict[str, Any] = {"epochs": 3, "verbose": 0, "validation_data": (X[:20], Y[:20])}


def _shard(rank: int, size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[rank:96:size], Y[rank:96:size])).batch(8)


def _fit(name: str, x: Any = _shard, **more: Any) -> tuple[keras.Model, Any]:
    model = compiled(dense(), metrics=["mae"])
    config = options(checkpoint=CheckpointConfig(every_steps=1))
    return model, ringtrain.fit(model, x, name=name, options=config, **MORE, **more)


@only(np=3)
def batches_of_each_rank() -> None:
    """As `fit` of one process with the batches of all ranks together; killed and resumed, as if never interrupted."""
    ours, history = _fit("shards")
    reference = compiled(dense(), metrics=["mae"])
    steps = [
        np.concatenate([np.arange(rank, 96, hvd.size())[at : at + 8] for rank in range(hvd.size())])
        for at in range(0, 96 // hvd.size(), 8)
    ]
    together = tf.data.Dataset.from_generator(
        lambda: ((X[rows], Y[rows]) for rows in steps),
        output_signature=(tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None, 3), tf.float64)),
    )
    expected = reference.fit(together, **MORE)
    assert distance(ours, reference) < 1e-10
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)
    for callbacks in ([KillAfter(5)], []):
        try:
            resumed, again = _fit("killed-shards", callbacks=callbacks)
        except Killed:
            assert callbacks
    assert distance(ours, resumed) == 0 and again.history == history.history
    summary = json.loads((Path(history.run) / "summary.json").read_text())
    assert summary["numbers"]["global_batch_size"] == 8 * hvd.size()
    assert bool(summary["unlike_one_process"]) == (hvd.size() > 1)


@only(np=2)
def what_shards_cannot_be_is_refused() -> None:
    refused: dict[str, Any] = {
        "which returned tuple": lambda rank, size: (X, Y),
        "rank 1 has num_train": lambda *who: _shard(*who).skip(who[0]),
        "have as many rows on every rank": lambda rank, size: _pairs(40 - rank),
    }
    for words, x in refused.items():
        try:
            _fit("", x)
        except (ConfigError, DataError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"trained, expected: {words}")


def _pairs(rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8)
