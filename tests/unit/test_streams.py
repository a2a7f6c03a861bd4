"""Rows of a tf.data.Dataset's batches that each rank trains; ranks with other batches have other fingerprints."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from test_fit_alone import KillAfter, Killed, X, Y, _model

import ringtrain
from ringtrain import data, hvd
from ringtrain.config.sections import CheckpointConfig, Config, HealthConfig, RunConfig
from ringtrain.data.inputs import _is_random
from ringtrain.errors import ConfigError, DataError

pytestmark = pytest.mark.slow


def _ids() -> tf.data.Dataset:
    return tf.data.Dataset.range(50).shuffle(20, seed=7).batch(8).map(lambda rows: {"id": rows})


def _stream(x: Any, steps: int | None = None, epochs: int = 3, **more: Any) -> data.Stream:
    given = {"x": x, "epochs": epochs, "steps_per_epoch": steps, "shuffle": False}
    return data.splits_of(data.FitArguments(**given | more), 32)[0]


def _steps(streams: list[data.Stream], first: int = 0, first_step: int = 0) -> list[Any]:
    """Of each step of three epochs, from one on, the (fingerprint, rows) of each rank."""
    of_ranks = [stream.take_rows(data.Parts.of_rank(rank, len(streams))) for rank, stream in enumerate(streams)]
    for stream in streams * first:
        stream.end()
    steps: list[Any] = []
    for epoch in range(first, 3):
        skipped = first_step if epoch == first else 0
        left = streams[0].num_batches - skipped
        for step in zip(*(itertools.islice(rows(epoch, skipped), left) for rows in of_ranks), strict=True):
            steps.append([(float(header.fingerprint), part[0].numpy()[:, 0].tolist()) for header, part in step])
    return steps


def test_counting_changes_no_variable() -> None:
    drawn = tf.Variable(0.0)
    _stream(tf.data.Dataset.range(5).map(lambda row: drawn.assign_add(1.0)).filter(lambda row: row > 1).batch(2))
    assert drawn.numpy() == 0


def test_batches_read_without_training_are_progress() -> None:
    """So that a resume that reads for longer than the stall timeout is not ended."""
    before = hvd.step_timing.PHASES.changes
    stream = _stream(_ids().unbatch().filter(lambda row: row["id"] % 2 == 0).batch(4))
    counted = hvd.step_timing.PHASES.changes
    rows = stream.take_rows(data.Parts.of_rank(0, 1))
    stream.end()
    next(rows(1, 5))
    assert (counted - before, hvd.step_timing.PHASES.changes - counted) == (7, 5)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda ids: ids.shuffle(99), True),
        (lambda ids: ids.shuffle(99, seed=0).cache(), False),
        (lambda ids: ids.map(lambda row: tf.random.uniform([1])), True),
        (lambda ids: ids.map(lambda row: tf.random.uniform([1], seed=3)), False),
        (lambda ids: ids.map(lambda row: tf.numpy_function(np.random.permutation, [row], tf.int64)), False),
    ],
)
def test_a_pipeline_that_gives_others_each_time(transform: Any, expected: bool) -> None:
    tf.random.set_seed(None)
    ids = tf.data.Dataset.range(99)
    assert _is_random(transform(ids)) == expected
    assert len([*ids]) == 99


class Batches(keras.utils.PyDataset):
    """7 batches of 8 and 2 rows in an order of its own, with noise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order, self.made, self.begun = np.arange(50), [], 0

    num_batches = 7

    def __getitem__(self, index: int) -> Any:
        self.made.append(index)
        rows = self.order[index * 8 : (index + 1) * 8].astype("float32")
        return np.stack([rows, rows * 0 + np.random.rand() * (self.workers <= 1)], 1), X[:8, :3][: len(rows)]

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def _generated(num_batches: int = 99) -> Any:
    for index in range(num_batches):
        yield np.arange(8.0)[:, None] + 8 * index, np.zeros((8, 1))


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_of_a_py_dataset_depend_on_their_number_alone(workers: int) -> None:
    """With a shuffle of its own and random noise, on two ranks, which are compared, and after a resume."""

    def streams() -> list[data.Stream]:
        return [_stream(Batches(workers=workers), shuffle=True, seed=5) for _ in range(2)]

    np.random.seed(1)
    whole, state = _steps(streams()), np.random.get_state()[1].tolist()
    assert all(one == other for (one, _), (other, _) in whole)
    epochs = [[row for step in whole[7 * e : 7 * e + 7] for _, rows in step for row in rows] for e in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    begun = streams()
    resumed = _steps(begun, first=1, first_step=4)
    assert [[one for one, _ in step] for step in resumed] == [[one for one, _ in step] for step in whole[11:]]
    assert len(begun[0].source.made) == 2 + 3 + 7 and begun[0].source.begun == 3  # the signature needs two
    assert np.random.get_state()[1].tolist() == state  # the script's own numbers go on as they were


@pytest.mark.parametrize(
    ("x", "steps", "message"),
    [
        (_ids().repeat(), None, "without an end: pass steps_per_epoch"),
        (_ids(), 4, "of 7 batches for 3 epochs of steps_per_epoch 4, .*use repeat"),
        (_ids().take(0), None, "without batches"),
        (_generated(), None, "a generator without steps_per_epoch"),
        (X, 3, "got steps_per_epoch 3 with arrays of 4 batches of 32 rows.*a divisor of 4"),
        (Batches(), 4, "steps_per_epoch 4 and a PyDataset of 7 batches"),
    ],
)
def test_lengths_that_do_not_fit(x: Any, steps: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _stream(x, steps)


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    for arguments in ({"y": Y}, {"validation_split": 0.1}, {"batch_size": 8}):
        with pytest.raises(DataError, match=r"^ringtrain.fit: got .* tf.data.Dataset"):
            _fit(_model(), tmp_path, **arguments)
    with pytest.raises(DataError, match="got shuffle 'batch', expected True or False"):
        _stream(X, shuffle="batch")


def _pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X.astype("float32"), Y.astype("float32"))).shuffle(100, seed=2).batch(32)


