"""Data that differ between ranks, or that Keras' `fit` in one process does not have; see run_fit.py."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import OUTPUT, KillAfter, Killed, X, Y, compiled, dense, distance, options, refused
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config.sections import CheckpointConfig

MORE: dict[str, Any] = {"epochs": 3, "verbose": 0, "validation_data": (X[:20], Y[:20])}


def _shard(rank: int, size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[rank:96:size], Y[rank:96:size])).batch(8)


def _fit(name: str, x: Any = _shard, **more: Any) -> tuple[keras.Model, Any]:
    model = compiled(dense(), metrics=["mae"])
    config = options(checkpoint=CheckpointConfig(every_steps=1))
    return model, ringtrain.fit(model, x, name=name, options=config, **MORE, **more)


@only(np=3)
def batches_of_each_rank() -> None:
    """As `fit` of one process with the batches of all ranks together; killed and resumed, as if never interrupted."""
    ours, history = _fit("shards")
    reference = compiled(dense(), metrics=["mae"])
    starts = range(0, 96 // hvd.size(), 8)
    rows = [np.arange(rank, 96, hvd.size())[at : at + 8] for at in starts for rank in range(hvd.size())]
    together = tf.data.Dataset.from_tensor_slices((X[np.concatenate(rows)], Y[np.concatenate(rows)]))
    expected = reference.fit(together.batch(8 * hvd.size()), **MORE)
    assert distance(ours, reference) < 1e-10
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)
    with contextlib.suppress(Killed):
        _fit("killed-shards", callbacks=[KillAfter(5)])
        raise AssertionError("was not killed")
    resumed, again = _fit("killed-shards")
    assert distance(ours, resumed) == 0 and again.history == history.history
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["numbers"]["global_batch_size"] == 8 * hvd.size()
    assert summary["unlike_one_process"]


@only(np=2)
def what_shards_cannot_be_is_refused() -> None:
    def pairs(rows: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8)

    refused("which returned tuple", lambda: _fit("", lambda rank, size: (X, Y)))
    refused("rank 1 has num_train", lambda: _fit("", lambda rank, size: _shard(rank, size).skip(rank)))
    refused("have as many rows on every rank", lambda: _fit("", lambda rank, size: pairs(40 - rank)))


@only(np=3)
def the_order_follows_from_seed_and_epoch() -> None:
    from ringtrain.data.row_order import permutation

    ours, reference = compiled(dense()), compiled(dense())
    ringtrain.fit(ours, X, Y, batch_size=32, epochs=2, seed=4, verbose=0, options=options())
    for epoch in range(2):
        order = permutation(100, 4, epoch)
        reference.fit(X[order], Y[order], batch_size=32, shuffle=False, verbose=0)
    assert distance(ours, reference) < 1e-10


def _rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:97], Y[:97]))


def _generated(num_batches: int = 99) -> Any:
    for index in range(num_batches):
        rows = np.arange(index, index + 30 - index % 4) % 100
        yield X[rows], Y[rows]


@only(np=2)
def random_pipelines() -> None:
    """Of a pipeline that would give each rank other batches, all train rank 0's."""
    for transform in (
        lambda rows: rows.shuffle(97).batch(32),
        lambda rows: rows.batch(32).map(lambda x, y: (x + tf.random.normal([6], dtype=x.dtype), y)),
    ):
        model = compiled(dense())
        tf.random.set_seed(None)  # dense() has set one
        with contextlib.redirect_stdout(io.StringIO()) as output:
            ringtrain.fit(model, transform(_rows()), epochs=2, validation_data=transform(_rows()), options=options())
        assert hvd.rank() or "rank 0, as each iteration of the first batches gives others" in output.getvalue()
        hvd.check_in_sync(model)
    own = _rows().batch(32).map(lambda x, y: (tf.numpy_function(lambda x: x + hvd.rank(), [x], x.dtype), y))
    own = own.map(lambda x, y: (tf.ensure_shape(x, [None, 6]), y))
    noise = keras.layers.GaussianNoise(0.1, seed=hvd.rank())
    by_rank = _rows().batch(32).map(lambda x, y: (noise(x, training=True), y))
    for x in (own, by_rank, _rows().shard(2, hvd.rank()).batch(32)):
        words = "other batches than rank 0, by step 1: give random operations of the dataset a seed"
        refused(words, lambda x=x: ringtrain.fit(compiled(dense()), x, verbose=0, options=options()))


