"""Parquet and TFRecord files: their blocks of rows, and the columns of one block.

A block is what is read at once: a row group of a Parquet file, or successive records of a TFRecord file.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import data_files, tfrecords
from ringtrain.data.data_files import File, Remote
from ringtrain.data.image_files import Unreadable
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET, GZIP = b"PAR1", b"\x1f\x8b"
"""first bytes of a Parquet file, and of a compressed one"""
FOOTER = 8
"""last bytes of a Parquet file, after its metadata"""
RECORDS_OF_BLOCK, BYTES_OF_BLOCK = 4096, 8 << 20
"""limits of a block of TFRecords"""
MAX_METADATA = 64 << 20
"""bytes of the files' metadata that stay in memory"""
BUFFER = 1 << 20
"""bytes that TensorFlow reads at once"""
Columns = dict[str, NDArray[Any]]
"""Values of a block by column, [rows, ...]."""


class Block(NamedTuple):
    """Successive rows of a file."""

    path: File
    number: int
    """of the row group, or of the first record"""
    start: int
    """of the first record, in bytes; -1: a row group"""
    num_rows: int

    @property
    def name(self) -> str:
        """How messages name it."""
        part = f"records from {self.number} on" if self.start >= 0 else f"row group {self.number}"
        return f"{self.path}: {part}"


class ParquetFiles:
    """Columns of Parquet files; blocks are their row groups."""

    kind = "Parquet"

    def __init__(self, paths: Sequence[File], columns: Sequence[str]) -> None:
        self.columns = columns
        self._metadata: dict[File, Any] = {}
        """of the first files, up to MAX_METADATA: to read it takes longer than to read a small block"""
        opened_files = data_files.of_each(self._opened, paths)
        of_files = [opened_files[path] for path in paths]
        num_bytes = 0
        for path in dict.fromkeys(paths):
            num_bytes += self._metadata[path].serialized_size
            if num_bytes > MAX_METADATA:
                del self._metadata[path]
        self.blocks = [block for blocks, _, _ in of_files for block in blocks]
        self._checksums = [checksum for _, _, checksum in of_files]
        # A file without rows may have any types.
        schemas = [(blocks[0].path, schema) for blocks, schema, _ in of_files if blocks]
        for path, schema in schemas:
            first, expected = schemas[0]
            for name in columns:
                if _decoded(schema[name]) != _decoded(expected[name]):
                    raise DataError(f"{path}: column {name} is {schema[name]}, expected {expected[name]} as in {first}")

    def _opened(self, path: File) -> tuple[list[Block], dict[str, Any], int]:
        """Blocks of a file, the types of its columns, and a checksum of its footer."""
        import pyarrow.parquet as pq

        def read() -> tuple[Any, Any, int]:
            with data_files.open_file(path) as file:
                with pq.ParquetFile(file) as parquet:
                    metadata, types = parquet.metadata, parquet.schema_arrow
                file.seek(-metadata.serialized_size - FOOTER, os.SEEK_END)
                return metadata, types, zlib.crc32(file.read())

        metadata, types, checksum = data_files.with_retries(read, path, f"{path}: cannot be read as Parquet")
        missing = [name for name in self.columns if name not in types.names]
        if missing:
            raise DataError(f"{path}: has no column {missing[0]}: it has {', '.join(types.names)}")
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        blocks = [Block(path, number, -1, num_rows) for number, num_rows in enumerate(sizes) if num_rows]
        self._metadata[path] = metadata
        return blocks, {name: types.field(name).type for name in self.columns}, checksum

    def checksum(self) -> int:
        """Checksum of the files' footers, which have size and, mostly, extremes of each column in each block."""
        return zlib.crc32(str(self._checksums).encode())

    def read(self, block: Block) -> Columns:
        """Values of a block.

        Raises:
            DataError: The file is damaged, or a value is missing.
        """
        import pyarrow.parquet as pq

        # Of a file behind a URL, neighbouring columns are one request.
        options = {"pre_buffer": isinstance(block.path, Remote), "page_checksum_verification": True}

        def read() -> Any:
            with (
                data_files.open_file(block.path) as file,
                pq.ParquetFile(file, metadata=self._metadata.get(block.path), **options) as parquet,
            ):
                return parquet.read_row_group(block.number, columns=list(self.columns), use_threads=False)

        table = data_files.with_retries(read, block.path, f"{block.name} cannot be read")
        return {
            name: _values(table.column(name).combine_chunks(), f"{block.name}: column {name}") for name in self.columns
        }


