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


def block_of(array: NDArray[Any]) -> host_memory._Block:
    (block,) = host_memory._blocks_of([array])
    return block


def is_shared(*arrays: NDArray[Any]) -> bool:
    return all(host_memory._shared([block_of(array) for array in arrays]))


def shared(one: NDArray[Any], other: NDArray[Any]) -> str:
    """Maps the pages of one array in place of those of the other; returns what differs."""
    with block_of(one).in_file() as (number, name):
        assert number >= 0
        return block_of(other).map_from("/proc/self/fd", number, name)


def test_equal_arrays_have_the_same_pages_until_one_is_written() -> None:
    one, other = large(), large()
    assert not is_shared(one) and block_of(one).is_mapping
    assert not shared(one, other)
    assert is_shared(one, other)
    assert np.array_equal(one, large()) and np.array_equal(other, large())
    other[7] = 0
    assert is_shared(one) and not is_shared(other)
    assert np.array_equal(one, large()) and not other[7].any() and np.array_equal(other[8:], large()[8:])
    other[:] = one
    assert not shared(one, other) and is_shared(one, other)
    del one, other  # no page of another array goes with them
    assert np.array_equal(large(), large())


@pytest.mark.parametrize("order", ["C", "F"])
def test_another_row_is_named_and_nothing_mapped(order: Any) -> None:
    one, other = np.asarray(large(), order=order), np.asarray(large(), order=order)
    other[123, 5] += 1
    assert shared(one, other) == f"array, float32 {SHAPE}, from row 123 on,"
    assert not is_shared(other) and other[123, 5] == one[123, 5] + 1


def test_of_a_view_its_own_rows_are_compared() -> None:
    one, other = large(), large()
    other[1500:] += 1
    for rows, different in ((other[:1000], ""), (other[1000::2], "from row 250 on"), (other[1400::-1], "")):
        with block_of(one).in_file() as (number, name):
            assert different in host_memory._blocks_of([rows])[0].map_from("/proc/self/fd", number, name)
            assert not different or not is_shared(other)


def test_what_cannot_be_mapped_leaves_the_array(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    array = large()
    block = block_of(array)
    (tmp_path / "3").write_text("a file with another name")
    assert not block.map_from("/proc/self/fd", 99999, "ringtrain-array-1") and not block.map_from(str(tmp_path), 3, "3")
    monkeypatch.setattr(host_memory.os, "ftruncate", lambda *arguments: 1 / 0)
    with block.in_file() as (number, _):
        assert number == -1
    assert np.array_equal(array, large()) and not is_shared(array)


def test_a_shared_array_can_be_resized() -> None:
    for rows in (2 * SHAPE[0], SHAPE[0] // 2):
        one, other = large(), large()
        assert not shared(one, other)
        other.resize((rows, SHAPE[1]), refcheck=False)
        assert np.array_equal(other[: SHAPE[0] // 2], large()[: SHAPE[0] // 2])
        assert np.array_equal(one, large())


def test_views_have_the_memory_of_their_array_and_a_file_none(tmp_path: Path) -> None:
    array = large()
    (block,) = host_memory._blocks_of([array[:100], array[100:], array.T, array.reshape(-1)])
    assert block.owner is array and len(block.views) == 4
    np.save(tmp_path / "array.npy", array)
    in_file = np.load(tmp_path / "array.npy", mmap_mode="r")
    assert not host_memory._blocks_of([in_file, in_file[:10]])
    objects = np.zeros(1000, dtype=[("name", object), ("x", "f4", (20_000,))])
    others = host_memory._blocks_of([np.frombuffer(bytes(1000)), np.zeros(10), objects["x"]])
    assert len(others) == 3 and not any(block.is_mapping for block in others)


def test_rows_in_another_byte_order_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "LARGE", 1)
    x = np.arange(8).astype(">f4").reshape(4, 2)
    order = tf.data.Dataset.from_tensors((tf.constant(0, tf.int64), np.array([2, 0])))
    batch = Arrays(x).batches(order, 2, 0).get_single_element()
    assert batch.numpy().tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16"])
def test_rows_of_large_arrays_are_those_of_tensors(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    x = {"a": np.asfortranarray((100 * draw.random((50, 3))).astype(dtype)), "b": [tf.constant(draw.random((50, 2)))]}
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
