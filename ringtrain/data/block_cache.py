"""Blocks of rows in memory: read ahead by threads, and dropped when others need their place."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from numpy.typing import NDArray

from ringtrain.data import python_calls
from ringtrain.errors import DataError

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
    """Blocks by number, of which those that were not used for longest are dropped.

    Args:
        read: Reads a block.
        max_bytes: Of all blocks, besides those that one call needs.
        num_threads: That read.

    Attributes:
        num_read: Number of blocks that were read.
    """

    def __init__(self, read: Callable[[int], Values], max_bytes: int, num_threads: int = NUM_THREADS) -> None:
        self.read, self.max_bytes, self.num_read = read, max_bytes, 0
        self._ahead: OrderedDict[int, Future[Values]] = OrderedDict()
        """blocks that were not used yet"""
        self._used: OrderedDict[int, Future[Values]] = OrderedDict()
        """the last one was used last"""
        self._sizes: dict[int, int] = {}
        """bytes of the blocks that are read"""
        self._lock = threading.Lock()
        self._readers = _Readers(num_threads)
        weakref.finalize(self, self._readers.close).atexit = False  # then, python_calls does

    def start(self, numbers: Iterable[int]) -> None:
        """Starts to read blocks that are not there."""
        with self._lock:
            self._start(numbers)

    def take(self, numbers: Iterable[int]) -> dict[int, Values]:
        """Blocks with these numbers.

        Raises:
            DataError: One cannot be read.
        """
        wanted = list(numbers)
        with self._lock:
            self._start(wanted)
            for number in wanted:
                if number in self._ahead:
                    self._used[number] = self._ahead.pop(number)
                self._used.move_to_end(number)
            futures = {number: self._used[number] for number in wanted}
        try:
            blocks = {number: future.result() for number, future in futures.items()}
        except Exception:  # the next time, it may be there
            with self._lock:
                for number in wanted:
                    self._used.pop(number, None)
            raise
        with self._lock:
            self._drop(wanted)
        return blocks

    def _start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            future = self._ahead.get(number)
            if number not in self._used and (future is None or (future.done() and future.exception())):
                self._ahead[number] = self._readers.start(self.read, number)
                self.num_read += 1

    def _drop(self, kept: Iterable[int]) -> None:
        """Drops blocks down to the limit, except `kept`.

        Of those that were read ahead, half of the limit stays: an iteration that has ended may have left some.
        """
        for blocks in (self._ahead, self._used):
            for number, future in blocks.items():
                if number not in self._sizes and future.done() and not future.exception():
                    self._sizes[number] = num_bytes(future.result())
        known = self._used.keys() | self._ahead.keys()
        self._sizes = {number: size for number, size in self._sizes.items() if number in known}
        newest = next(reversed(self._ahead), -1)  # which may be larger than that, and is needed soon
        ahead = self._dropped(self._ahead, self.max_bytes // 2, {newest})
        self._dropped(self._used, self.max_bytes - ahead, {*kept})

    def _dropped(self, blocks: OrderedDict[int, Future[Values]], max_bytes: int, kept: Iterable[int]) -> int:
        """Drops the first blocks of a dict down to a limit; returns the bytes that are left."""
        left = sum(self._sizes.get(number, 0) for number in blocks)
        for number in [number for number in blocks if number in self._sizes and number not in kept]:
            if left <= max_bytes:
                break
            left -= self._sizes.pop(number)
            del blocks[number]
        return left


class _Readers:
    """Threads that read blocks. They do not keep a process from its end, nor the cache alive."""

    def __init__(self, num_threads: int) -> None:
        python_calls.close_at_end.add(self)
        self._is_closed, self._open_futures = False, set[Future[Values]]()
        self._num_threads, self._work = num_threads, queue.SimpleQueue[Any]()
        for _ in range(num_threads):
            threading.Thread(target=self._read_all, name="ringtrain-blocks", daemon=True).start()

    def start(self, read: Callable[[int], Values], number: int) -> Future[Values]:
        future: Future[Values] = Future()
        self._open_futures.add(future)
        self._work.put((future, read, number))
        if self._is_closed:
            self.close()
        return future

    def close(self) -> None:
        """Ends the threads, and what waits for a block."""
        self._is_closed = True
        for _ in range(self._num_threads):
            self._work.put(None)
        for future in [*self._open_futures]:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(DataError("ringtrain.Records: the process ends"))

    def _read_all(self) -> None:
        is_closed = False
        while not is_closed:
            is_closed = self._read_next(self._work.get())

    def _read_next(self, work: Any) -> bool:
        """Reads a block; returns whether there is none. Its names end here: a waiting thread keeps nothing alive."""
        if work is None:
            return True
        future, read, number = work
        settle: Callable[[Any], None]
        try:
            settle, outcome = future.set_result, read(number)
        except BaseException as error:
            settle, outcome = future.set_exception, error
        with contextlib.suppress(InvalidStateError):  # it was closed meanwhile
            settle(outcome)
        self._open_futures.discard(future)
        return self._is_closed
