"""Files with typed columns, which pyarrow reads."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns
from ringtrain.data.data_files import DataFile
from ringtrain.errors import DamagedData, DataError

if TYPE_CHECKING:
    import pyarrow as pa


class Opened(NamedTuple):
    """Blocks and schema of a file."""

    blocks: list[Block]
    schema: Any
    checksum: int
    """of it, without reading it all"""


class TableFiles:
    """Columns of files of one format, which a subclass opens and reads.

    Args:
        columns: Names of columns; None: all.
    """

    kind = ""

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DataError(
                f"ringtrain.Records: {self.kind} needs pyarrow: pip install 'ringtrain[records]'"
            ) from error
        found = data_files.of_each(self.opened, files)
        self.blocks = [block for one in found.values() for block in one.blocks]
        self._checksums = [one.checksum for one in found.values()]
        # A file without rows may have any types.
        self.schemas = {file: one.schema for file, one in found.items() if one.blocks}
        first = next(iter(self.schemas), None)
        self._types = dict(zip(self.schemas[first].names, self.schemas[first].types, strict=True)) if first else {}
        self.columns = list(self._types if columns is None else columns)
        for file, schema in self.schemas.items():
            for name in self.columns:
                if schema.names.count(name) != 1:
                    if name in schema.names:
                        problem = f"column {name} twice"
                    else:
                        problem = f"no column {name}"
                    raise DataError(f"{file}: has {problem}: it has {', '.join(schema.names)}")
                kind = schema.field(name).type
                if _decoded(kind) != _decoded(self._types[name]):
                    raise DataError(f"{file}: column {name} is {kind}, expected {self._types[name]} as in {first}")

    def opened(self, file: DataFile) -> Opened:
        """Opens a file; raises DataError."""
        raise NotImplementedError

    def table(self, block: Block) -> Any:
        """Table of pyarrow with the columns of a block; raises DataError."""
        raise NotImplementedError

    def types(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    def checksum(self) -> int:
        """Checksum of the checksums of the files."""
        return zlib.crc32(str(self._checksums).encode())

    def read(self, block: Block) -> Columns:
        table = self.table(block)
        return {name: _values(_in_one(table.column(name)), f"{block.name}: column {name}") for name in self.columns}


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
            raise DamagedData(f"{name}: is no UTF-8: {error}") from error
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    raise DataError(f"{name}: values of type {kind}, expected numbers, texts, or lists of them: convert it before")
