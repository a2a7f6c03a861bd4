"""Parquet files, whose blocks are their row groups."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

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
MAX_METADATA = 16 << 20
"""serialized bytes of the files' metadata that stay in memory, where they take 17 times as much"""


class Opened(NamedTuple):
    """Blocks and schema of a file."""

    blocks: list[Block]
    schema: Any
    checksum: int
    """of it, without reading it all"""


class ParquetFiles:
    """Columns of files, whose footers' checksum is taken: they have size and, mostly, extremes of each column.

    A column may be a field of another one (`image.bytes`).

    Args:
        columns: Names of columns; None: all.
    """

    kind = "Parquet"

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DataError("ringtrain.Records: Parquet needs pyarrow: pip install 'ringtrain[records]'") from error
        self._metadata: dict[DataFile, Any] = {}
        """of the first files, up to MAX_METADATA: to read it takes longer than to read a small block"""
        found = data_files.of_each(self._opened, files)
        num_bytes = 0
        for file in files:
            num_bytes += self._metadata[file].serialized_size
            if num_bytes > MAX_METADATA:
                del self._metadata[file]
        self.blocks = [block for one in found.values() for block in one.blocks]
        self._checksums = [one.checksum for one in found.values()]
        # A file without rows may have any types.
        types = {file: _types_of(one.schema) for file, one in found.items() if one.blocks}
        first = next(iter(types), None)
        self._types = types[first] if first else {}
        self.columns = list(self._types if columns is None else columns)
        for file, of_file in types.items():
            for name in self.columns:
                names = found[file].schema.names
                if names.count(name) > 1:
                    raise DataError(f"{file}: has column {name} twice: it has {', '.join(names)}")
                if name not in of_file:
                    raise DataError(f"{file}: has no column {name}: it has {', '.join(of_file)}")
                if _decoded(of_file[name]) != _decoded(self._types[name]):
                    raise DataError(
                        f"{file}: column {name} is {of_file[name]}, expected {self._types[name]} as in {first}"
                    )

    def _opened(self, file: DataFile) -> Opened:
        import pyarrow.parquet as pq

        def read(opened: IO[bytes]) -> tuple[Any, Any, int]:
            with pq.ParquetFile(opened) as parquet:
                metadata, schema = parquet.metadata, parquet.schema_arrow
            opened.seek(-metadata.serialized_size - FOOTER, os.SEEK_END)
            return metadata, schema, zlib.crc32(opened.read())

        metadata, schema, checksum = data_files.read_file(file, read, f"{file}: cannot be read as Parquet")
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._metadata[file] = metadata
        return Opened([Block(file, number, rows) for number, rows in enumerate(sizes) if rows], schema, checksum)

    def _table(self, block: Block, columns: Sequence[str]) -> Any:
        import pyarrow.parquet as pq

        # Of a file behind a URL, neighbouring columns are one request.
        options = {"pre_buffer": block.file.is_remote, "page_checksum_verification": True}

        def read(opened: IO[bytes]) -> Any:
            with pq.ParquetFile(opened, metadata=self._metadata.get(block.file), **options) as parquet:
                return parquet.read_row_group(block.number, columns=columns, use_threads=False)

        return data_files.read_file(block.file, read, f"{block.name} cannot be read")

    def types(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    def checksum(self) -> int:
        """Checksum of the checksums of the files."""
        return zlib.crc32(str(self._checksums).encode())

    def read(self, block: Block) -> Columns:
        values: Columns = {}
        table = self._table(block, self.columns)
        for name in self.columns:
            values[name] = _values(_column(table, name), f"{block.name}: column {name}")
        return values


def _types_of(schema: Any) -> dict[str, Any]:
    """Types of the columns of a file by name; in place of a column with fields, theirs."""
    import pyarrow as pa

    types: dict[str, Any] = {}
    for name, kind in zip(schema.names, schema.types, strict=True):
        if pa.types.is_struct(kind):
            fields = _types_of(pa.schema([kind.field(number) for number in range(kind.num_fields)]))
            types |= {f"{name}.{field}": of_field for field, of_field in fields.items()}
        else:
            types[name] = kind
    return types


def _column(table: Any, name: str) -> pa.Array:
    """A column of a table, or a field of one."""
    import pyarrow.compute as pc

    if name in table.column_names:
        return _in_one(table.column(name))
    parent = max((one for one in table.column_names if name.startswith(f"{one}.")), key=len)
    return pc.struct_field(_in_one(table.column(parent)), name.removeprefix(f"{parent}.").split("."))


def _decoded(kind: Any) -> Any:
    """Type of a column's values in NumPy: dictionaries and lists of different widths of one type are the same."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _decoded(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return "list", kind.list_size, _decoded(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "list", _decoded(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    return kind


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


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
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_binary(kind):
        try:
            return np.array(column.to_pylist(), object)
        except UnicodeDecodeError as error:
            raise DataError(f"{name}: is no UTF-8: {error}") from error
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    raise DataError(f"{name}: values of type {kind}, expected numbers, texts, or lists of them: convert it before")
