"""Blocks of rows in memory: read ahead by threads, and dropped when others need their place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

NUM_THREADS = 2
BYTES_OF_OBJECT = 33
"""memory of an object of bytes besides its content"""
Values = list[NDArray[Any]]
"""arrays with the rows of a block"""


def num_bytes(values: Values) -> int:
    """Memory of a block, with its texts."""
    texts = [array for array in values if array.dtype.kind == "O"]
    of_texts = sum(len(text) + BYTES_OF_OBJECT for array in texts for text in array.flat)
    return sum(array.nbytes for array in values) + of_texts


class BlockCache:
    """Blocks by number, of which those that were not used for longest are dropped."""

    def __init__(self, read: Callable[[int], Values], max_bytes: int, num_threads: int = NUM_THREADS) -> None:
        self.read, self.max_bytes = read, max_bytes  # of all blocks, besides those of a call and the last one started
        self._blocks: OrderedDict[int, Future[Values]] = OrderedDict()
        """the last one was started or used last"""
        self._sizes: dict[int, int] = {}
        """bytes of the blocks that are read"""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, "ringtrain-blocks")

    def start(self, numbers: Iterable[int]) -> None:
        """Starts to read blocks that are not there."""
        with self._lock:
            self._start(numbers)

    def take(self, numbers: Iterable[int]) -> dict[int, Values]:
        """Returns blocks by number; raises DataError if one cannot be read, which the next call tries again."""
        wanted = list(numbers)
        with self._lock:
            self._start(wanted)
            futures = {number: self._blocks[number] for number in wanted}
        blocks = {number: future.result() for number, future in futures.items()}
        with self._lock:
            self._drop(wanted)
        return blocks

    def _start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            future = self._blocks.get(number)
            if future is None or (future.done() and future.exception()):
                self._blocks[number] = self._threads.submit(self.read, number)
            self._blocks.move_to_end(number)

    def _drop(self, wanted: Iterable[int]) -> None:
        """Drops blocks down to the limit, the oldest first."""
        for number, future in self._blocks.items():
            if number not in self._sizes and future.done() and not future.exception():
                self._sizes[number] = num_bytes(future.result())
        left, kept = sum(self._sizes.values()), {*wanted, next(reversed(self._blocks))}
        for number in [number for number in self._blocks if number in self._sizes and number not in kept]:
            if left <= self.max_bytes:
                break
            left -= self._sizes.pop(number)
            del self._blocks[number]
