"""Blocks of rows: what is read of a file at once, ahead, and kept in memory."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ringtrain.data.data_files import IMAGES, DataFile

MAX_ROWS, MAX_BYTES = 4096, 8 << 20
"""a block of successive rows ends with the row that reaches one of them"""
Columns = dict[str, NDArray[Any]]
"""Values of a block by column, [rows, ...]."""
Values = list[NDArray[Any]]
"""arrays with the rows of a block"""
NUM_THREADS = 4
"""that read blocks: behind a URL, each waits"""
BYTES_OF_OBJECT = 33
"""memory of an object of bytes besides its content"""


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


# ---- blocks in memory ------------------------------------------------------------------------------------------------


def num_bytes(values: Values) -> int:
    """Memory of a block, with its texts."""
    texts = [array for array in values if array.dtype.kind == "O"]
    of_texts = sum(len(text) + BYTES_OF_OBJECT for array in texts for text in array.flat)
    return sum(array.nbytes for array in values) + of_texts


class BlockCache:
    """Blocks by number, read by threads, of which those that were not used for longest are dropped."""

    def __init__(self, read: Callable[[int], Values], max_blocks: int) -> None:
        self.read, self.max_blocks = read, max_blocks  # besides those of a call
        self._blocks: OrderedDict[int, Future[Values]] = OrderedDict()
        """the last one was started or used last"""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "ringtrain-blocks")

    def start(self, numbers: Iterable[int]) -> None:
        """Starts to read blocks that are not there."""
        with self._lock:
            self._start(numbers)

    def take(self, numbers: Collection[int]) -> dict[int, Values]:
        """Returns blocks by number; raises DataError if one cannot be read, which the next call tries again."""
        with self._lock:
            self._start(numbers)
            futures = {number: self._blocks[number] for number in numbers}
        blocks = {number: future.result() for number, future in futures.items()}
        with self._lock:
            self._drop(blocks)
        return blocks

    def _start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            future = self._blocks.get(number)
            if future is None or (future.done() and future.exception()):
                self._blocks[number] = self._threads.submit(self.read, number)
            self._blocks.move_to_end(number)

    def _drop(self, used: Collection[int]) -> None:
        """Drops blocks down to the limit, the oldest first, but none of a call."""
        for number, future in [*self._blocks.items()]:
            if len(self._blocks) <= self.max_blocks:
                break
            if number not in used and future.done():
                del self._blocks[number]
