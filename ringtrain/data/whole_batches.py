"""Whole batches that one rank evaluates, of data as Keras' `evaluate` and `predict` take them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.arrays import Arrays, NumberedRows
from ringtrain.data.dataset import ahead, evaluation_batches
from ringtrain.data.parts import fingerprint
from ringtrain.data.records import RecordRows, Records
from ringtrain.data.streams import PyDatasetStream
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(kw_only=True)
class WholeBatches:
    """Batches of one rank."""

    dataset: tf.data.Dataset
    num_batches: int | None = None
    """None: unknown before they are read"""
    checksum: int = 0
    """of the data, which all ranks must have alike"""
    rows: NumberedRows | None = None
    """of which these are batches"""
    is_shard: bool = False
    """whether these are batches of data that this rank alone has"""
    read: dict[int, int] = field(default_factory=dict)
    """fingerprint, by number, of each batch of all ranks that this rank has read, where it reads those of all"""


def whole_batches(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None, rank: int, size: int, per_call: int
) -> WholeBatches:
    """Returns the batches of a rank: call i of Keras' function, of `per_call` batches, is that of rank i % size.

    Each batch is one that a single process has. Arrays and a finite PyDataset are read by number; of other data, each
    rank reads all batches.

    Args:
        x, y, sample_weight: As in `keras.Model.evaluate`.
        batch_size: Rows of a batch of arrays; None: as many as make `steps` batches of them, or 32.
        steps: Batches of all ranks; None: all. As in Keras, the last call is a whole one.

    Raises:
        DataError: The data have no batches, or no end.
    """
    import keras
    from keras.src.trainers.data_adapters import array_data_adapter

    x, y = _with_text_tensors(x), _with_text_tensors(y)
    if array_data_adapter.can_convert_arrays((x, y, sample_weight)):
        rows = Arrays(x, y, sample_weight)
        if not batch_size and steps:
            batch_size = max(1, math.ceil(len(rows) / steps))
        return _of_rows(rows, batch_size or 32, _whole_calls(steps, per_call), rank, size, per_call)
    steps = _whole_calls(steps, per_call)
    if isinstance(x, Records) and y is None and sample_weight is None:
        return _of_rows(RecordRows(x), batch_size or 32, steps, rank, size, per_call)
    has_targets = y is not None or sample_weight is not None
    if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None and not has_targets:
        stream = PyDatasetStream(x, None, False, 0, steps)
        stream.is_held_out = True
        numbers = _numbers_of_rank(stream.num_batches, rank, size, per_call)
        dataset = _with_length(stream.part(numbers.tolist()), len(numbers))
        return WholeBatches(dataset=ahead(dataset), num_batches=len(numbers), checksum=stream.checksum())
    return _of_stream(x, y, sample_weight, steps, rank, size, per_call)


def _with_text_tensors(values: Any) -> Any:
    """A nest with tensors in place of NumPy's texts and of lists of texts, which the tasks of KerasHub take."""
    import keras
    import tensorflow as tf

    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return tf.constant(values)

    def of_leaf(leaf: Any) -> Any:
        return tf.constant(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "US" else leaf

    return keras.tree.map_structure(of_leaf, values)


def _whole_calls(steps: int | None, per_call: int) -> int | None:
    """Steps of as many whole calls of Keras' function."""
    return steps and math.ceil(steps / per_call) * per_call


def no_batches(spec: Any) -> WholeBatches:
    """Batches of a rank that has none, of these shapes and types."""
    import tensorflow as tf

    return WholeBatches(dataset=tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec))


def _of_rows(
    rows: NumberedRows, batch_size: int, steps: int | None, rank: int, size: int, per_call: int
) -> WholeBatches:
    if steps:
        rows = rows.first(steps * batch_size)
    if not len(rows):
        raise DataError("ringtrain.fit: got arrays without rows, expected at least one")
    numbers = _numbers_of_rank(math.ceil(len(rows) / batch_size), rank, size, per_call)
    return WholeBatches(
        dataset=evaluation_batches(rows, range(len(rows)), batch_size, numbers),
        num_batches=len(numbers),
        checksum=rows.checksum(),
        rows=rows,
    )


def _of_stream(
    x: Any, y: Any, sample_weight: Any, steps: int | None, rank: int, size: int, per_call: int
) -> WholeBatches:
    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters import get_data_adapter

    dataset = get_data_adapter(x, y, sample_weight).get_tf_dataset()
    is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    if not steps and (is_endless or isinstance(x, keras.utils.PyDataset)):
        raise DataError(f"ringtrain.fit: got a {type(x).__name__} without an end, expected steps with it")
    if steps:
        dataset = dataset.take(steps)
    length = int(dataset.cardinality())
    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if spec is not None]
    facts = f"{length} {[(spec.dtype, spec.shape) for spec in specs]}"
    result = WholeBatches(dataset=dataset, checksum=zlib.crc32(facts.encode()))

    def note(number: NDArray[Any], content: NDArray[Any]) -> NDArray[Any]:
        result.read.setdefault(int(number), int(content))
        return number

    def noted(number: Any, batch: Any) -> Any:
        content = fingerprint(batch)
        return tf.ensure_shape(tf.numpy_function(note, [number, content], tf.int64), []), batch

    own = dataset.enumerate().map(noted).filter(lambda number, batch: number // per_call % size == rank)
    own = own.map(lambda number, batch: batch)
    if length >= 0:
        result.num_batches = len(_numbers_of_rank(length, rank, size, per_call))
        own = _with_length(own, result.num_batches)
    result.dataset = ahead(own)
    return result


def _with_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    import tensorflow as tf

    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def _numbers_of_rank(num: int, rank: int, size: int, per_call: int) -> NDArray[np.int64]:
    """Numbers below `num` that are in a rank's calls, of `per_call` each."""
    numbers = np.arange(num, dtype=np.int64)
    return numbers[numbers // per_call % size == rank]
