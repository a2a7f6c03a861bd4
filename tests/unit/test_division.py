"""Pipelines of tf.data of which each rank makes its own rows: joined, they are those of the script's pipeline."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.division import division_of
from ringtrain.data.parts import Parts
from ringtrain.data.py_dataset import PyDatasetStream, RowsOfPyDataset
from ringtrain.errors import DataError

ROWS = 47
"""which no number of ranks divides, with a smaller last batch"""
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
Y = np.arange(ROWS)


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def twice(x, y):
    return 2 * x, y


def drawn(x, y):
    return x + tf.random.uniform([], seed=3), y


def centered(x, y):
    return x - tf.reduce_mean(x, 0), y


WHOLE = {
    "no map": (lambda: rows().batch(16), ""),
    "random": (lambda: rows().map(drawn).batch(16), "map() with random_uniform"),
    "a Python function": (
        lambda: rows().map(lambda x, y: (tf.numpy_function(np.negative, [x], tf.float32), y)).batch(16),
        "map() with a Python function",
    ),
    "shuffle after map": (lambda: rows().map(twice).shuffle(9, seed=1).batch(16), "shuffle() comes after map()"),
    "cache after map": (lambda: rows().map(twice).cache().batch(16), "cache() comes after map()"),
    "shuffle after batch": (lambda: rows().map(twice).batch(16).shuffle(3, seed=1), "after batch() comes shuffle()"),
    "padded": (lambda: rows().map(twice).padded_batch(16), "padded_batch() pads"),
    "no batch": (lambda: tf.data.Dataset.from_tensors((X, Y)).map(twice), "it has no batch()"),
}


def test_functions_run_for_own_rows_only(tmp_path: Path) -> None:
    """The negative control: a whole pipeline runs them for all."""
    said = {kind: tmp_path / kind for kind in ("own", "whole")}

    def telling(path: Path) -> tf.data.Dataset:
        def tells(x, y):
            tf.print(y, output_stream=f"file://{path}")
            return x, y

        return rows().map(tells).batch(16)

    division, _ = division_of(telling(said["own"]))
    assert division
    for _ in (*division.of_rank(Parts.of_rank(0, 2)), *telling(said["whole"])):
        pass
    assert {kind: len(path.read_text().split()) for kind, path in said.items()} == {"own": 8 + 8 + 8, "whole": ROWS}


@pytest.mark.parametrize("name", WHOLE)
def test_what_stands_in_the_way_is_named(name: str) -> None:
    make, expected = WHOLE[name]
    division, why = division_of(make())
    assert division is None and why.startswith(expected) and bool(why) == bool(expected), why


def scaled(x, y):
    return x / tf.reduce_max(tf.abs(x)), y


def pixels():
    """Rows with the same largest value each."""
    return tf.data.Dataset.from_tensor_slices((np.sign(X) * 255, Y))


@pytest.mark.parametrize(("make", "function"), [(rows, centered), (pixels, scaled)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_map_of_whole_batches_is_noticed(make, function, rank: int) -> None:
    division, _ = division_of(make().batch(16).map(function))
    assert division and not division.tried(Parts.of_rank(rank, 2))[0]
    division, _ = division_of(make().batch(16).map(lambda x, y: (tf.nn.l2_normalize(x, 1), y)))
    assert division and division.tried(Parts.of_rank(rank, 2))[0], "of each row"


def test_padding_to_the_longest_of_a_batch_is_made_whole():
    """Also if the first batches are equally long on all ranks."""
    rows = tf.data.Dataset.from_tensor_slices([" ".join("w" * n) for n in [4] * 32 + [1, 2, 3, 4] * 8])
    padded = rows.batch(8).map(lambda texts: tf.strings.split(texts).to_tensor())
    found, why = division_of(padded)
    assert found is None and "padding" in why
    found, why = division_of(rows.batch(8).map(lambda texts: tf.strings.split(texts).to_tensor(shape=[None, 4])))
    assert found, why


def test_a_generator_with_a_state_loses_no_rows() -> None:
    """It is not read before training begins."""
    numbers = iter(range(100))
    spec = tf.TensorSpec([], tf.int64)
    generated = tf.data.Dataset.from_generator(lambda: numbers, output_signature=spec)
    division, _ = division_of(generated.map(lambda n: 2 * n).batch(4))
    assert division and not division.is_tried
    (_, first), *_ = division.of_rank(Parts.of_rank(0, 2)).take(1)
    assert first.numpy().tolist() == [0, 2]
    division, why = division_of(generated.batch(4).map(lambda n: 2 * n))
    assert division is None and "a Python function" in why


def test_what_stays_whole_is_said_beside_what_is_divided() -> None:
    division, _ = division_of(rows().map(drawn).map(twice).batch(16))
    assert division and division.remark == "map() with random_uniform"


class Batches(keras.utils.PyDataset):
    """3 batches of up to 20 rows, with the numbers of the rows that were made."""

    num_batches = 3

    def __init__(self, more: float = 0.0) -> None:
        super().__init__()
        self.more, self.made = more, []

    def __getitem__(self, index):
        return self.rows(index, 0, 20, 0.0)

    def rows(self, index, begin, end, more=None):
        numbers = np.arange(ROWS)[20 * index : 20 * index + 20][begin:end]
        self.made += numbers.tolist()
        return {"x": X[numbers] + (self.more if more is None else more)}, Y[numbers]


class Fewer(Batches):
    def rows(self, index, begin, end, more=None):
        return super().rows(index, begin, end - (more is None), more)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 10])
def test_rows_of_a_py_dataset_are_made_by_the_rank_that_trains_them(num_parts):
    whole = list(PyDatasetStream(Batches(), None, False, 0).dataset)
    joined = [[] for _ in whole]
    fingerprints = [set() for _ in whole]
    for part in range(num_parts):
        batches = Batches()
        rows = RowsOfPyDataset(PyDatasetStream(batches, None, False, 0))
        assert rows.tried(Parts.of_rank(part, num_parts))[0]
        rows.begin_epoch(1, Parts.of_rank(part, num_parts))
        batches.made.clear()
        for number, (header, (x, y)) in enumerate(rows.of_rank(Parts.of_rank(part, num_parts))):
            if header.shares[0] > 0:
                joined[number] += zip(x["x"].numpy().tolist(), y.numpy().tolist(), strict=True)
            assert len(y) == header.rows[0]
            fingerprints[number].add(int(header.fingerprint))
        assert len(batches.made) == len({*batches.made}) <= -(-ROWS // num_parts) + 3
    assert [len(found) for found in fingerprints] == [1, 1, 1]
    for rows, (x, y) in zip(joined, whole, strict=True):
        assert rows == list(zip(x["x"].numpy().tolist(), y.numpy().tolist(), strict=True))


def test_other_rows_of_a_py_dataset_are_found():
    rows = RowsOfPyDataset(PyDatasetStream(Batches(more=1.0), None, False, 0))
    assert not rows.tried(Parts.of_rank(0, 2))[0]
    with pytest.raises(DataError, match="gives other rows than the batch has, in batch 1"):
        rows.begin_epoch(1, Parts.of_rank(0, 2))
    fewer = RowsOfPyDataset(PyDatasetStream(Fewer(), None, False, 0))
    with pytest.raises(DataError, match=r"rows\(0, 0, 10\) of the PyDataset returned 9 rows, expected 10"):
        fewer.tried(Parts.of_rank(0, 2))


def test_ranks_with_other_batches_of_a_py_dataset_have_other_fingerprints():
    found = set()
    for more in (0.0, 0.5):
        batches = Batches()
        batches.rows = lambda index, begin, end, more=more: (
            X[20 * index + begin : 20 * index + end] + more,
            Y[begin:end],
        )
        batches.__class__ = type("Other", (Batches,), {"__getitem__": lambda self, index: self.rows(index, 0, 20)})
        rows = RowsOfPyDataset(PyDatasetStream(batches, None, False, 0))
        rows.begin_epoch(0, Parts.of_rank(0, 2))
        found |= {float(header.fingerprint) for header, _ in rows.of_rank(Parts.of_rank(0, 2)).take(1)}
    assert len(found) == 2
