"""Files without a table of their rows: where these begin is found by an index next to a file, or by reading it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, blocks_of
from ringtrain.data.data_files import INDEX, OTHER_INDEX, DataFile
from ringtrain.errors import DamagedData, DataError

Result = TypeVar("Result")


class Positions(NamedTuple):
    """Where the rows of a file begin, in bytes."""

    starts: list[int]
    checksum: int
    """of the file, without reading it all"""
    is_indexed: bool = False


class ScannedFiles:
    """Blocks of successive rows.

    Args:
        scan: Returns a checksum of a file and the positions of its rows.
        read_index: Returns the positions in the text of a file's index.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        scan: Callable[[DataFile], list[int]],
        read_index: Callable[[DataFile, str], list[int]],
    ) -> None:
        def positions(file: DataFile) -> Positions:
            if not file.is_remote:
                checksum, *starts = scan(file)
                return Positions(starts, checksum)
            text = data_files.index_of(file)
            if text:
                starts = read_index(file, text)
            else:
                starts = scan(file)[1:]
            # The same with and without an index.
            return Positions(starts, zlib.crc32(f"{file.version} {starts}".encode()), bool(text))

        found = data_files.of_each(positions, [file for file in files if file.size])
        self._checksums = [positions.checksum for positions in found.values()]
        self._indexed = {file for file, positions in found.items() if positions.is_indexed}
        self.blocks = [block for file, positions in found.items() for block in blocks_of(file, positions.starts)]

    def checksum(self) -> int:
        """Checksum of the checksums of records; behind a URL, of the version."""
        return zlib.crc32(str(self._checksums).encode())

    def parsed(self, block: Block, parse: Callable[[bytes], Result]) -> Result:
        """Returns the result of `parse` for the bytes of a block."""

        def read(opened: Any) -> Result:
            opened.seek(block.begin)
            return parse(opened.read(block.end - block.begin))

        try:
            return data_files.read_file(block.file, read, f"{block.name} cannot be read")
        except DamagedData as error:
            raise self.damaged(block, str(error)) from error

    def damaged(self, block: Block, problem: str) -> DataError:
        """Error of a block that is not as expected: by itself, or as its file's index is of another one."""
        if block.file in self._indexed:
            return DataError(f"{problem}, or {block.file}{INDEX} {OTHER_INDEX}")
        return DamagedData(problem)
