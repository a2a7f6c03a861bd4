"""Rows of arrays that each rank trains: every row once per epoch, the same batches for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import batches
import numpy as np
import pytest
import tensorflow as tf

from ringtrain import data
from ringtrain.data.arrays import Arrays


def _epoch(num_rows: int, batch_size: int, size: int, epoch: int = 0, first_step: int = 0, **options: object):
    """Rows and share of each step, by rank."""
    steps, steps_per_epoch = [], options.pop("steps_per_epoch", None)
    for rank in range(size):
        arrays = data.Arrays({"id": np.arange(num_rows)}, **options)
        batches = data.RowBatches(arrays, batch_size, data.Parts.of_rank(rank, size), 5, steps_per_epoch)
        pairs = [(1.0, one) if batches.is_even else (one[0].shares[0], one[1]) for one in batches(epoch, first_step)]
        steps.append(
            [
                (float(share), one[0]["id"].numpy() if isinstance(one, tuple) else one["id"].numpy())
                for share, one in pairs
            ]
        )
    return list(zip(*steps, strict=True))


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "size"), [(100, 32, 1), (100, 32, 2), (100, 32, 3), (65, 32, 5), (7, 2, 3)]
)
def test_every_row_once_per_epoch(num_rows: int, batch_size: int, size: int) -> None:
    trained = []
    for number, ranks in enumerate(_epoch(num_rows, batch_size, size, shuffle=True)):
        rows = [row for share, part in ranks for row in part if share]
        assert len(rows) == min(batch_size, num_rows - number * batch_size)
        for share, part in ranks:
            assert share == pytest.approx(len(part) * size / len(rows)) or (share == 0 and len(part) == 1)
        trained += rows
    assert sorted(trained) == list(range(num_rows))


def test_epochs_that_share_a_pass() -> None:
    """Of 4 batches, the last of them with an uneven number of rows, 2 in each epoch; also from a step on."""

    def rows(epoch: int, first_step: int = 0) -> list[list[int]]:
        parts = _epoch(99, 25, 2, epoch, first_step, steps_per_epoch=2, shuffle=True)
        return [[int(row) for _, part in ranks for row in part] for ranks in parts]

    passes = []
    for number in range(2):
        steps = _epoch(99, 25, 2, number, shuffle=True)
        passes.append([[int(row) for _, part in ranks for row in part] for ranks in steps])
    assert [rows(epoch) for epoch in range(4)] == [passes[0][:2], passes[0][2:], passes[1][:2], passes[1][2:]]
    assert rows(3, 1) == passes[1][3:] and rows(2, 1) == passes[1][1:2]


def test_epochs_differ_and_a_resumed_epoch_does_not() -> None:
    def rows(epoch: int, first_step: int = 0) -> list[list[int]]:
        return [part.tolist() for ((_, part),) in _epoch(50, 8, 1, epoch, first_step, shuffle=True)]

    assert rows(0) != rows(1)
    assert rows(1, first_step=4) == rows(1)[4:]


def test_other_data_have_another_checksum() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    same = data.Arrays(x, y).checksum()
    assert same == data.Arrays(x.copy(), y).checksum()
    assert data.Arrays(tf.constant(x)).checksum() != data.Arrays(tf.constant(x + 1)).checksum()
    for other in (data.Arrays(x + 1e-3, y), data.Arrays(x[:5], y[:5]), data.Arrays(x, y[::-1]), data.Arrays(x)):
        assert other.checksum() != same
    texts = [np.array(words, object) for words in (["a", "b"], ["a", "c"])]
    assert (
        data.Arrays(texts[0]).checksum() == data.Arrays(texts[0].copy()).checksum() != data.Arrays(texts[1]).checksum()
    )


def test_kinds_of_arrays() -> None:
    """As Keras hands them to a model: floats as float32, sparse and ragged as they are."""
    dense, ragged = np.eye(3), tf.ragged.constant([[1], [2, 3], [4, 5, 6]])
    x = {"ragged": ragged, "sparse": tf.sparse.from_dense(dense), "list": [dense]}
    first, last = batches.of_rank(data.Arrays(x, dense, None), 2)
    assert last[0]["ragged"].to_list() == [[4, 5, 6]] and last[1].numpy().tolist() == [[0, 0, 1]]
    assert tf.sparse.to_dense(first[0]["sparse"]).numpy().tolist() == dense[:2].tolist()
    assert first[0]["list"][0].shape == (2, 3) and first[0]["list"][0].dtype == tf.float32
    assert data.Arrays(x, dense).checksum() == data.Arrays(dict(x), dense).checksum()


def test_only_the_first_rows() -> None:
    some = data.Arrays(np.arange(10), shuffle=True).first(4)
    assert len(some) == 4 and sorted(np.concatenate(batches.of_rank(some, 3))) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4", "int64"])
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
        return (
            arrays.checksum(),
            tf.nest.flatten([batches, arrays.rows(3, 9)]),
            len(arrays.large_rows(np.zeros(0, np.int64))),
        )

    draw_order = draw.permutation(50)
    checksum, of_tensors, _ = found()
    monkeypatch.setattr("ringtrain.data.arrays.LARGE", 1)
    own_checksum, rows, num_large = found()
    assert num_large == (0 if dtype == ">f4" else 2), "TensorFlow takes the processor's byte order alone"
    assert own_checksum == checksum
    for row, of_tensor in zip(rows, of_tensors, strict=True):
        assert row.dtype == of_tensor.dtype and np.array_equal(row, of_tensor)
