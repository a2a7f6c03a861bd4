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


def _ids(num_rows: int = 50, batch_size: int = 8, seed: int | None = 7) -> tf.data.Dataset:
    ids = tf.data.Dataset.range(num_rows)
    return ids.shuffle(20, seed=seed).batch(batch_size).map(lambda rows: {"id": rows})


def _stream(x: Any, steps: int | None = None, epochs: int = 3, **more: Any) -> data.Stream:
    given = {"x": x, "epochs": epochs, "steps_per_epoch": steps, "shuffle": False}
    return data.splits_of(data.FitArguments(**given | more), 32)[0]


def _epochs(make: Any, size: int, epochs: int, first: int = 0, first_step: int = 0) -> list[Any]:
    """Steps of some epochs; of each, the (share, fingerprint, rows) of each rank."""
    streams = [made if isinstance(made := make(), data.Stream) else _stream(made) for _ in range(size)]
    ranks = [stream.take_rows(data.Parts.of_rank(rank, size)) for rank, stream in enumerate(streams)]
    steps: list[Any] = []
    for stream in streams * first:
        stream.end()
    for epoch in range(first, epochs):
        skipped = first_step if epoch == first else 0
        batches = [rows(epoch, skipped) for rows in ranks]
        of_epoch = zip(*(itertools.islice(rank, streams[0].num_batches - skipped) for rank in batches), strict=True)
        for step in of_epoch:
            pairs = step if size > 1 else [(data.Header(tf.ones([1]), tf.ones([1]), tf.zeros([])), step[0])]
            steps.append([(float(one.shares[0]), float(one.fingerprint), _ids_of(part)) for one, part in pairs])
    return steps


def _ids_of(part: Any) -> Any:
    leaf = keras.tree.flatten(part)[0].numpy()
    return leaf if leaf.ndim == 1 else leaf[:, 0]


def test_a_shuffle_without_a_seed_has_other_fingerprints() -> None:
    ranks = _epochs(lambda: _ids(seed=None), 2, 1)[0]
    assert len({fingerprint for _, fingerprint, _ in ranks}) == 2
    fingerprints = [ranks[0][1] for ranks in _epochs(_ids, 2, 2)]
    assert len(set(fingerprints)) == len(fingerprints) and max(fingerprints) < 2**31


def test_batch_size_and_part() -> None:
    assert _stream(_ids().prefetch(2)).batch_size == 8
    assert _stream(tf.data.Dataset.range(12).batch(4, drop_remainder=True)).batch_size == 4
    assert _stream(tf.data.Dataset.from_tensors(tf.range(5)).take(1)).batch_size == 5
    assert _stream(Batches()).batch_size == _stream(_generated(), 5).batch_size == 8


def test_an_evaluation_in_parts_reads_all_batches_once() -> None:
    """With the orders of Keras, which begins a second iterator after each that it has read to its end."""
    data = tf.data.Dataset.range(20).shuffle(20, seed=7).batch(3)
    expected = [[batch.numpy().tolist() for batch in data] for _ in range(5)][::2]
    stream = _stream(tf.data.Dataset.range(20).shuffle(20, seed=7).batch(3))
    stream.is_held_out = True
    found = []
    for _ in range(3):
        stream.begin_evaluation()
        found.append([batch.numpy().tolist() for part in (range(1, 3), range(4, 6)) for batch in stream.part(part)])
        stream.end()
    assert found == [[epoch[index] for index in (1, 2, 4, 5)] for epoch in expected]
    resumed = _stream(tf.data.Dataset.range(20).shuffle(20, seed=7).batch(3))
    resumed.end()
    resumed.end()
    resumed.begin_evaluation()
    assert [batch.numpy().tolist() for batch in resumed.part(range(7))] == expected[2]


def test_validation_data_in_another_order_have_another_checksum() -> None:
    def checksum(seed: int | None) -> int:
        stream = _stream(_ids(seed=seed))
        stream.is_held_out = True
        return stream.checksum()

    assert checksum(7) == checksum(7) != checksum(8) and checksum(None) != checksum(None)
    assert _stream(_ids(seed=None)).checksum() == _stream(_ids(seed=None)).checksum()


def _even_ids(cached: bool = False) -> tf.data.Dataset:
    ids = _ids().unbatch().filter(lambda row: row["id"] % 2 == 0).batch(4)
    return ids.cache().shuffle(3, seed=1) if cached else ids


def test_counting_changes_no_variable() -> None:
    drawn = tf.Variable(0.0)
    _stream(tf.data.Dataset.range(5).map(lambda row: drawn.assign_add(1.0)).filter(lambda row: row > 1).batch(2))
    assert drawn.numpy() == 0


