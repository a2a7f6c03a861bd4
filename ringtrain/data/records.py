"""Rows of Parquet and TFRecord files, which are read while they are trained."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import pipeline_graph, sharding
from ringtrain.data.arrays import NumberedRows
from ringtrain.data.block_cache import BlockCache, num_bytes
from ringtrain.data.data_files import of_each, state_of
from ringtrain.data.python_calls import of_tensorflow, weakly
from ringtrain.data.record_files import Columns, opened
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

LANES = (48, 24, 12, 6, 4, 3, 2, 1)
"""possible numbers of blocks that a batch has rows of; many numbers of ranks divide the larger ones"""
AHEAD = 16
"""batches whose blocks are read before they are trained, if they fit into a quarter of the memory"""
MEMORY_MB = 256


class Records:
    """Rows of Parquet or TFRecord files for `ringtrain.fit`, `evaluate` and `predict`. They may be larger than memory.

    Each rank reads the blocks (row groups, successive records) of its own rows. Every epoch has another order, which
    follows from the seed, the epoch and the batch size, and not from the number of ranks: blocks are shuffled, and
    their rows, and a batch has rows of `lanes` blocks. A resumed run continues within an epoch and reads nothing twice.

    Args:
        files: Path of a file, of a folder, or a pattern such as "rows/*.parquet", or several in a list. Also a URL such
            as "s3://bucket/rows" of Parquet files, for which the package of its file system is installed (s3fs).
        inputs: Column of the inputs x. A list of columns is one array with these columns; a dict, several inputs.
        target: The same for y. None: there are no targets.
        weight: Column with the weight of each row.
        transform: Function of TensorFlow, from (x,), (x, y) or (x, y, weight) of a batch to what is trained. It has no
            state, and computes each row by itself.
        features: Of TFRecords, as for `tf.io.parse_example`. None: those of the first record, with its lengths.
        memory_mb: Memory of a rank for blocks, about.

    Attributes:
        lanes: Number of blocks that are read at once, at most, by all ranks together.

    Raises:
        DataError: No files, or files that cannot be read, without a column, or with another type than the first.

    Example:
        >>> rows = ringtrain.Records("rows/*.parquet", inputs=["age", "income"], target="label")
        >>> ringtrain.fit(model, rows, batch_size=256, epochs=3)
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        inputs: Any,
        target: Any = None,
        weight: str | None = None,
        transform: Callable[..., Any] | None = None,
        features: Mapping[str, Any] | None = None,
        memory_mb: int = MEMORY_MB,
    ) -> None:
        if weight is not None and target is None:
            raise DataError("ringtrain.Records: got a weight without a target, which it would stand for: name both")
        if not memory_mb >= 1:
            raise DataError(f"ringtrain.Records: got memory_mb {memory_mb}, expected at least 1")
        self.nest = tuple(part for part in (inputs, target, weight) if part is not None)
        self.transform = transform
        self.parts = [*_parts_of(self.nest)]
        self.columns = sorted({name for part in self.parts for name in _names_in(part)})
        random_state = random.getstate()
        self.files = opened(files, self.columns, features)
        self.blocks = self.files.blocks
        self.states = of_each(state_of, (block.path for block in self.blocks))
        """size and version of each file"""
        self.starts = np.cumsum([0, *(block.num_rows for block in self.blocks)])
        # Memory follows from a block as it is read: files may be compressed.
        first = self._read(0)
        random.setstate(random_state)  # which a store's library may use when it tries again, and Keras for weights
        self.specs = [(values.dtype, values.shape[1:]) for values in first]
        """dtype of each part, and shape of its rows"""
        self.bytes_of_row = num_bytes(first) / self.blocks[0].num_rows
        max_bytes = int(memory_mb * 2**20)
        of_largest = self.bytes_of_row * max(block.num_rows for block in self.blocks)
        self.lanes = next((number for number in LANES if 2 * number * of_largest <= max_bytes), 1)
        self.cache = BlockCache(weakly(self.block), max_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cache": self.cache.max_bytes}  # of a copy: its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=BlockCache(weakly(self.block), state["cache"]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def dataset(self, batch_size: int, seed: int | None = None, epoch: int = 0) -> tf.data.Dataset:
        """Batches of all rows as a dataset, for Keras without ringtrain. Each iteration has the order of another epoch.

        Args:
            batch_size: Rows of each batch but the last.
            seed: Of the order. None: that of the files.
            epoch: That the first iteration has the order of.

        Raises:
            DataError: Of a batch size that is no positive integer.
        """
        import tensorflow as tf

        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise DataError(f"Records.dataset: got batch_size {batch_size!r}, expected an integer of at least 1")
        passes = _Passes(RecordRows(self, shuffle=seed is not None), batch_size, seed or 0, epoch)
        order_of_next = of_tensorflow(passes.order_of_next)
        num_rows, whole = len(self), len(self) // batch_size * batch_size

        def of_pass(_: tf.Tensor) -> tf.data.Dataset:  # called when an iterator is made
            order = tf.ensure_shape(tf.numpy_function(order_of_next, [], tf.int64), [num_rows])
            batches = tf.data.Dataset.from_tensor_slices(tf.reshape(order[:whole], [-1, batch_size]))
            if whole == num_rows:
                return batches
            return batches.concatenate(tf.data.Dataset.from_tensors(order[whole:]))

        numbers = tf.data.Dataset.range(1).flat_map(of_pass).map(lambda batch: (tf.constant(0, tf.int64), batch))
        batches = passes.rows.batches(numbers, batch_size, seed)
        batches = batches.apply(tf.data.experimental.assert_cardinality(-(-num_rows // batch_size))).prefetch(2)
        batches.passes = passes  # as long as the dataset lives, so do they
        return batches

    def values_of(self, numbers: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Values of each part of the nest in the rows with these numbers."""
        of_rows = np.searchsorted(self.starts, numbers, side="right") - 1
        by_block = np.argsort(of_rows, kind="stable")
        found, begins = np.unique(of_rows[by_block], return_index=True)
        blocks = self.cache.take(found.tolist())
        values = [np.empty((len(numbers), *shape), dtype) for dtype, shape in self.specs]
        for number, places in zip(found.tolist(), np.split(by_block, begins[1:]), strict=True):
            rows = numbers[places] - self.starts[number]
            for of_part, of_block in zip(values, blocks[number], strict=True):
                if len(places) == places[-1] - places[0] + 1:  # a lane's neighbouring places: one copy
                    np.take(of_block, rows, axis=0, out=of_part[places[0] : places[-1] + 1], mode="clip")
                else:
                    of_part[places] = of_block[rows]
        return values

    def block(self, number: int) -> list[NDArray[Any]]:
        """Values of each part of the nest in a block, from its file."""
        values = self._read(number)
        for part, of_part, (_, shape) in zip(self.parts, values, self.specs, strict=True):
            if of_part.shape[1:] != shape:
                raise DataError(
                    f"{self.blocks[number].name}: {part} has rows of shape {of_part.shape[1:]}, expected {shape} as in"
                    f" {self.blocks[0].path}"
                )
        return values

    def _read(self, number: int) -> list[NDArray[Any]]:
        block = self.blocks[number]
        try:
            columns = self.files.read(block)
        finally:  # a file that has changed may be read, or look damaged
            if state_of(block.path) != self.states[block.path]:
                raise DataError(f"{block.path}: has changed since it was opened")
        return [_joined(part, columns) for part in self.parts]

    def start(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Starts to read the blocks of rows; returns the rows' numbers."""
        self.cache.start(np.unique(np.searchsorted(self.starts, numbers, side="right") - 1).tolist())
        return numbers


class RecordRows(NumberedRows):
    """Rows of files as `fit` reads them.

    Args:
        class_weight: Weight by class, for one output.
    """

    kind = "records"

    def __init__(
        self, records: Records, shuffle: bool | str = False, class_weight: Mapping[int, float] | None = None
    ) -> None:
        self.records, self.shuffle, self.class_weight = records, shuffle, class_weight
        self._num_samples = len(records)

    @property
    def plan(self) -> dict[str, str]:
        records = self.records
        num_files = len({block.path for block in records.blocks})
        lanes = f", {min(records.lanes, len(records.blocks))} of them at once" if self.shuffle is True else ""
        files = f"{num_files:,} of {records.files.kind}, {len(records.blocks):,} blocks{lanes}"
        return {"files": files, "made by": "each rank, its rows alone"}

    def checksum(self) -> int:
        """Checksum of the files' names and sizes, of their own checksums, and of the first and the last row."""
        records = self.records
        files = [(path.name, size) for path, (size, _) in records.states.items()]
        blocks = [(block.path.name, block.number, block.num_rows) for block in records.blocks]
        rows = [str(values.tolist()) for values in records.values_of(np.array([0, len(records) - 1]))]
        return zlib.crc32(f"{len(self)} {records.columns} {files} {blocks} {records.files.checksum()} {rows}".encode())

    def rows(self, begin: int, end: int) -> Any:
        import tensorflow as tf

        numbers = tf.data.Dataset.from_tensors((tf.constant(0, tf.int64), np.arange(begin, end)))
        return next(iter(self.batches(numbers, end - begin, None)))

    def epoch_order(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        num_steps = len(self) // global_batch_size
        order = self.order_of_pass(global_batch_size, seed, epoch)
        return order[: num_steps * global_batch_size].reshape(num_steps, global_batch_size)

    def order_of_pass(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        if self.shuffle is not True:
            return np.arange(len(self))
        ends = np.minimum(self.records.starts, len(self))
        block_rows = [rows for rows in np.diff(ends).tolist() if rows]
        num_lanes = next(number for number in LANES if number <= min(self.records.lanes, global_batch_size))
        return sharding.lane_order(block_rows, num_lanes, global_batch_size, seed, epoch)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        import keras
        import tensorflow as tf

        records, specs = self.records, self.records.specs
        dtypes = [tf.string if dtype.kind == "O" else tf.as_dtype(dtype) for dtype, _ in specs]
        start, values_of = of_tensorflow(records.start), of_tensorflow(records.values_of)

        def started(epoch: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(start, [numbers], tf.int64), numbers.shape)

        def read(numbers: tf.Tensor) -> Any:
            found = tf.nest.flatten(tf.numpy_function(values_of, [numbers], dtypes))
            shapes = [[*numbers.shape, *shape] for _, shape in specs]
            values = iter([tf.ensure_shape(one, shape) for one, shape in zip(found, shapes, strict=True)])
            return keras.tree.lists_to_tuples(tuple(_filled(part, values) for part in nest))

        nest = records.nest
        in_memory = int(records.cache.max_bytes / 4 / (records.bytes_of_row * batch_size))
        batches = order.map(started).prefetch(min(AHEAD, max(1, in_memory))).map(read)
        batches.records = records  # as long as the dataset lives, so do they
        if records.transform:
            batches = batches.map(records.transform)
            state = pipeline_graph.state_of(batches._map_func.function)
            if state:
                raise DataError(
                    f"ringtrain.Records: transform has {state}, which would depend on the number of ranks: use"
                    f" operations without a state, such as tf.random.stateless_uniform with a seed from the row"
                )
        if self.class_weight:
            from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

            batches = batches.map(make_class_weight_map_fn(self.class_weight))
        return batches


class _Passes:
    """Orders of successive passes over the rows."""

    def __init__(self, rows: RecordRows, batch_size: int, seed: int, epoch: int) -> None:
        self.rows, self._how, self._epochs = rows, (batch_size, seed), itertools.count(epoch)

    def order_of_next(self) -> NDArray[np.int64]:
        return self.rows.order_of_pass(*self._how, next(self._epochs))


def _parts_of(nest: Any) -> Iterator[Any]:
    """Names of columns, and lists of them, in a nest of dicts and tuples."""
    if nest and isinstance(nest, Mapping | tuple):
        for part in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _parts_of(part)
        return
    names = _names_in(nest)
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"ringtrain.Records: got {nest!r} in inputs or target, expected names of columns")
    yield nest


def _names_in(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part]


def _filled(nest: Any, values: Iterator[Any]) -> Any:
    """The nest with the next value in place of each of its parts."""
    if isinstance(nest, Mapping):
        return {name: _filled(part, values) for name, part in nest.items()}
    return tuple(_filled(part, values) for part in nest) if isinstance(nest, tuple) else next(values)


def _joined(part: Any, columns: Columns) -> NDArray[Any]:
    """Values of a column; of a list of columns, one array with all of them. In the dtype of a model's inputs."""
    import keras

    values = [columns[name] for name in _names_in(part)]
    joined = values[0]
    if isinstance(part, list):
        joined = np.concatenate([one if one.ndim > 1 else one[:, None] for one in values], -1)
    return joined.astype(keras.config.floatx()) if joined.dtype.kind == "f" else joined
