"""Large arrays that two processes of a host hold once, played here by two arrays of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.data import host_memory, in_place
from ringtrain.data.arrays import Arrays

SHAPE = 20_000, 1_000
"""of 80 MB, which malloc maps by itself"""


def large(shape: tuple[int, ...] = SHAPE) -> NDArray[np.float32]:
    array = np.empty(shape, np.float32)
    array[:] = np.arange(np.prod(shape[:-1]), dtype=np.float32).reshape(*shape[:-1], 1)
    return array


def own_bytes(array: NDArray[Any]) -> int:
    """Bytes of an array's memory that no file in memory holds."""
    begin, num_own = array.ctypes.data, array.nbytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:ringtrain-array" not in line:
            continue
        first, end = (int(text, 16) for text in line.split()[0].split("-"))
        num_own -= max(0, min(end, begin + array.nbytes) - max(first, begin))
    return num_own


def shared(one: NDArray[Any], other: NDArray[Any]) -> str:
    """Maps the pages of one array in place of those of the other; returns what differs."""
    (first,), (second,) = host_memory._blocks_of([one]), host_memory._blocks_of([other])
    with first.in_file() as number:
        assert number >= 0
        return second.map_from(f"/proc/self/fd/{number}")


def test_equal_arrays_have_the_same_pages_until_one_is_written() -> None:
    one, other = large(), large()
    assert own_bytes(one) == one.nbytes and not host_memory._blocks_of([one])[0].is_shared
    assert not shared(one, other)
    for array in (one, other):
        assert own_bytes(array) < 2 * host_memory.PAGE
        assert np.array_equal(array, large())
        assert host_memory._blocks_of([array])[0].is_shared
    other[7] = 0
    assert np.array_equal(one, large()) and not other[7].any() and np.array_equal(other[8:], large()[8:])
    del one, other  # no page of another array goes with them
    assert np.array_equal(large(), large())


def test_another_row_is_named_and_nothing_mapped() -> None:
    one, other = large(), large()
    other[123, 5] += 1
    assert shared(one, other) == f"array, float32 {SHAPE}, from row 123 on,"
    assert own_bytes(other) == other.nbytes and other[123, 5] == one[123, 5] + 1


def test_a_file_that_cannot_be_opened_leaves_the_array() -> None:
    array = large()
    (block,) = host_memory._blocks_of([array])
    assert not block.map_from("/proc/self/fd/99999") and not block.is_shared
    assert np.array_equal(array, large())


def test_views_have_the_memory_of_their_array_and_a_file_none(tmp_path: Path) -> None:
    array = large()
    views = [array[:100], array[100:], array.T, array.reshape(-1)]
    assert [block.array is array for block in host_memory._blocks_of(views)] == [True]
    np.save(tmp_path / "array.npy", array)
    in_file = np.load(tmp_path / "array.npy", mmap_mode="r")
    assert not host_memory._blocks_of([in_file, in_file[:10], np.frombuffer(bytes(1000)), np.zeros(10)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16"])
def test_rows_of_large_arrays_are_those_of_tensors(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    x = {"a": (100 * draw.random((50, 3))).astype(dtype), "b": [tf.constant(draw.random((50, 2)))]}
    np.save(tmp_path / "y.npy", (100 * draw.random(50)).astype(dtype))
    y = np.load(tmp_path / "y.npy", mmap_mode="r")

    def found() -> tuple[Any, ...]:
        arrays = Arrays(x, y)
        order = (
            tf.data.Dataset.from_tensor_slices(draw_order).batch(7).map(lambda rows: (tf.constant(0, tf.int64), rows))
        )
        batches = [tf.nest.map_structure(lambda leaf: leaf.numpy(), batch) for batch in arrays.batches(order, 7, 0)]
        return arrays.checksum(), tf.nest.flatten([batches, arrays.rows(3, 9)]), len(arrays.large)

    draw_order = draw.permutation(50)
    checksum, of_tensors, _ = found()
    monkeypatch.setattr(in_place, "LARGE", 1)
    own_checksum, rows, num_large = found()
    assert num_large == 2 and own_checksum == checksum
    for row, of_tensor in zip(rows, of_tensors, strict=True):
        assert row.dtype == of_tensor.dtype and np.array_equal(row, of_tensor)
