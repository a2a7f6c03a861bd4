"""Evaluation and prediction of data that differ between ranks, and of outputs that are no numbers; see run_fit.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import OUTPUT, X, Y, compiled, dense, refused
from only import only

import ringtrain
from ringtrain import hvd
from ringtrain.data import part_of


class _Stops(keras.callbacks.Callback):
    """Counts this rank's batches; the last rank stops after its second one."""

    num_batches = 0

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        self.model.stop_predicting = batch == 1 and hvd.rank() == hvd.size() - 1


def _alike(model: keras.Model, data: Any, *expected: Any, steps: int | None = None) -> None:
    """All ranks get the results of one process."""
    logs = ringtrain.evaluate(model, data, steps=steps, verbose=0, return_dict=True)
    assert len(set(hvd.allgather_object(str(logs), name="results"))) == 1
    for name, value in model.evaluate(*expected, verbose=0, return_dict=True).items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-9, err_msg=name)


def evaluation_of_what_only_ranks_have() -> None:
    """Data of rank 0, of each rank, and in an order of each rank's own; what differs or fails is raised on all."""

    def pairs() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)

    def generated() -> Iterator[Any]:
        for begin in range(0, 100, 16):
            yield X[begin:][:16], Y[begin:][:16]

    def failing() -> Iterator[Any]:
        yield from generated()
        if hvd.rank() == hvd.size() - 1:
            raise ValueError("a broken file")

    def shard(rank: int, num_ranks: int) -> tf.data.Dataset:
        rows = slice(rank * 10, (rank + 1) * 10)
        return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(4)

    model, end = compiled(dense(), metrics=["mae"]), hvd.size() * 10
    _alike(model, ringtrain.from_rank_0(generated() if hvd.rank() == 0 else None), X, Y, steps=7)
    _alike(model, generated(), X[:48], Y[:48], steps=3)
    _alike(model, tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100).batch(16), X, Y)
    _alike(model, pairs().filter(lambda x, y: tf.shape(x)[0] == 16), X[:96], Y[:96])
    _alike(model, shard, X[:end], Y[:end])
    np.testing.assert_allclose(ringtrain.predict(model, shard, verbose=0), model.predict(X[:end], verbose=0), rtol=1e-9)

    stops = _Stops()
    ours = ringtrain.predict(model, X, batch_size=8, verbose=0, callbacks=[stops])
    begin, _ = part_of(13, hvd.size() - 1, hvd.size())
    np.testing.assert_array_equal(ours, model.predict(X[: (begin + 2) * 8], batch_size=8, verbose=0))
    assert 0 < stops.num_batches < 13, "each rank computes a part"

    other = X[:: 1 - 2 * (hvd.rank() == hvd.size() - 1)]
    refused(f"rank {hvd.size() - 1} has other data", lambda: ringtrain.predict(model, other, verbose=0))
    own = ((X + hvd.rank(), Y) for _ in range(3))
    refused("rank 1 has other data", lambda: ringtrain.evaluate(model, own, steps=3, verbose=0))
    refused("without an end", lambda: ringtrain.evaluate(model, pairs().repeat(), verbose=0))
    refused("without batches", lambda: ringtrain.predict(model, pairs().filter(lambda x, y: False), verbose=0))
    for function in (ringtrain.evaluate, ringtrain.predict):
        refused("a generator of held-out data", lambda one=function: one(model, generated(), verbose=0))
        try:
            function(model, failing(), steps=9, verbose=0)
        except Exception as error:
            assert "broken file" in str(error), error
        else:
            raise AssertionError("an error of one rank was not raised on all")


@only(np=2)
def evaluation_of_rows_that_share_a_shuffle() -> None:
    """With the training data, after a fit; also where rank 0 alone has read them, for a cache in a file."""

    def pipelines(file: str) -> tuple[tf.data.Dataset, tf.data.Dataset]:
        both = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, seed=4)
        train = both.skip(30)
        if file:
            train = train.cache(str(OUTPUT / f"{file}-{hvd.rank()}"))
        return train.batch(16), both.take(30).batch(16)

    for is_cached in (False, True):
        ours, reference = (compiled(dense(), metrics=["mae"]) for _ in range(2))
        train, held_out = pipelines("ours" * is_cached)
        ringtrain.fit(ours, train, epochs=2, verbose=0, validation_data=held_out)
        logs = [ringtrain.evaluate(ours, held_out, verbose=0, return_dict=True) for _ in range(2)]
        train, held_out = pipelines("reference" * is_cached)
        reference.fit(train, epochs=2, verbose=0, validation_data=held_out)
        for of_ranks in logs:
            for name, value in reference.evaluate(held_out, verbose=0, return_dict=True).items():
                np.testing.assert_allclose(of_ranks[name], value, rtol=1e-6, err_msg=name)
        assert logs[0] != logs[1], "each evaluation has other rows"


class OwnOutputs(keras.Model):
    """Unbuilt, with outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.last(inputs)

    def predict_step(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        counts = tf.cast(tf.abs(x[:, 0]) * 3, tf.int64)
        return {
            "words": tf.strings.as_string(counts),
            "half": tf.cast(self(x), tf.bfloat16),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(counts)), counts),
            "sparse": tf.sparse.from_dense(x > 0),
            "padded": tf.sequence_mask(counts, tf.reduce_max(counts)),
            "one": (tf.reduce_sum(x), self(x)),
        }


def predictions_of_any_kind() -> None:
    """Of rank 0's weights; the padded rows have another length in each batch."""
    keras.utils.set_random_seed(5 + hvd.rank())
    model = compiled(OwnOutputs())
    ours = ringtrain.predict(model, X, batch_size=16, verbose=0)
    hvd.check_in_sync(model)
    theirs = model.predict(X, batch_size=16, verbose=0)
    assert isinstance(theirs["padded"], tf.RaggedTensor)
    assert list(ours) == list(theirs)
    for name in ("words", "half"):
        assert ours[name].dtype == theirs[name].dtype
        np.testing.assert_array_equal(ours[name], theirs[name])
    for name in ("ragged", "padded"):
        assert ours[name].to_list() == theirs[name].to_list(), name
    np.testing.assert_array_equal(*(tf.sparse.to_dense(one["sparse"]) for one in (ours, theirs)))
    for one, other in zip(ours["one"], theirs["one"], strict=True):
        np.testing.assert_array_equal(one, other)
