"""Blocks of rows: what is read of a file at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ringtrain.data.data_files import IMAGES, DataFile

MAX_ROWS, MAX_BYTES = 4096, 8 << 20
"""a block of successive rows ends with the row that reaches one of them"""
Columns = dict[str, NDArray[Any]]
"""Values of a block by column, [rows, ...]."""


class Block(NamedTuple):
    """Successive rows of a file."""

    file: DataFile
    number: int
    """of a row group, or of the first row"""
    num_rows: int
    begin: int = 0
    end: int = 0
    """bytes of the rows in the file; 0: a row group"""

    @property
    def is_image(self) -> bool:
        return self.file.name.lower().endswith(IMAGES)

    @property
    def name(self) -> str:
        """Name of the block in messages."""
        if self.is_image:
            return str(self.file)
        if self.end:
            return f"{self.file}: records from {self.number} on"
        return f"{self.file}: row group {self.number}"

    def name_of(self, row: int) -> str:
        """Name of one of its rows in messages."""
        if self.is_image:
            return self.name
        if self.end:
            return f"{self.file}: record {self.number + row}"
        return f"{self.name}: row {row}"


def blocks_of(file: DataFile, starts: Sequence[int]) -> list[Block]:
    """Blocks of a file with rows at these positions."""
    positions = [*starts, file.size]
    blocks, first = [], 0
    for number in range(1, len(positions)):
        is_full = number - first == MAX_ROWS or positions[number] - positions[first] >= MAX_BYTES
        if is_full or number == len(positions) - 1:
            blocks.append(Block(file, first, number - first, positions[first], positions[number]))
            first = number
    return blocks


def text_of(error: Exception) -> str:
    """What an error of an operation says, in one line, without the operation's place in a graph."""
    text = re.sub(r"\{\{.*?\}\} ?| \[Op:.*", "", getattr(error, "message", str(error))).strip()
    text = re.sub(r"^assertion failed: \[(.*)\]", r"\1", text)
    return text.partition("\n")[0].rstrip(".") or type(error).__name__