def test_batches_read_without_training_are_progress() -> None:
    """So that a resume that reads for longer than the stall timeout is not ended."""
    before = hvd.step_timing.PLACE.changes
    stream = _stream(_even_ids())
    counted = hvd.step_timing.PLACE.changes
    rows = stream.take_rows(data.Parts.of_rank(0, 1))
    stream.end()
    next(rows(1, 5))
    assert (counted - before, hvd.step_timing.PLACE.changes - counted) == (7, 5)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda ids: ids.shuffle(99), True),
        (lambda ids: ids.shuffle(99, seed=0).cache(), False),
        (lambda ids: ids.map(lambda row: tf.random.uniform([1])), True),
        (lambda ids: ids.map(lambda row: tf.random.uniform([1], seed=3)), False),
        (lambda ids: ids.map(lambda row: tf.strings.as_string(row), num_parallel_calls=2), False),
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

    def make() -> data.Stream:
        return _stream(Batches(workers=workers), shuffle=True, seed=5)

    np.random.seed(1)
    whole, state = _epochs(make, 2, 3), np.random.get_state()[1].tolist()
    assert all(one[1] == other[1] for one, other in whole)
    rows = [sorted(row for step in whole[7 * e : 7 * e + 7] for _, _, rows in step for row in rows) for e in range(3)]
    assert rows == [list(range(50))] * 3
    orders = [[row for step in whole[7 * e : 7 * e + 7] for _, _, rows in step for row in rows] for e in range(3)]
    assert orders[0] != orders[1] != orders[2]
    made: list[Any] = []
    resumed = _epochs(lambda: made.append(make()) or made[-1], 2, 3, first=1, first_step=4)
    assert [[one[1] for one in step] for step in resumed] == [[one[1] for one in step] for step in whole[11:]]
    assert len(made[0].source.made) == 2 + 3 + 7 and made[0].source.begun == 3  # the signature needs two
    assert np.random.get_state()[1].tolist() == state  # the script's own numbers go on as they were


def test_steps_of_training_say_nothing_of_the_batches_of_validation() -> None:
    rows, held_out = np.zeros(1000), np.zeros(5000)
    given = data.FitArguments(x=rows, y=rows, steps_per_epoch=2, validation_data=(held_out, held_out))
    sizes = data.with_batch_sizes(given)
    assert (sizes.batch_size, sizes.validation_batch_size) == (500, 32)


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


def test_a_shuffle_of_a_kind_that_keras_has_for_files_is_refused() -> None:
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


def test_another_number_of_steps_at_once_is_refused_where_it_reads_other_batches(tmp_path: Path) -> None:
    """10 steps of an epoch read and train 12 batches in calls of 4."""

    def fit(name: str, steps: int, *callbacks: Any, **more: Any) -> keras.Model:
        model = _model(steps_per_execution=steps)
        _fit(model, tmp_path, *callbacks, name=name, epochs=2, **more)
        return model

    endless = {"steps_per_epoch": 10}
    with pytest.raises(Killed):
        fit("endless", 4, KillAfter(12), x=_of_numpy(), **endless)
    with pytest.raises(ConfigError, match="made with steps_per_execution 4, this run has 1: give fit another name"):
        fit("endless", 1, x=_of_numpy(), **endless)


def test_another_number_of_batches_without_a_seed_is_refused(tmp_path: Path) -> None:
    """They are counted at each start."""
    of_unknown_length = _pairs().unbatch().filter(lambda x, y: x[0] > 0).batch(16)
    with pytest.raises(Killed):
        _fit(_model(), tmp_path, KillAfter(3), name="counted", x=of_unknown_length)
    with pytest.raises(ConfigError, match="made with training samples 64, this run has 48: give fit another name"):
        _fit(_model(), tmp_path, name="counted", x=of_unknown_length.skip(1))


def test_a_shard_that_ends_early_is_an_error(tmp_path: Path) -> None:
    """The other ranks would wait for the gradients of its next batches."""
    of_iterations = iter((5, 5, 3, 5))

    def batches() -> Any:
        yield from _of_numpy(next(of_iterations))

    spec = (tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 3], tf.float64))
    shard = tf.data.Dataset.from_generator(batches, output_signature=spec)
    with pytest.raises(DataError, match="the data ended on rank 0 after 8 batches of 3 epochs with 5 each"):
        _fit(_model(), tmp_path, x=lambda rank, size: shard)


@pytest.mark.parametrize("steps", [1, 2])
def test_data_that_end_early_are_an_error(steps: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ended after [56] batches of 3 epochs with 4 each"):
        _fit(_model(steps_per_execution=steps), tmp_path, x=_of_numpy(4 + steps), steps_per_epoch=4)


def test_a_later_epoch_may_be_shorter_and_what_is_longer_is_not_trained(tmp_path: Path, capfd) -> None:
    def fit(*lengths: int) -> str:
        of_iterations = iter(lengths)  # the first one is counted
        spec = (tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 3], tf.float64))
        x = tf.data.Dataset.from_generator(lambda: _of_numpy(next(of_iterations)), output_signature=spec)
        _fit(_model(), tmp_path, x=x)
        return capfd.readouterr().err

    shorter = fit(5, 5, 3, 5)
    assert "ended after 3 of 5 batches" in shorter and "not trained" not in shorter
    assert "an epoch of the data has more than 2 batches: not trained" in fit(2, 2, 3, 2)


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


def test_arguments_that_arrays_have(tmp_path: Path) -> None:
    for arguments in ({"y": Y}, {"validation_split": 0.1}, {"batch_size": 8}):
        with pytest.raises(DataError, match=r"^ringtrain.fit: got .* tf.data.Dataset"):
            ringtrain.fit(_model(), _pairs(), options=Config(run=RunConfig(directory=str(tmp_path))), **arguments)
