"""Rows of files, which are read while they are trained."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from numpy.typing import NDArray

from ringtrain.data import augment, division
from ringtrain.data.arrays import NumberedRows, RowNumbers
from ringtrain.data.blocks import BlockCache, Columns, num_bytes, text_of
from ringtrain.data.data_files import files_of
from ringtrain.data.parts import Parts
from ringtrain.data.python_calls import of_tensorflow, rows_of, tensors_of, weakly
from ringtrain.data.record_files import opened
from ringtrain.data.row_order import Order, lane_order
from ringtrain.errors import DataError
from ringtrain.protocol import cores

LANES = (48, 24, 12, 6, 4, 3, 2, 1)
"""possible numbers of blocks that a batch has rows of; many numbers of ranks divide the larger ones"""
AHEAD = 16
"""batches whose blocks are read before they are trained, if they fit into a quarter of the memory"""
MEMORY_MB = 256
MAX_THREADS = 4
"""batches that are transformed at once"""


class Records:
    """Rows of files for `ringtrain.fit`, `evaluate` and `predict`. They may be larger than memory.

    Files are Parquet, TFRecord, or images in a folder per class. Each rank reads the
    blocks (row groups, successive records, or an image) of its own rows. Every epoch has another order, which depends
    on seed, epoch, batch size and `memory_mb`, and not on the number of ranks: blocks are shuffled, and their rows, and
    a batch has rows of `lanes` blocks. A resumed run continues within an epoch and trains no row twice.

    Args:
        files: Path of a file, of a folder, or a pattern such as "rows/*.parquet", or several in a list. Also a URL such
            as "s3://bucket/rows", for which the package of its file system is installed (s3fs).
        inputs: Column of the inputs x: of images, "image", "class" or "path".
            A list of columns is one array with these columns; a dict, several inputs.
        target: The same for y. None: there are no targets.
        weight: Column with the weight of each row.
        transform: Function of TensorFlow, from (x,), (x, y) or (x, y, weight) of a batch to what is trained. It has no
            state, and computes each row by itself.
        memory_mb: Memory of a rank for blocks, about.
        class_names: Of images: names of all folders, whose places are the classes. None: those of the files, sorted.

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
        memory_mb: int = MEMORY_MB,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if weight is not None and target is None:
            raise DataError("ringtrain.Records: got a weight without a target, which it would stand for: name both")
        if not 1 <= memory_mb < math.inf:
            raise DataError(f"ringtrain.Records: got memory_mb {memory_mb}, expected at least 1")
        self.nest = tuple(part for part in (inputs, target, weight) if part is not None)
        self.transform = transform
        self.parts = [*_parts_of(self.nest)]
        self.columns = sorted({name for part in self.parts for name in _names_in(part)})
        self.files = opened(files_of(files), self.columns, class_names)
        self.blocks = self.files.blocks
        values = self._read(0)
        self.starts = np.cumsum([0, *(block.num_rows for block in self.blocks)])
        # Memory follows from a block as it is read: files may be compressed.
        self.specs = [(array.dtype, array.shape[1:]) for array in values]
        """dtype of each part, and shape of its rows"""
        self.bytes_of_row = max(1, num_bytes(values) / self.blocks[0].num_rows)
        self.max_bytes = int(memory_mb * 2**20)
        sizes = [block.end - block.begin or block.num_rows for block in self.blocks]
        of_size = max(1, num_bytes(values)) / sizes[0]
        self.lanes = next((number for number in LANES if 2 * number * of_size * max(sizes) <= self.max_bytes), 1)
        max_blocks = int(self.max_bytes / of_size / np.mean(sizes))
        self.cache = BlockCache(weakly(self.block), max_blocks)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def class_names(self) -> list[str] | None:
        """Names of the folders of images, whose places are the classes; None: of other files."""
        return getattr(self.files, "class_names", None)

    def dataset(self, batch_size: int, seed: int | None = None, epoch: int = 0) -> tf.data.Dataset:
        """Batches of all rows as a dataset, for Keras without ringtrain. Each iteration has the order of another epoch.

        Args:
            batch_size: Rows of each batch but the last.
            seed: Of the order. None: that of the files.
            epoch: That the first iteration has the order of.

        Raises:
            DataError: Of a batch size that is no positive integer.
        """
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise DataError(f"Records.dataset: got batch_size {batch_size!r}, expected an integer of at least 1")
        rows = RecordRows(self, shuffle=seed is not None)
        passes = RowNumbers(rows, batch_size, Parts.of_rank(0, 1), seed or 0)
        passes.position = epoch * passes.num_steps, (epoch + 1) * passes.num_steps
        passes.moves_on = True
        batches = rows.batches(passes.batches(None if passes.rest else batch_size), batch_size, seed)
        batches = batches.apply(tf.data.experimental.assert_cardinality(passes.num_steps)).prefetch(2)
        return batches

    def values_of(self, numbers: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Values of each part of the nest in the rows with these numbers."""
        of_rows = self._blocks_of(numbers)
        by_block = np.argsort(of_rows, kind="stable")
        found, begins = np.unique(of_rows[by_block], return_index=True)
        blocks = self.cache.take(found.tolist())
        values = [np.empty((len(numbers), *shape), dtype) for dtype, shape in self.specs]
        for number, places in zip(found.tolist(), np.split(by_block, begins[1:]), strict=True):
            rows = numbers[places] - self.starts[number]
            for of_part, of_block in zip(values, blocks[number], strict=True):
                of_part[places] = of_block[rows]
        return values

    def nested(self, values: Sequence[Any]) -> Any:
        """Values of each part of the nest, in it."""
        each = iter(values)
        return keras.tree.lists_to_tuples(tuple(_filled(part, each) for part in self.nest))

    def name_of(self, number: int) -> str:
        """Name of a row in messages."""
        block = int(self._blocks_of(np.array(number)))
        return self.blocks[block].name_of(number - self.starts[block])

    def _blocks_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def block(self, number: int) -> list[NDArray[Any]]:
        """Values of each part of the nest in a block, from its file."""
        values = self._read(number)
        for part, of_part, (dtype, shape) in zip(self.parts, values, self.specs, strict=True):
            if of_part.shape[1:] != shape or of_part.dtype != dtype:
                raise DataError(
                    f"{self.blocks[number].name}: {part} has rows of shape {of_part.shape[1:]} and {of_part.dtype},"
                    f" expected {shape} and {dtype} as in {self.blocks[0].file}"
                )
        return values

    def _read(self, number: int) -> list[NDArray[Any]]:
        columns = self.files.read(self.blocks[number])
        return [_joined(part, columns) for part in self.parts]

    def start(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Starts to read the blocks of rows; returns the rows' numbers."""
        self.cache.start(set(self._blocks_of(numbers).tolist()))
        return numbers


class RecordRows(NumberedRows):
    """Rows of files as `fit` reads them; `transform` is applied after that of the records."""

    kind = "records"
    is_in_memory = False

    def __init__(
        self,
        records: Records,
        shuffle: bool = False,
        class_weight: Mapping[int, float] | None = None,
        transform: augment.Transform | None = None,
    ) -> None:
        self.records, self.shuffle, self.class_weight, self.transform = records, shuffle, class_weight, transform
        self._num_samples = len(records)

    @property
    def plan(self) -> dict[str, str]:
        records = self.records
        num_files = len({block.file for block in records.blocks})
        lanes = ""
        if self.shuffle:
            lanes = f", {min(records.lanes, len(records.blocks))} of them at once"
        files = f"{num_files:,} of {records.files.kind}, {len(records.blocks):,} blocks{lanes}"
        return {"files": files, "made by": "each rank, its rows alone"}

    def checksum(self) -> int:
        """Checksum of what the order follows from, of the files' names and checksums, and of the first and last row."""
        records = self.records
        blocks = [(block.file.name, block.file.size, block.number, block.num_rows) for block in records.blocks]
        rows = [str(values.tolist()) for values in records.values_of(np.array([0, len(records) - 1]))]
        text = f"{len(self)} {records.columns} {records.lanes} {blocks} {records.files.checksum()} {rows}"
        return zlib.crc32(text.encode(errors="surrogateescape"))

    def _shuffled(self, global_batch_size: int, seed: int, epoch: int) -> Order:
        ends = np.minimum(self.records.starts, len(self))
        num_lanes = next(number for number in LANES if number <= min(self.records.lanes, global_batch_size))
        return lane_order(np.diff(ends), num_lanes, global_batch_size, seed, epoch)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        records = self.records
        of_rows = self._read(order, batch_size, seed)
        batches = of_rows.map(lambda draw, numbers, batch: batch)
        if records.transform:
            state = division.state_of(batches.map(records.transform)._map_func.function)
            if state:
                raise DataError(
                    f"ringtrain.Records: transform has {state}, which would depend on the number of ranks: use"
                    f" operations without a state, such as tf.random.stateless_uniform with a seed from the row"
                )
        if records.transform or self.transform:
            batches = self._transformed(of_rows)
        if self.class_weight:
            batches = batches.map(make_class_weight_map_fn(self.class_weight))
        return batches

    def _read(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        """Batches of rows: what random numbers follow from, the numbers of the rows, and their values."""
        records = self.records
        start = of_tensorflow(records.start)
        num_ahead = max(1, min(AHEAD, int(records.max_bytes / 4 / records.bytes_of_row / batch_size)))

        def started(epoch: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return epoch, tf.ensure_shape(tf.numpy_function(start, [numbers], tf.int64), numbers.shape)

        def read(epoch: tf.Tensor, numbers: tf.Tensor) -> Any:
            draw = tf.zeros([0], tf.int64) if seed is None else tf.stack([tf.constant(seed, tf.int64), epoch])
            return draw, numbers, records.nested(rows_of(records.values_of, numbers, records.specs))

        of_rows = order.map(started).prefetch(num_ahead).map(read)
        of_rows.record_rows = self  # as long as the dataset lives, so do they
        return of_rows

    def _made(self, draw: Any, numbers: Any, batch: Any) -> Any:
        """What is made of a batch of rows with these numbers. `draw`: of random numbers, or empty."""
        if self.records.transform:
            batch = self.records.transform(*batch)
        if self.transform:
            batch = self.transform(batch, numbers, draw if draw.shape[0] else None)
        return batch

    def _check(self, draw: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Returns the numbers of rows of which a batch is made; raises DataError for the first that fails by itself."""
        records = self.records
        for number in numbers.tolist():
            row = np.array([number])
            batch = records.nested([tf.constant(values) for values in records.values_of(row)])
            try:
                with tf.device("CPU"):  # leaves GPU memory to the model
                    self._made(draw, row, batch)
            except (tf.errors.OpError, ValueError, TypeError) as error:
                transform = "transform fails: " if records.transform else ""
                raise DataError(f"{records.name_of(number)}: {transform}{text_of(error)}") from error
        return [numbers]

    def _transformed(self, of_rows: tf.data.Dataset) -> tf.data.Dataset:
        """Transformed batches. Of one that cannot be made, the rows are tried one by one."""

        def checked(draw: tf.Tensor, numbers: tf.Tensor, batch: Any) -> Any:
            (same,) = tensors_of(self._check, [draw, numbers], [tf.int64])
            return draw, tf.ensure_shape(same, numbers.shape), batch

        def transformed(draw: tf.Tensor, numbers: tf.Tensor, batch: Any) -> tf.data.Dataset:
            given = tf.data.Dataset.from_tensors((draw, numbers, batch))
            return given.map(self._made).ignore_errors().concatenate(given.map(checked).map(self._made)).take(1)

        # Several at once, each of which is one batch: to decode images takes longer than to train with them.
        threads = min(cores.num_threads(tf.config.threading.get_intra_op_parallelism_threads()), MAX_THREADS)
        return of_rows.interleave(transformed, threads, num_parallel_calls=threads, deterministic=True)


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
    if isinstance(nest, tuple):
        return tuple(_filled(part, values) for part in nest)
    return next(values)


def _joined(part: Any, columns: Columns) -> NDArray[Any]:
    """Values of a column; of a list of columns, one array with all of them. In the dtype of a model's inputs."""
    values = [columns[name] for name in _names_in(part)]
    joined = values[0]
    if isinstance(part, list):
        matrices = []
        for column in values:
            if column.ndim == 1:
                column = column[:, None]
            matrices.append(column)
        if len({(matrix.dtype.kind == "O", matrix.shape[1:-1]) for matrix in matrices}) > 1:
            raise DataError(f"ringtrain.Records: columns {', '.join(part)} cannot be one array: name them in a dict")
        joined = np.concatenate(matrices, -1)
    if joined.dtype.kind == "f":
        return joined.astype(keras.config.floatx(), copy=False)
    return joined
