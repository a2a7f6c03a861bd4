"""Order of the samples or rows of an epoch, and those of it that a rank trains and evaluates."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_ORDERS = 64
"""of blocks in memory, more than a batch has rows of"""


def permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of all rows in an epoch, equal on all ranks."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def part_of(num_samples: int, rank: int, size: int) -> tuple[int, int]:
    """Returns start and end (exclusive) of a rank's part, which may be empty, split as by numpy.array_split."""
    each, more = divmod(num_samples, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def evaluation_shard(num_samples: int, rank: int, size: int, whole: int = 1) -> range:
    """Returns a rank's test samples, contiguous, to open few files, in multiples of `whole`, but for the last one."""
    begin, end = part_of(-(-num_samples // whole), rank, size)
    return range(begin * whole, min(end * whole, num_samples))


class ShuffledBlocks:
    """Row numbers, counted through all blocks, of these blocks in order, the rows of each shuffled."""

    def __init__(self, block_rows: NDArray[np.int64], blocks: NDArray[np.int64], seed: int, epoch: int) -> None:
        self._blocks, self._seed, self._epoch = blocks, seed, epoch
        self._num_rows = block_rows[blocks]
        self._first_rows = (np.cumsum(block_rows) - block_rows)[blocks]
        self._ends = np.cumsum(self._num_rows)
        self._order_of_block = functools.lru_cache(NUM_ORDERS)(self._made_order)  # of the last blocks read

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice, /) -> NDArray[np.int64]:
        begin, end, _ = places.indices(len(self))
        index = int(np.searchsorted(self._ends, begin, side="right"))
        pieces = [np.zeros(0, np.int64)]
        while begin < end:
            block_end = int(self._ends[index])
            block_begin = block_end - int(self._num_rows[index])
            rows = self._order_of_block(index)[begin - block_begin : end - block_begin]
            pieces.append(rows.astype(np.int64) + self._first_rows[index])
            begin = block_end
            index += 1
        return np.concatenate(pieces)

    def _made_order(self, index: int) -> NDArray[np.uint32]:
        """Order of a block's rows, from seed, epoch and its number alone: any slice of all can be made by itself."""
        num_rows = int(self._num_rows[index])
        if num_rows == 1:  # an image: a generator takes longer than all else
            return np.zeros(1, np.uint32)
        # [seed, epoch] is for the order of the blocks, and has the bits of [seed, epoch, 0].
        draw = np.random.default_rng([self._seed, self._epoch, int(self._blocks[index]) + 1])
        return draw.permutation(num_rows).astype(np.uint32)


class Order:
    """Order of all rows of an epoch, in batches of one size and a last, smaller one.

    The line is cut into lanes. A lane has neighbouring places in each batch, to which it gives its next rows. The end
    of the line, less than a batch, comes last.
    """

    def __init__(self, line: ShuffledBlocks | NDArray[np.int64], global_batch_size: int, num_lanes: int = 1) -> None:
        self._line, self._batch_size = line, global_batch_size
        self.num_whole = len(line) // global_batch_size  # batches
        self.num_steps = -(-len(line) // global_batch_size)
        self._lanes = [part_of(global_batch_size, lane, num_lanes) for lane in range(num_lanes)]

    def rows(self, step: int, places: ArrayLike | None = None) -> NDArray[np.int64]:
        """Rows at these places of a batch; None: all."""
        if places is None:
            places = range(min(self._batch_size, len(self._line) - step * self._batch_size))
        chosen = np.asarray(places)
        if step >= self.num_whole:  # the last, smaller one
            return self._line[step * self._batch_size : len(self._line)][chosen]
        # Only the lanes are read that have one of the places.
        lanes = [(begin, end) for begin, end in self._lanes if begin <= chosen.max() and end > chosen.min()]
        pieces = []
        for begin, end in lanes:
            start = self.num_whole * begin  # of the lane in the line
            width = end - begin
            pieces.append(self._line[start + step * width : start + (step + 1) * width])
        return np.concatenate(pieces)[chosen - lanes[0][0]]


def lane_order(block_rows: Sequence[int], num_lanes: int, global_batch_size: int, seed: int, epoch: int) -> Order:
    """Returns an epoch's order of shuffled blocks: to read few at once, a batch has rows of one or two per lane."""
    sizes = np.asarray(block_rows, np.int64)
    blocks = np.random.default_rng([seed, epoch]).permutation(len(sizes))
    return Order(ShuffledBlocks(sizes, blocks, seed, epoch), global_batch_size, num_lanes)