def _queue(num_batches: int = 99) -> Any:
    """Batches that differ between ranks, as those of a queue would."""
    for index, (x, y) in enumerate(_generated(num_batches)):
        yield x + hvd.rank(), y
        if index == 20:
            raise ValueError("queue closed")


@only(np=2)
def batches_of_rank_0() -> None:
    """Rank 0's generator trains all ranks, killed and resumed; its end and its error end all ranks."""

    def sent(make: Any, *arguments: int) -> Any:
        return ringtrain.from_rank_0(make(*arguments) if hvd.rank() == 0 else None)

    def fit(name: str, batches: Any, held_out: Any, *callbacks: Any, steps: int = 4) -> tuple[keras.Model, Any]:
        model = compiled(dense(), metrics=["mae"])
        config = options(checkpoint=CheckpointConfig(every_steps=1))
        given: dict[str, Any] = {"epochs": 3, "verbose": 0, "name": name, "options": config, "callbacks": callbacks}
        given |= {"steps_per_epoch": steps, "validation_data": held_out, "validation_steps": 2}
        return model, ringtrain.fit(model, batches, **given)

    reference = compiled(dense(), metrics=["mae"])
    pair = tuple(np.concatenate(parts) for parts in zip(*_generated(2), strict=True))
    more: dict[str, Any] = {"validation_data": pair, "validation_batch_size": 30, "verbose": 0}
    expected = reference.fit(_generated(), steps_per_epoch=4, epochs=3, **more)
    with contextlib.suppress(Killed):
        fit("sent", sent(_queue), sent(_queue, 3), KillAfter(6))
        raise AssertionError("was not killed")
    ours, history = fit("sent", sent(_queue), sent(_queue, 3))
    assert distance(ours, reference) < 1e-10
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)
    for words, arguments in (
        ("the data ended after 5 batches", (sent(_queue, 5), None)),
        ("ValueError: queue closed", (sent(_queue), None)),
        ("has other batches than rank 0, by step 1", (_queue(), None)),
        ("has other validation data", (_generated(), _queue())),
        ("expected batches; of arrays, pass all", (sent(lambda: X), None)),
    ):
        refused(words, lambda arguments=arguments: fit("", *arguments, steps=10))


@only(np=2)
def another_order_on_a_rank_is_refused() -> None:
    keras.utils.set_random_seed(hvd.rank())
    shuffled = _rows().shuffle(97).batch(32)  # before dense() sets one seed on all ranks
    fit = lambda *data, **more: ringtrain.fit(compiled(dense()), *data, verbose=0, options=options(), **more)  # noqa: E731
    refused("other batches than rank 0, by step 1", lambda: fit(shuffled, epochs=2))

    def from_batch_13_on() -> Any:
        for index, (x, y) in enumerate(_generated()):
            yield x + hvd.rank() * (index >= 13), y

    refused("other batches than rank 0, by step 20", lambda: fit(from_batch_13_on(), steps_per_epoch=40))
    held_out = _rows().shuffle(97, seed=hvd.rank()).batch(32)
    refused("other validation data than rank 0", lambda: fit(X, Y, validation_data=held_out))


@only(np=2)
def a_cache_in_a_file_of_all_ranks() -> None:
    """One process can write it: rank 0 reads for all."""

    def batches(name: str) -> tf.data.Dataset:
        return _rows().map(lambda x, y: (2 * x, y)).cache(str(OUTPUT / name)).batch(32)

    ours, reference = compiled(dense()), compiled(dense())
    words = {"epochs": 2, "verbose": 0}
    ringtrain.fit(ours, batches("cached-ours"), validation_data=batches("cached-held-out"), options=options(), **words)
    reference.fit(batches(f"cached-reference-{hvd.rank()}"), **words)
    assert distance(ours, reference) < 1e-10
