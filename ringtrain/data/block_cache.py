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
        """Drops used blocks down to the limit, except the last ones."""
        ready = [future for future in self._ahead.values() if future.done()]
        too_many = sum(map(_num_bytes, [*ready, *self._used.values()])) - self.max_bytes
        for number in list(self._used)[:-num_kept]:
            if too_many <= 0:
                return
            too_many -= _num_bytes(self._used.pop(number))


def _num_bytes(future: Future[Values]) -> int:
    if future.exception() is not None:
        return 0
    return sum(values.nbytes for values in future.result())