def _decoded(kind: Any) -> Any:
    """Type of a column's values in NumPy: dictionaries and lists of different widths of one type are the same."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _decoded(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return "list", kind.list_size, _decoded(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "list", _decoded(kind.value_type)
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else kind


def _values(column: pa.Array, name: str) -> NDArray[Any]:
    """Values of a column, [rows] or, of lists of one length, [rows, length]."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if column.null_count:
        raise DataError(f"{name}: {column.null_count} of {len(column)} values are null: fill them in before")
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _values(column.dictionary_decode(), name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inside = _values(column.flatten(), name)
        length = len(inside) // len(column)
        if not pa.types.is_fixed_size_list(kind) and (np.diff(column.offsets) != length).any():
            raise DataError(f"{name}: lists of several lengths, expected one: pad them before")
        return inside.reshape(len(column), length, *inside.shape[1:])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return np.array(column.to_pylist(), object)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    raise DataError(f"{name}: values of type {kind}, expected numbers, texts, or lists of them: convert it before")


class RecordFiles:
    """Features of `tf.train.Example`s in TFRecord files; blocks are successive records.

    Args:
        features: As for `tf.io.parse_example`; None: those of the first record.
    """

    kind = "TFRecord"

    def __init__(self, paths: Sequence[File], columns: Sequence[str], features: Mapping[str, Any] | None) -> None:
        import tensorflow as tf

        local = [path for path in paths if isinstance(path, Path)]
        if len(local) < len(paths):
            remote = next(path for path in paths if isinstance(path, Remote))
            raise DataError(f"{remote}: is no Parquet file, and others are read from local or mounted paths alone")
        local = [path for path in local if data_files.state_of(path)[0]]
        damaged = _Damaged(skip=False)
        scanned = data_files.of_each(lambda path: tfrecords.starts_and_checksum(path, damaged), local)
        of_files = [scanned[path] for path in local]
        self._checksums = [checksum for _, checksum in of_files]
        starts = [starts for starts, _ in of_files]
        self.blocks = [block for path, of_file in zip(local, starts, strict=True) for block in _blocks(path, of_file)]
        if not self.blocks:
            return
        known = dict(features) if features else _features_of(self.blocks[0])
        missing = [name for name in columns if name not in known]
        if missing:
            raise DataError(f"{paths[0]}: has no feature {missing[0]}: it has {', '.join(sorted(known))}")
        self.features = {name: known[name] for name in columns}
        for name, feature in self.features.items():
            if not isinstance(feature, tf.io.FixedLenFeature):
                raise DataError(f"ringtrain.Records: feature {name} is {feature}, expected a FixedLenFeature")

    def checksum(self) -> int:
        """Checksum of the checksums that the files have of their records."""
        found = zlib.crc32(str(self._checksums).encode())
        for path in dict.fromkeys(block.path for block in self.blocks):
            with data_files.open_file(path) as file:
                file.seek(-tfrecords.FOOTER, os.SEEK_END)
                found = zlib.crc32(file.read(), found)
        return found

    def read(self, block: Block) -> Columns:
        """Values of a block.

        Raises:
            DataError: The file is damaged, or a record has other features.
        """
        import tensorflow as tf

        try:
            with tf.device("CPU"):
                values = tf.io.parse_example(_texts(block), self.features)
        except tf.errors.OpError as error:
            raise DataError(f"{block.name} cannot be read: {_in_one_line(error)}") from error
        return {name: value.numpy() for name, value in values.items()}


class _Damaged(Unreadable):
    def add(self, name: str, problem: str) -> None:
        raise DataError(f"{name}: {problem}")


def _blocks(path: Path, starts: NDArray[np.int64]) -> list[Block]:
    """Blocks of a file with records at these positions."""
    end = path.stat().st_size
    positions = [*starts.tolist(), end]
    blocks, first = [], 0
    for number in range(1, len(positions)):
        is_full = number - first == RECORDS_OF_BLOCK or positions[number] - positions[first] >= BYTES_OF_BLOCK
        if is_full or number == len(positions) - 1:
            blocks.append(Block(path, first, positions[first], number - first))
            first = number
    return blocks


def _texts(block: Block) -> Any:
    """Serialized records of a block, string [rows]; their checksums are compared."""
    import tensorflow as tf

    position = tf.data.Dataset.from_tensors((str(block.path), tf.constant(block.start, tf.int64)))
    records = position.flat_map(lambda path, start: tfrecords.records(path, start, block.num_rows, BUFFER))
    return next(iter(records.batch(block.num_rows)))


def _features_of(block: Block) -> dict[str, Any]:
    """Features of the first record, with its lengths."""
    import tensorflow as tf

    dtypes = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}
    try:
        example = tf.train.Example.FromString(_texts(block._replace(num_rows=1))[0].numpy())
    except Exception as error:  # of protobuf or TensorFlow
        raise DataError(f"{block.name} cannot be read as tf.train.Example: {_in_one_line(error)}") from error
    features = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind:
            length = len(getattr(feature, kind).value)
            features[name] = tf.io.FixedLenFeature([] if length == 1 else [length], dtypes[kind])
    return features


def opened(
    files: str | Path | Sequence[str | Path], columns: Sequence[str], features: Mapping[str, Any] | None
) -> ParquetFiles | RecordFiles:
    """Opens files of one kind, which their first bytes tell.

    Raises:
        DataError: They cannot be read, or have no rows.
    """
    paths = data_files.files_of(files)
    begins = data_files.of_each(lambda path: data_files.first_bytes(path, len(PARQUET)), paths)
    compressed = [path for path in paths if begins[path].startswith(GZIP)]
    if compressed:
        raise DataError(f"{compressed[0]}: is compressed with gzip: write it without")
    are_parquet = {path: begins[path] == PARQUET for path in paths}
    if len({*are_parquet.values()}) > 1:
        empty = [path for path in paths if not begins[path]]
        if empty:
            raise DataError(f"{empty[0]}: is empty, which no Parquet file is")
        other = next(path for path in paths if are_parquet[path] != are_parquet[paths[0]])
        raise DataError(f"ringtrain.Records: {paths[0]} and {other} are not of one kind: expected Parquet or TFRecord")
    found: ParquetFiles | RecordFiles
    if are_parquet[paths[0]]:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DataError("ringtrain.Records: Parquet needs pyarrow: pip install 'ringtrain[records]'") from error
        found = ParquetFiles(paths, columns)
    else:
        found = RecordFiles(paths, columns, features)
    if not found.blocks:
        raise DataError(f"ringtrain.Records: no row in {len(paths)} files, expected at least one: {paths[0]}")
    return found


def _in_one_line(error: Any) -> str:
    """Text of an error, without the names of TensorFlow's operations."""
    text = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", " ".join(str(error).split()))
    return text[:300]
