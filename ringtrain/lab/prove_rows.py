"""Keras callback that records the rows that a rank trains."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from ringtrain import hvd
from ringtrain.hvd.keras_patches import reduction_of
from ringtrain.hvd.train_step import TrainStep, has_layer, wrap
from ringtrain.protocol.env import PROVE
from ringtrain.protocol.for_script import RUN


def of_trainer() -> keras.callbacks.Callback:
    """Callback for the run of the trainer."""
    return Rows(RUN)


class Rows(keras.callbacks.Callback):
    """Writes a line per epoch with the checksums of all rows that this rank has trained, to a file of its own."""

    def __init__(self, fit: str) -> None:
        super().__init__()
        self.fit = fit
        self.seen: list[int] = []

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if not has_layer(model, "rows"):
            wrap(model, "rows", self._recorded)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        line = {"fit": self.fit, "epoch": epoch, "rows": self.seen}
        path = Path(os.environ[PROVE]) / f"{hvd.rank()}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.seen.clear()

    def _recorded(self, train_step: TrainStep) -> TrainStep:
        def recorded(batch: Any) -> Any:
            if not in_stateless_scope():  # where a step of virtual ranks computes only what divides its losses
                leaves = [leaf for leaf in tf.nest.flatten(batch) if _has_rows(leaf)]
                tf.numpy_function(self._see, [self._has_share(), *leaves], [], stateful=True)
            return train_step(batch)

        return recorded

    def _has_share(self) -> tf.Tensor:
        """Returns whether rows count: a rank without any in a batch trains one of another rank with the weight 0."""
        for optimizer in hvd.optimizers_of(self.model):
            reduction = reduction_of(optimizer)
            if reduction is not None and reduction.share is not None:
                return tf.convert_to_tensor(reduction.share) > 0
        return tf.constant(True)

    def _see(self, has_share: Any, *leaves: Any) -> None:
        if not has_share:
            return
        for row in zip(*leaves, strict=True):
            checksum = 0
            for part in row:
                checksum = zlib.crc32(_bytes_of(part), checksum)
            self.seen.append(checksum)


def _has_rows(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is an array with rows; a ragged or sparse tensor depends on the whole batch."""
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def _bytes_of(part: Any) -> bytes:
    array = np.ascontiguousarray(part)
    if array.dtype.kind == "O":  # texts
        return repr(array.tolist()).encode()
    return array.tobytes()
