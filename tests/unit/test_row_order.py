"""Orders of rows, some steps at a time: those of the whole order, for any blocks, lanes, batches and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringtrain.data.parts import Parts
from ringtrain.data.row_order import (
    Order,
    ShuffledBlocks,
    evaluation_shard,
    lane_order,
    part_of,
)

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def lane_orders(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of `lane_order`."""
    block_rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum))
    batch = draw(st.integers(1, 50))
    return block_rows, draw(st.integers(1, 8)), batch, draw(SEEDS), draw(st.integers(0, 50))


def whole(order: Order) -> NDArray[np.int64]:
    return np.concatenate([order.rows(step) for step in range(order.num_steps)])


@given(lane_orders())
def test_every_row_comes_once(arguments: tuple[Any, ...]) -> None:
    num_rows, batch = sum(arguments[0]), arguments[2]
    order = lane_order(*arguments)
    assert sorted(whole(order)) == list(range(num_rows))
    assert (order.num_whole, order.num_steps) == (num_rows // batch, -(-num_rows // batch))
    assert np.array_equal(whole(lane_order(*arguments)), whole(order))


@given(lane_orders(), st.data())
def test_any_steps_are_those_of_the_whole_order(arguments: tuple[Any, ...], data: st.DataObject) -> None:
    rows, batch = whole(lane_order(*arguments)), arguments[2]
    order = lane_order(*arguments)
    for _ in range(3):
        step = data.draw(st.integers(0, order.num_steps - 1))
        assert np.array_equal(order.rows(step), rows[step * batch : (step + 1) * batch])
    if order.num_whole:
        step = data.draw(st.integers(0, order.num_whole - 1))
        places = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=5))
        assert np.array_equal(order.rows(step, places), rows[step * batch : (step + 1) * batch][places])


def test_blocks_that_draw_from_one_generator_depend_on_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the tests above."""
    draw = np.random.default_rng(0)

    def order_of_block(self: ShuffledBlocks, index: int) -> NDArray[np.uint32]:
        return draw.permutation(int(self._num_rows[index])).astype(np.uint32)

    arguments: tuple[Any, ...] = [40] * 6, 1, 32, 5, 0
    assert np.array_equal(lane_order(*arguments).rows(5), whole(lane_order(*arguments))[160:192])
    monkeypatch.setattr(ShuffledBlocks, "_made_order", order_of_block)
    rows = whole(lane_order(*arguments))
    assert sorted(rows) == list(range(240))
    assert not np.array_equal(lane_order(*arguments).rows(5), rows[160:192])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_reads_the_blocks_of_its_lanes(size: int) -> None:
    """12 lanes of one block each: only those that two ranks have rows of are read by both."""
    rows_of_block, num_lanes, batch = 64, 12, 48
    order = lane_order([rows_of_block] * num_lanes, num_lanes, batch, 0, 0)
    batches = whole(order).reshape(-1, batch)
    places = [Parts.of_rank(rank, size).places(batch) for rank in range(size)]
    read = [{*(batches[:, own] // rows_of_block).reshape(-1).tolist()} for own in places]
    assert {*range(num_lanes)} == set().union(*read)
    assert max(map(len, read)) <= num_lanes / size + 1
    assert all(len({*(batch // rows_of_block).tolist()}) == num_lanes for batch in batches)
    # A shuffle of all rows would have each rank read all blocks.
    shuffled = np.random.default_rng(0).permutation(num_lanes * rows_of_block).reshape(-1, batch)
    assert size == 1 or len({*(shuffled[:, places[0]] // rows_of_block).reshape(-1).tolist()}) > num_lanes / size + 1


@given(st.integers(0, 500), st.integers(1, 7), st.integers(1, 9))
def test_evaluation_covers_every_row_once(num_rows: int, size: int, batch: int) -> None:
    """In whole batches, but for the last one."""
    shards = [evaluation_shard(num_rows, rank, size, batch) for rank in range(size)]
    assert np.concatenate(shards).tolist() == list(range(num_rows))
    assert all(len(shard) % batch == 0 for shard in shards if shard and shard.stop < num_rows)
    lengths = [-(-len(shard) // batch) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 500), st.integers(1, 9))
def test_parts_of_ranks_are_those_of_array_split(num_rows: int, size: int) -> None:
    for rank, expected in enumerate(np.array_split(np.arange(num_rows), size)):
        assert np.array_equal(np.arange(*part_of(num_rows, rank, size)), expected)
