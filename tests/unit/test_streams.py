"""Rows of a tf.data.Dataset's batches that each rank trains; ranks with other batches have other fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_fit_alone import KillAfter, Killed, X, Y, _model, _weights

import ringtrain
from ringtrain import data
from ringtrain.config import CheckpointConfig, Config, HealthConfig, RunConfig
from ringtrain.errors import ConfigError, DataError


def _ids(num_rows: int = 50, batch_size: int = 8, seed: int | None = 7) -> tf.data.Dataset:
    ids = tf.data.Dataset.range(num_rows)
    return ids.shuffle(20, seed=seed).batch(batch_size).map(lambda rows: {"id": rows})


def _epochs(make: Any, size: int, epochs: int, first: int = 0, first_step: int = 0) -> list[Any]:
    """Steps of some epochs; of each, the (share, fingerprint, rows) of each rank."""
    ranks = [data.StreamRows(data.Stream(make()), rank, size) for rank in range(size)]
    steps: list[Any] = []
    for epoch in range(first, epochs):
        batches = [rows(epoch, first_step if epoch == first else 0) for rows in ranks]
        steps += zip(*([(*one.numpy(), part["id"].numpy()) for one, part in rank] for rank in batches), strict=True)
    return steps


@pytest.mark.parametrize(("num_rows", "size"), [(50, 1), (50, 2), (50, 3), (49, 2)])
def test_every_row_once_per_epoch(num_rows: int, size: int) -> None:
    steps = _epochs(lambda: _ids(num_rows), size, 1)
    trained = [row for ranks in steps for share, _, rows in ranks if share for row in rows]
    assert sorted(trained) == list(range(num_rows))
    for ranks in steps:
        num_in_step = sum(len(rows) for share, _, rows in ranks if share)
        for share, _, rows in ranks:
            assert share == pytest.approx(len(rows) * size / num_in_step) or (share == 0 and len(rows) == 1)
        assert len({fingerprint for _, fingerprint, _ in ranks}) == 1


def test_a_shuffle_without_a_seed_has_other_fingerprints() -> None:
    ranks = _epochs(lambda: _ids(seed=None), 2, 1)[0]
    assert len({fingerprint for _, fingerprint, _ in ranks}) == 2
    fingerprints = [fingerprint for ((_, fingerprint, _),) in _epochs(_ids, 1, 2)]
    assert len(set(fingerprints)) == len(fingerprints) and max(fingerprints) < 2**31


def test_epochs_are_keras_and_a_resumed_one_is_the_same() -> None:
    dataset = _ids()
    iterations = [[batch["id"].numpy().tolist() for batch in dataset] for _ in range(5)]
    keras_rows = [*iterations[0], *iterations[2], *iterations[4]]
    rows = [ranks[0][2].tolist() for ranks in _epochs(_ids, 1, 3)]
    assert rows == keras_rows and rows[:7] != rows[7:14]
    assert [ranks[0][2].tolist() for ranks in _epochs(_ids, 1, 3, first=1, first_step=3)] == rows[10:]


def test_sparse_and_ragged_rows() -> None:
    dense = np.eye(6)
    parts = {"sparse": tf.sparse.from_dense(dense), "ragged": tf.ragged.constant([[i] * i for i in range(6)])}
    dataset = tf.data.Dataset.from_tensor_slices(parts).batch(6)
    _, part = next(data.StreamRows(data.Stream(dataset), 1, 4)(0))
    assert tf.sparse.to_dense(part["sparse"]).numpy().tolist() == dense[2:4].tolist()
    assert part["ragged"].to_list() == [[2, 2], [3, 3, 3]]


def test_batch_size_and_part() -> None:
    assert data.Stream(_ids().prefetch(2)).batch_size == 8
    assert data.Stream(tf.data.Dataset.range(12).batch(4, drop_remainder=True)).batch_size == 4
    assert data.Stream(tf.data.Dataset.from_tensors(tf.range(5)).take(1)).batch_size == 5
    part = data.Stream(tf.data.Dataset.range(10).batch(3)).part(np.arange(1, 3))
    assert [batch.numpy().tolist() for batch in part] == [[3, 4, 5], [6, 7, 8]]
    assert not list(data.Stream(_ids()).part(np.arange(0)))


@pytest.mark.parametrize(("dataset", "length"), [(_ids().repeat(), "infinite"), (_ids().unbatch().batch(4), "unknown")])
def test_a_length_that_is_not_known_is_refused(dataset: tf.data.Dataset, length: str) -> None:
    with pytest.raises(DataError, match=f"whose length is {length}, .*assert_cardinality"):
        data.Stream(dataset)


def _pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X.astype("float32"), Y.astype("float32"))).shuffle(100, seed=2).batch(32)


def _fit(model: keras.Model, folder: Path, *callbacks: Any, **more: Any) -> Any:
    health, checkpoint = HealthConfig(agree_every_steps=1), CheckpointConfig(every_steps=1)
    options = Config(run=RunConfig(directory=str(folder)), checkpoint=checkpoint, health=health)
    held_out = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(16)
    arguments = {"epochs": 3, "verbose": 0, "validation_data": held_out, "callbacks": callbacks}
    return ringtrain.fit(model, _pairs(), options=options, **arguments | more)


def test_alone_it_is_keras_fit(tmp_path: Path) -> None:
    ours, reference = _model(), _model()
    history = _fit(ours, tmp_path)
    held_out = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(16)
    expected = reference.fit(_pairs(), epochs=3, verbose=0, validation_data=held_out)
    for one, other in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6)


@pytest.mark.parametrize("step", [2, 4, 9])
def test_killed_and_resumed(step: int, tmp_path: Path) -> None:
    whole, resumed = _model(), _model()
    history = _fit(whole, tmp_path, name="whole")
    with pytest.raises(Killed):
        _fit(_model(), tmp_path, KillAfter(step), name="killed")
    again = _fit(resumed, tmp_path, name="killed")
    assert again.history == history.history
    for ours, theirs in zip(_weights(whole), _weights(resumed), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_arguments_that_arrays_have(tmp_path: Path) -> None:
    for arguments, kind in (
        ({"y": Y}, DataError),
        ({"validation_split": 0.1}, DataError),
        ({"batch_size": 8}, ConfigError),
    ):
        with pytest.raises(kind, match=r"^ringtrain.fit: got .* tf.data.Dataset"):
            ringtrain.fit(_model(), _pairs(), options=Config(run=RunConfig(directory=str(tmp_path))), **arguments)
