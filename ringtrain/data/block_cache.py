"""Blocks of rows in memory: read ahead by threads, and dropped when others need their place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

NUM_THREADS = 2
Values = list[NDArray[Any]]
"""arrays with the rows of a block"""


class BlockCache:
    """Blocks by number, of which those that were not used for longest are dropped.

    Args:
        read: Reads a block.
        max_bytes: Of all blocks, besides those that one call needs.

    Attributes:
        num_read: Number of blocks that were read.
    """

    def __init__(self, read: Callable[[int], Values], max_bytes: int) -> None:
        self.read, self.max_bytes, self.num_read = read, max_bytes, 0
        self._ahead: dict[int, Future[Values]] = {}
        """blocks that were not used yet"""
        self._used: OrderedDict[int, Future[Values]] = OrderedDict()
        """the last one was used last"""
        self._lock, self._threads = threading.Lock(), ThreadPoolExecutor(NUM_THREADS, "ringtrain-blocks")

    def start(self, numbers: Iterable[int]) -> None:
        """Starts to read blocks that are not there."""
        with self._lock:
            for number in numbers:
                if number not in self._used and number not in self._ahead:
                    self._ahead[number] = self._threads.submit(self.read, number)
                    self.num_read += 1

    def take(self, numbers: Iterable[int]) -> dict[int, Values]:
        """Blocks with these numbers.

        Raises:
            DataError: One cannot be read.
        """
        wanted = list(numbers)
        self.start(wanted)
        with self._lock:
            for number in wanted:
                if number in self._ahead:
                    self._used[number] = self._ahead.pop(number)
                self._used.move_to_end(number)
            futures = {number: self._used[number] for number in wanted}
        blocks = {number: future.result() for number, future in futures.items()}
        with self._lock:
            self._drop(len(wanted))
        return blocks

    def _drop(self, num_kept: int) -> None:
        """Drops blocks down to the limit, except those that were used last.

        Of those that were read ahead, half of the limit stays: an iteration that has ended may have left some.
        """
        num_bytes = self._dropped(self._ahead, self.max_bytes // 2, 0)
        self._dropped(self._used, self.max_bytes - num_bytes, num_kept)

    def _dropped(self, blocks: dict[int, Future[Values]], max_bytes: int, num_kept: int) -> int:
        """Drops the first blocks of a dict down to a limit, except its last ones; returns the bytes that are left."""
        ready = {number: _num_bytes(future) for number, future in blocks.items() if future.done()}
        num_bytes = sum(ready.values())
        for number in list(ready)[: len(ready) - num_kept]:
            if num_bytes <= max_bytes:
                break
            num_bytes -= ready[number]
            del blocks[number]
        return num_bytes


def _num_bytes(future: Future[Values]) -> int:
    if future.exception() is not None:
        return 0
    return sum(values.nbytes for values in future.result())
