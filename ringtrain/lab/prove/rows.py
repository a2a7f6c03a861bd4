"""Keras callback that records the samples that a rank trains, and what its model has."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain import hvd
from ringtrain.hvd.keras_patches import layers_of
from ringtrain.hvd.train_step import TrainStep, has_layer, wrap
from ringtrain.protocol.env import PROVE


class Rows(keras.callbacks.Callback):
    """Writes a line per epoch with the checksums of all rows that this rank has trained, to a file of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.file = Path(os.environ[PROVE]) / f"{hvd.rank()}-{os.getpid()}.jsonl"
        self.seen: list[int] = []
        self._numbers: list[Any] | None = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if has_layer(model, "rows"):
            return
        self._numbers = _numbers(model)
        wrap(model, "rows", self._recorded)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._numbers is None:
            return
        model = self.model
        own = any(not hasattr(layer, "device_of_sums") for layer in hvd.batch_norm_layers(model))
        narrow = [layer.name for layer in layers_of(model) if layer.compute_dtype != keras.config.floatx()]
        # A GRU without dropout has a seed, and draws no numbers.
        self._write({"seeds": self._numbers != _numbers(model), "batch_norm": own, "narrow": narrow})
        self._numbers = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._write({"epoch": epoch, "rows": self.seen})
        self.seen.clear()

    def _recorded(self, train_step: TrainStep) -> TrainStep:
        def recorded(batch: Any) -> Any:
            leaves = [leaf for leaf in keras.tree.flatten(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
            tf.numpy_function(self._see, leaves, [], stateful=True)
            return train_step(batch)

        return recorded

    def _see(self, *leaves: Any) -> None:
        for row in zip(*leaves, strict=True):
            checksum = 0
            for part in row:
                checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
            self.seen.append(checksum)

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _numbers(model: keras.Model) -> list[Any]:
    """States of the seeds from which a model may draw."""
    return [np.asarray(variable.numpy()).tolist() for variable in (*hvd.seeds(model), *hvd.global_seed())]
