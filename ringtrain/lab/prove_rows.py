"""Keras callback that records the rows that a rank trains."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from ringtrain import hvd
from ringtrain.hvd.keras_patches import layers_of, reduction_of
from ringtrain.hvd.train_step import TrainStep, has_layer, wrap
from ringtrain.protocol.env import PROVE
from ringtrain.protocol.for_script import RUN

if TYPE_CHECKING:
    from ringtrain.data import FitArguments


def observe(
    name: str, model: keras.Model, arguments: FitArguments, options: Mapping[str, Any]
) -> list[keras.callbacks.Callback]:
    """Callback for a `ringtrain.fit` of a script."""
    return [Rows(name, options)]


def of_trainer() -> keras.callbacks.Callback:
    """Callback for the run of the trainer."""
    return Rows(RUN, {})


class Rows(keras.callbacks.Callback):
    """Writes a line per epoch with the checksums of all rows that this rank has trained, to a file of its own.

    Args:
        fit: Name of the run.
        options: Of the run, to be recorded once.
    """

    def __init__(self, fit: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.fit, self.options = fit, options
        self.seen: list[int] = []

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if not has_layer(model, "rows"):
            wrap(model, "rows", self._recorded)

    def on_train_begin(self, logs: Any = None) -> None:
        narrow = [layer.name for layer in layers_of(self.model) if layer.compute_dtype != keras.config.floatx()]
        self._write({"options": dict(self.options), "narrow": narrow})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._write({"epoch": epoch, "rows": self.seen})
        self.seen.clear()

    def _recorded(self, train_step: TrainStep) -> TrainStep:
        def recorded(batch: Any) -> Any:
            if not in_stateless_scope():  # where a step of virtual ranks computes only what divides its losses
                leaves = [_dense(leaf) for leaf in tf.nest.flatten(batch) if _has_rows(leaf)]
                tf.numpy_function(self._see, [self._has_share(), *leaves], [], stateful=True)
            return train_step(batch)

        return recorded

    def _has_share(self) -> tf.Tensor:
        """Whether the rows count: a rank without rows in a batch trains one of another rank with the weight 0."""
        for optimizer in hvd.optimizers_of(self.model):
            reduction = reduction_of(optimizer)
            if reduction is not None and reduction.share is not None:
                return tf.convert_to_tensor(reduction.share) > 0
        return tf.constant(True)

    def _see(self, has_share: Any, *leaves: Any) -> None:
        for row in zip(*leaves, strict=True) if has_share else ():
            checksum = 0
            for part in row:
                checksum = zlib.crc32(_bytes_of(part), checksum)
            self.seen.append(checksum)

    def _write(self, line: dict[str, Any]) -> None:
        path = Path(os.environ[PROVE]) / f"{hvd.rank()}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"fit": self.fit, **line}) + "\n")


def _has_rows(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and bool(leaf.shape.rank)


def _dense(leaf: Any) -> Any:
    """A part of a batch as a tensor whose rows do not depend on the others: ragged ones become texts."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(leaf)
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    texts = leaf if leaf.dtype == tf.string else tf.strings.as_string(leaf)
    for axis in range(texts.shape.rank - 1, 0, -1):
        texts = tf.strings.reduce_join(texts, axis=axis, separator=" ")
    return texts


def _bytes_of(part: Any) -> bytes:
    array = np.ascontiguousarray(part)
    if array.dtype.kind != "O":
        return array.tobytes()
    parts = []
    for value in array.flat:
        parts.append(value if isinstance(value, bytes) else str(value).encode())
    return b"\0".join(parts)
