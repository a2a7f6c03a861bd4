"""Samples that are fed to a rank: each rank's own, in equal steps; what is said when they break off."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from ringtrain import data
from ringtrain.config import DataConfig
from ringtrain.data.spark_rows import spark
from ringtrain.errors import DataError
from ringtrain.protocol.env import FEED

NUM_TRAIN, NUM_TEST, SIZE = 50, 11, 3


def rows_of(rank: int) -> list[Any]:
    """Sample k of the training data is [k, k], of the test data [-k, -k]; dealt out in turns."""
    rows: list[Any] = [(0, k // SIZE, np.full(2, k, np.float32), k % 5) for k in range(NUM_TRAIN) if k % SIZE == rank]
    return rows + [(1, k // SIZE, np.full(2, -k, np.float32), k % 5) for k in range(NUM_TEST) if k % SIZE == rank]


def fed(rank: int, rows: list[Any]) -> data.DataSet:
    reading, writing = os.pipe()

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            for row in rows:
                pickle.dump(row, pipe)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        return spark(DataConfig(name="spark"), {FEED: f"{reading} {rank} {SIZE} {NUM_TRAIN} {NUM_TEST} 5"})
    finally:
        thread.join()


def test_every_sample_belongs_to_one_rank_and_is_trained_once_in_equal_steps() -> None:
    sets = [fed(rank, [*rows_of(rank), None]) for rank in range(SIZE)]
    batch_size = 4
    seen: list[list[np.ndarray]] = []
    for rank, each in enumerate(sets):
        assert (len(each.train), len(each.test), each.num_classes) == (NUM_TRAIN, NUM_TEST, 5)
        batches = list(data.training_batches(each.train, batch_size, rank, SIZE, seed=1, epochs=2))
        assert [inputs.shape for inputs, _ in batches] == [(batch_size, 2)] * 2 * (NUM_TRAIN // (batch_size * SIZE))
        assert all((inputs.numpy()[:, 0] % 5 == labels.numpy()).all() for inputs, labels in batches)
        seen.append([inputs.numpy()[:, 0] for inputs, _ in batches])
    steps = len(seen[0]) // 2
    for epoch in (slice(0, steps), slice(steps, None)):
        numbers = [int(number) for one in seen for number in np.concatenate(one[epoch])]
        assert len(numbers) == len({*numbers}) == steps * batch_size * SIZE
    assert not np.array_equal(seen[0][:steps], seen[0][steps:])
    orders = {each.train.epoch_order(batch_size * SIZE, 1, 0).tobytes() for each in sets}
    assert len(orders) == 1, "every rank knows the whole order"
    resumed = list(data.training_batches(sets[1].train, batch_size, 1, SIZE, seed=1, epochs=2, first_step=steps + 1))
    assert np.array_equal([inputs.numpy()[:, 0] for inputs, _ in resumed], seen[1][steps + 1 :])
    tested = []
    for rank, each in enumerate(sets):
        own = data.evaluation_shard(NUM_TEST, rank, SIZE)
        tested += [int(x[0]) for inputs, _ in data.evaluation_batches(each.test, own, 4) for x in inputs.numpy()]
    assert sorted(tested) == list(range(1 - NUM_TEST, 1))


def test_rows_that_break_off_are_told() -> None:
    with pytest.raises(DataError, match="the row stream was interrupted"):
        fed(0, rows_of(0))
    with pytest.raises(DataError, match=r"1 of 17 rows of rank 0 did not arrive, of 50 training rows"):
        fed(0, [*rows_of(0)[1:], None])
    with pytest.raises(DataError, match="rows differ in shape or type"):
        fed(0, [(0, 0, np.zeros(2), 0), (0, 1, np.zeros(3), 0), None])


def test_a_process_that_nobody_feeds_says_who_would() -> None:
    with pytest.raises(DataError, match="--launcher spark --spark-data"):
        data.source(DataConfig(name="spark"))()
