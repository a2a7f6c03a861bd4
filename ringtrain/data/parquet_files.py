"""Parquet files, whose blocks are their row groups."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import IO, Any

from ringtrain.data import data_files
from ringtrain.data.blocks import Block
from ringtrain.data.data_files import DataFile
from ringtrain.data.table_files import Opened, TableFiles

FOOTER = 8
"""last bytes of a file, after its metadata"""
MAX_METADATA = 16 << 20
"""serialized bytes of the files' metadata that stay in memory, where they take 17 times as much"""


class ParquetFiles(TableFiles):
    """Row groups. Their files' footers, whose checksum is taken, have size and, mostly, extremes of each column."""

    kind = "Parquet"

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        self._metadata: dict[DataFile, Any] = {}
        """of the first files, up to MAX_METADATA: to read it takes longer than to read a small block"""
        super().__init__(files, columns)
        num_bytes = 0
        for file in files:
            num_bytes += self._metadata[file].serialized_size
            if num_bytes > MAX_METADATA:
                del self._metadata[file]

    def opened(self, file: DataFile) -> Opened:
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

    def table(self, block: Block, columns: Sequence[str]) -> Any:
        import pyarrow.parquet as pq

        # Of a file behind a URL, neighbouring columns are one request.
        options = {"pre_buffer": block.file.is_remote, "page_checksum_verification": True}

        def read(opened: IO[bytes]) -> Any:
            with pq.ParquetFile(opened, metadata=self._metadata.get(block.file), **options) as parquet:
                return parquet.read_row_group(block.number, columns=columns, use_threads=False)

        return data_files.read_file(block.file, read, f"{block.name} cannot be read")
