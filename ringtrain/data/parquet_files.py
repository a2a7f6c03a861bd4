"""Parquet files, whose blocks are their row groups."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns
from ringtrain.data.data_files import DataFile
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


FOOTER = 8
"""last bytes of a file, after its metadata"""


class ParquetFiles:
    """Columns of files; a column may be a field of another one (`image.bytes`)."""

    kind = "Parquet"

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str]) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DataError("ringtrain.Records: Parquet needs pyarrow: pip install 'ringtrain[records]'") from error
        found = data_files.of_each(_opened, files)
        self._metadata = {file: metadata for file, (metadata, _) in found.items()}
        self._checksums = [checksum for _, checksum in found.values()]
        self.blocks = []
        for file, metadata in self._metadata.items():
            for number in range(metadata.num_row_groups):
                num_rows = metadata.row_group(number).num_rows
                if num_rows:
                    self.blocks.append(Block(file, number, num_rows))
        self.columns = columns
        for file, metadata in self._metadata.items():
            names = _flat(metadata.schema.to_arrow_schema().empty_table()).column_names
            missing = [name for name in columns if name not in names]
            if missing:
                raise DataError(f"{file}: has no column {missing[0]}: it has {', '.join(names)}")

    def checksum(self) -> int:
        """Checksum of the files' footers, which have size and, mostly, extremes of each column."""
        return zlib.crc32(str(self._checksums).encode())

    def read(self, block: Block) -> Columns:
        import pyarrow.parquet as pq

        # Of a file behind a URL, neighbouring columns are one request.
        options = {"pre_buffer": block.file.is_remote, "page_checksum_verification": True}

        def read(opened: IO[bytes]) -> Columns:
            with pq.ParquetFile(opened, metadata=self._metadata[block.file], **options) as parquet:
                table = _flat(parquet.read_row_group(block.number, columns=self.columns, use_threads=False))
            return {name: _values(_in_one(table.column(name)), f"{block.name}: column {name}") for name in self.columns}

        return data_files.read_file(block.file, read, f"{block.name} cannot be read")


def _opened(file: DataFile) -> tuple[Any, int]:
    """Metadata of a file, and a checksum of its footer, which is read instead of all of it."""
    import pyarrow.parquet as pq

    def read(opened: IO[bytes]) -> tuple[Any, int]:
        with pq.ParquetFile(opened) as parquet:
            metadata = parquet.metadata
        opened.seek(-metadata.serialized_size - FOOTER, os.SEEK_END)
        return metadata, zlib.crc32(opened.read())

    return data_files.read_file(file, read, f"{file}: cannot be read as Parquet")


def _flat(table: Any) -> Any:
    """A table with the fields of columns as columns of their own, such as `image.bytes`."""
    import pyarrow as pa

    while any(map(pa.types.is_struct, table.schema.types)):
        table = table.flatten()
    return table


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    """Array of a column, without a copy if it is one."""
    import pyarrow as pa

    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _values(column: pa.Array, name: str) -> NDArray[Any]:
    """Values of a column, [rows] or, of lists of one length, [rows, length]."""
    import pyarrow as pa

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
    if kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        try:
            return np.array(column.to_pylist(), object)
        except UnicodeDecodeError as error:
            raise DataError(f"{name}: is no UTF-8: {error}") from error
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    raise DataError(f"{name}: values of type {kind}, expected numbers, texts, or lists of them: convert it before")
