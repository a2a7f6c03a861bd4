"""Rows that Spark streams to a rank: each rank trains its own part, and all ranks each row once."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from typing import Any

import batches
import numpy as np
import pytest

from ringtrain import data
from ringtrain.config.sections import DataConfig
from ringtrain.data.spark_rows import spark
from ringtrain.errors import DataError
from ringtrain.protocol.env import FEED

NUM_TRAIN, NUM_TEST, SIZE = 50, 11, 3


def rows_of(rank: int) -> list[Any]:
    """Row k of the training data is [k, k], of the test data [-k, -k]; ranks get them alternately."""
    rows: list[Any] = [(0, k // SIZE, np.full(2, k, np.float32), k % 5) for k in range(NUM_TRAIN) if k % SIZE == rank]
    return rows + [(1, k // SIZE, np.full(2, -k, np.float32), k % 5) for k in range(NUM_TEST) if k % SIZE == rank]


def streamed(rank: int, rows: list[Any]) -> data.DataSet:
    reading, writing = os.pipe()

    def stream() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            for row in rows:
                pickle.dump(row, pipe)

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        return spark(DataConfig(name="spark"), {FEED: f"{reading} {rank} {SIZE} {NUM_TRAIN} {NUM_TEST} 5"})
    finally:
        thread.join()


def numbers_in(found: list[Any]) -> list[list[int]]:
    """Numbers of the rows in each batch."""
    for inputs, labels in found:
        assert (inputs.numpy()[:, 0] % 5 == labels.numpy()).all()
    return [inputs.numpy()[:, 0].astype(int).tolist() for inputs, _ in found]


@pytest.mark.parametrize(("batch_size", "last"), [(9, [2, 2, 1]), (12, [1, 1, 0]), (15, [2, 2, 1]), (24, [1, 1, 0])])
def test_every_row_is_trained_once_by_the_rank_that_has_it(batch_size: int, last: list[int]) -> None:
    """A rank without a row in the last batch reads one of its own, which counts nothing."""
    orders = []
    for epoch in range(2):
        trained: list[int] = []
        for rank in range(SIZE):
            train = streamed(rank, [*rows_of(rank), None]).train
            found = numbers_in(batches.of_rank(train, batch_size, rank, SIZE, epoch=epoch))
            assert [len(step) for step in found] == [batch_size // SIZE] * (NUM_TRAIN // batch_size) + [
                max(last[rank], 1)
            ]
            assert all(number % SIZE == rank for step in found for number in step)
            assert numbers_in(batches.of_rank(train, batch_size, rank, SIZE, epoch=epoch, first_step=1)) == found[1:]
            trained += [number for step in found[: None if last[rank] else -1] for number in step]
            order = train.order_of_pass(batch_size, 3, epoch)
            orders.append(np.concatenate([order.rows(step) for step in range(order.num_steps)]).tolist())
        assert sorted(trained) == list(range(NUM_TRAIN)) == sorted(orders[-1])
    assert orders[0] == orders[1] == orders[2] != orders[3] == orders[5], "every rank knows the whole order"


def test_every_test_row_is_evaluated_once() -> None:
    tested: list[Any] = []
    for rank in range(SIZE):
        data_set = streamed(rank, [*rows_of(rank), None])
        assert (len(data_set.train), len(data_set.test), data_set.num_classes) == (NUM_TRAIN, NUM_TEST, 5)
        tested += data.evaluation_batches(data_set.test, data_set.test.shard(rank, SIZE), 4)
    assert sorted(-number for inputs, _ in tested for number in inputs.numpy()[:, 0]) == list(range(NUM_TEST))


def test_errors_of_the_stream() -> None:
    with pytest.raises(DataError, match="the row stream was interrupted"):
        streamed(0, rows_of(0))
    with pytest.raises(DataError, match=r"1 of 17 rows of rank 0 did not arrive, of 50 training rows"):
        streamed(0, [*rows_of(0)[1:], None])
    with pytest.raises(DataError, match="rows differ in shape or type"):
        streamed(0, [(0, 0, np.zeros(2), 0), (0, 1, np.zeros(3), 0), None])
    with pytest.raises(DataError, match="--launcher spark --spark-data"):
        data.source(DataConfig(name="spark"))()
