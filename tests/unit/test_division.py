"""Pipelines of tf.data of which each rank makes its own rows: joined, they are those of the script's pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data.division import division_of
from ringtrain.data.parts import Parts

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


NO_MAP, NO_BATCH = "no map() stands right before batch()", "it does not end with batch()"
WHOLE = {
    "no map": (lambda: rows().batch(16), NO_MAP),
    "random": (lambda: rows().map(drawn).batch(16), "map() with random_uniform"),
    "a Python function": (
        lambda: rows().map(lambda x, y: (tf.numpy_function(np.negative, [x], tf.float32), y)).batch(16),
        "map() with a Python function",
    ),
    "shuffle after map": (lambda: rows().map(twice).shuffle(9, seed=1).batch(16), NO_MAP),
    "shuffle after batch": (lambda: rows().map(twice).batch(16).shuffle(3, seed=1), NO_BATCH),
    "padded": (lambda: rows().map(twice).padded_batch(16), NO_BATCH),
    "no batch": (lambda: tf.data.Dataset.from_tensors((X, Y)).map(twice), NO_BATCH),
    "other shapes": (
        lambda: rows().window(3).flat_map(lambda x, y: x.batch(3)).map(tf.reduce_sum).batch(4),
        "its rows before map() may have several shapes",
    ),
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
    assert division is None and why.startswith(expected), why


@pytest.mark.parametrize("num_parts", [1, 3, 20])
@pytest.mark.parametrize(
    "finish",
    [
        lambda data: data.batch(16, drop_remainder=True),
        lambda data: data.batch(16, num_parallel_calls=2).repeat(2),
        lambda data: data.batch(16).repeat(1).prefetch(1).repeat(2),
    ],
)
def test_joined_parts_are_the_batches(num_parts, finish) -> None:
    """Of two epochs with their own orders, and with functions that change the shapes and the nest."""

    def make() -> tf.data.Dataset:
        mapped = rows().shuffle(20, seed=3).map(twice).prefetch(1)
        return finish(mapped.map(lambda x, y: ({"x": tf.tile(x, [2])}, tf.strings.as_string(y)), num_parallel_calls=2))

    of_ranks = []
    for rank in range(num_parts):
        division, why = division_of(make())
        assert division, why
        own = division.of_rank(Parts.of_rank(rank, num_parts))
        of_ranks.append([*own, *own])
    whole = make()
    for (x, y), *parts in zip([*whole, *whole], *of_ranks, strict=True):
        assert len({float(header.fingerprint) for header, _ in parts}) == 1
        np.testing.assert_allclose(sum(float(header.shares[0]) for header, _ in parts), num_parts)
        own = [part for header, part in parts if header.shares[0] > 0]
        np.testing.assert_array_equal(np.concatenate([part[0]["x"] for part in own]), x["x"])
        np.testing.assert_array_equal(np.concatenate([part[1] for part in own]), y)


def test_a_generator_with_a_state_loses_no_rows() -> None:
    """It is not read before training begins."""
    numbers = iter(range(100))
    spec = tf.TensorSpec([], tf.int64)
    generated = tf.data.Dataset.from_generator(lambda: numbers, output_signature=spec)
    division, _ = division_of(generated.map(lambda n: 2 * n).batch(4))
    assert division
    (_, first), *_ = division.of_rank(Parts.of_rank(0, 2)).take(1)
    assert first.numpy().tolist() == [0, 2]
