"""Arguments of `ringtrain.fit`, which the function that `data.name` names may also return."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import array_data_adapter
from keras.utils import unpack_x_y_sample_weight

from ringtrain.data.from_rank_0 import FromRank0
from ringtrain.data.records import Records
from ringtrain.errors import DataError

BATCH_SIZE = 32
"""of arrays, as in Keras, if nothing else says how many rows a batch has"""


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """Arguments of `ringtrain.fit`, which describes them."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: str | int = "auto"
    callbacks: Sequence[keras.callbacks.Callback] = ()
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Collection[int] = 1
    batch_per_rank: bool = False
    seed: int = 0
    resume: str = "auto"
    max_steps: int = 0
    """of an epoch, which has the data's first rows then; 0: all. Set by a command that starts the script"""

    @property
    def num_epochs(self) -> int:
        """Number of epochs that are trained, those before a resume included."""
        return self.epochs - self.initial_epoch


def with_batch_sizes(given: FitArguments) -> FitArguments:
    """Arguments with the batch sizes that Keras takes for arrays if only a number of steps is given."""
    if given.batch_size is not None or given.batch_per_rank:
        return given
    batch_size, held_out_size = given.batch_size, given.validation_batch_size
    num_trained, num_held_out = _num_rows(given.x), 0
    if isinstance(given.validation_data, tuple | list):
        num_held_out = _num_rows(unpack_x_y_sample_weight(given.validation_data)[0])
    elif given.validation_split:
        num_rows = num_trained
        num_trained = math.floor(num_rows * (1.0 - given.validation_split))
        num_held_out = num_rows - num_trained
    if given.steps_per_epoch and num_trained:
        batch_size = math.ceil(num_trained / given.steps_per_epoch)
    if num_held_out and held_out_size is None:
        held_out_size = math.ceil(num_held_out / given.validation_steps) if given.validation_steps else BATCH_SIZE
    return replace(given, batch_size=batch_size, validation_batch_size=held_out_size)


def _num_rows(x: Any) -> int:
    """Number of rows of arrays; 0 for anything else."""
    if x is None or not array_data_adapter.can_convert_arrays(x):
        return 0
    shape = getattr(keras.tree.flatten(x)[0], "shape", ())
    return int(shape[0]) if shape else 0


OF_DATA = (
    "x",
    "y",
    "sample_weight",
    "validation_data",
    "validation_split",
    "class_weight",
    "shuffle",
    "steps_per_epoch",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
)
"""Arguments of `fit` that the function of `data.name` may return in a dict."""


def arguments_of(name: str, result: Any) -> FitArguments:
    """Converts the result of the function `name`, in one of the forms that the error names, to arguments of `fit`."""
    if isinstance(result, dict):
        if "x" not in result or not set(result) <= set(OF_DATA):
            raise DataError(
                f"{name}: returned a dict with {', '.join(map(str, result)) or 'nothing'}, expected arguments of fit,"
                f" x and some of {', '.join(OF_DATA[1:])}: batch_size and epochs are train.batch_size and train.epochs"
            )
        if callable(result["x"]):
            raise DataError(f"{name}: x is a function: only a script with ringtrain.fit can pass one")
        return FitArguments(**result)
    if is_batches(result):
        return FitArguments(x=result)
    if isinstance(result, tuple | list) and len(result) == 2:
        train, held_out = result
        if is_batches(train):
            return FitArguments(x=train, validation_data=held_out)
        if not isinstance(train, tuple | list):
            return FitArguments(x=train, y=held_out)
        if len(train) in (2, 3) and (held_out is None or isinstance(held_out, tuple | list)):
            held_out = None if held_out is None else tuple(held_out)
            return FitArguments(**dict(zip(("x", "y", "sample_weight"), train, strict=False)), validation_data=held_out)
    raise DataError(
        f"{name}: returned {type(result).__name__}, expected (x, y), ((x, y), (validation x, validation y)), batches"
        f" (tf.data.Dataset, PyDataset, generator), (batches, validation batches), or a dict of arguments of fit"
    )


def is_batches(x: Any) -> bool:
    return isinstance(x, tf.data.Dataset | keras.utils.PyDataset | GeneratorType | FromRank0 | Records)


def is_nest(part: Any) -> bool:
    """Returns whether inputs or targets are several arrays, in a dict, tuple or list, rather than one or its values."""
    return isinstance(part, dict | tuple) or (isinstance(part, list) and any(hasattr(leaf, "shape") for leaf in part))
