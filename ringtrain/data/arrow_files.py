"""Arrow files, of the file format and of the stream format, as Hugging Face's datasets writes them."""

from __future__ import annotations

import zlib
from typing import IO, Any

import numpy as np

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns
from ringtrain.data.data_files import DataFile
from ringtrain.data.table_files import Opened, TableFiles
from ringtrain.errors import DataError

FILE, STREAM = b"ARROW1\0\0", b"\xff\xff\xff\xff"
"""first bytes; a file has a stream after them"""
END = STREAM + bytes(4)
"""of a stream"""


class ArrowFiles(TableFiles):
    """Record batches. The checksum of a file is that of their headers."""

    kind = "Arrow"

    def opened(self, file: DataFile) -> Opened:
        import pyarrow as pa

        if file.is_remote:
            raise DataError(f"{file}: Arrow files are read from disk alone: convert it to Parquet")

        def scan(opened: IO[bytes]) -> Opened:
            # Contents are not read here: they stay in the mapped file.
            with pa.memory_map(file.url) as source:
                begin = len(FILE) if source.read(len(FILE)) == FILE else 0
                source.seek(begin)
                messages = pa.ipc.MessageReader.open_stream(source)
                schema = pa.ipc.read_schema(messages.read_next_message())
                blocks: list[Block] = []
                checksum, begin, number = 0, source.tell(), 0
                for message in messages:
                    if message.type != "record batch":
                        raise DataError(f"{file}: has dictionaries: write it without, or convert it to Parquet")
                    num_rows = pa.ipc.read_record_batch(message, schema).num_rows
                    if num_rows:
                        blocks.append(Block(file, number, num_rows, begin, source.tell()))
                    checksum = zlib.crc32(message.metadata, checksum)
                    begin, number = source.tell(), number + 1
                source.seek(max(0, source.tell() - len(END)))
                if source.read(len(END)) != END:
                    raise DataError(f"{file}: is cut: expected the mark of its end after {number:,} record batches")
            return Opened(blocks, schema, checksum)

        return data_files.read_file(file, scan, f"{file}: cannot be read as Arrow")

    def read(self, block: Block) -> Columns:
        # Copies: the values of each column are part of the record batch, with all columns.
        return {name: np.array(values) for name, values in super().read(block).items()}

    def table(self, block: Block) -> Any:
        import pyarrow as pa

        def read(opened: IO[bytes]) -> Any:
            opened.seek(block.begin)
            message = pa.ipc.read_message(opened.read(block.end - block.begin))
            return pa.Table.from_batches([pa.ipc.read_record_batch(message, self.schemas[block.file])])

        return data_files.read_file(block.file, read, f"{block.name} cannot be read").select(self.columns)