def _fit(model: keras.Model, folder: Path, *callbacks: Any, **more: Any) -> Any:
    health, checkpoint = HealthConfig(agree_every_steps=1), CheckpointConfig(every_steps=1)
    options = Config(run=RunConfig(directory=str(folder)), checkpoint=checkpoint, health=health)
    x = more.pop("x", None) or _pairs()
    held_out = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(16)
    arguments = {"epochs": 3, "verbose": 0, "validation_data": held_out, "callbacks": callbacks}
    return ringtrain.fit(model, x, options=options, **arguments | more)


def _of_numpy(num_batches: int = 99) -> Any:
    draw = np.random.default_rng(1)
    for _ in range(num_batches):
        yield draw.normal(size=(16, 6)), draw.normal(size=(16, 3))


@pytest.mark.parametrize("what", ["steps at once", "batches"])
def test_a_resume_that_would_read_other_batches_is_refused(what: str, tmp_path: Path) -> None:
    """Batches are counted at each start. 10 steps of an epoch read and train 12 batches in calls of 4."""

    def fit(other: bool, *callbacks: Any) -> None:
        if what == "batches":
            x = _pairs().unbatch().filter(lambda x, y: x[0] > 0).batch(16)
            _fit(_model(), tmp_path, *callbacks, name="one", epochs=2, x=x.skip(1) if other else x)
        else:
            model = _model(steps_per_execution=1 if other else 4)
            _fit(model, tmp_path, *callbacks, name="one", epochs=2, x=_of_numpy(), steps_per_epoch=10)

    expected = {
        "steps at once": "steps_per_execution 4, this run has 1",
        "batches": "training samples 64, this run has 48",
    }
    with pytest.raises(Killed):
        fit(False, KillAfter(12 if what == "steps at once" else 3))
    with pytest.raises(ConfigError, match=f"made with {expected[what]}: give fit another name"):
        fit(True)


def _of_lengths(*lengths: int) -> tf.data.Dataset:
    """Batches whose number is another in each iteration, of which the first one is counted."""
    of_iterations = iter(lengths)
    spec = (tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 3], tf.float64))
    return tf.data.Dataset.from_generator(lambda: _of_numpy(next(of_iterations)), output_signature=spec)


def test_data_that_end_early_are_an_error(tmp_path: Path) -> None:
    """Of a rank's own shard, the other ranks would wait for the gradients of its next batches."""
    shard = _of_lengths(5, 5, 3, 5)
    with pytest.raises(DataError, match="the data ended on rank 0 after 8 batches of 3 epochs with 5 each"):
        _fit(_model(), tmp_path, x=lambda rank, size: shard)
    for steps in (1, 2):
        with pytest.raises(DataError, match=r"ended after [56] batches of 3 epochs with 4 each"):
            _fit(_model(steps_per_execution=steps), tmp_path, x=_of_numpy(4 + steps), steps_per_epoch=4)


def test_a_later_epoch_may_be_shorter_and_what_is_longer_is_not_trained(tmp_path: Path, capfd) -> None:
    _fit(_model(), tmp_path, x=_of_lengths(5, 5, 3, 5))
    shorter = capfd.readouterr().err
    assert "ended after 3 of 5 batches" in shorter and "not trained" not in shorter
    _fit(_model(), tmp_path, x=_of_lengths(2, 2, 3, 2))
    assert "an epoch of the data has more than 2 batches: not trained" in capfd.readouterr().err


def test_nothing_reads_on_after_training(tmp_path: Path) -> None:
    """A generator that tf.data still reads when the interpreter ends would keep the process alive."""

    def num_iterators() -> int:
        return sum(isinstance(one, iterator_ops.OwnedIterator) for one in gc.get_objects())

    gc.collect()
    gc.disable()  # nothing collects cycles when the interpreter ends
    try:
        before = num_iterators()
        history = _fit(_model(), tmp_path, x=_of_numpy(), steps_per_epoch=4)
        assert len(history.epoch) == 3 and num_iterators() == before
    finally:
        gc.enable()
