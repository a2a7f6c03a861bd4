"""Jobs of `ringtrain.evaluate` and `ringtrain.predict`, compared with Keras' own on all rows; see run_fit.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import CLASSES, SAME, SEQUENCES, WEIGHTS, X, Y, compiled, dense, options, refused

import ringtrain
from ringtrain import hvd


class _Seen(keras.callbacks.Callback):
    """Batches of this rank, and the metrics at the end."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.num_batches, self.logs, self.stop_at = 0, {}, stop_at

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        self.model.stop_predicting = batch == self.stop_at

    def on_test_end(self, logs: Any = None) -> None:
        self.logs = dict(logs)


def _evaluated(model: keras.Model, *arguments: Any, **more: Any) -> dict[str, Any]:
    """What all ranks get, which is equal on each."""
    seen = _Seen()
    logs = ringtrain.evaluate(model, *arguments, verbose=0, return_dict=True, callbacks=[seen], **more)
    assert seen.logs == logs
    assert len(set(hvd.allgather_object(str(logs), name="results"))) == 1
    return logs


def _alike(logs: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(logs) == list(expected), (logs, expected)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=1e-9, err_msg=name)


def _equals_keras(model: keras.Model, make: Callable[[], Any], steps: int | None = None) -> None:
    """Data that can be read again by another call of `make` give the results of one process."""
    _alike(_evaluated(model, make(), steps=steps), model.evaluate(make(), steps=steps, verbose=0, return_dict=True))
    np.testing.assert_array_equal(
        ringtrain.predict(model, make(), steps=steps, verbose=0), model.predict(make(), steps=steps, verbose=0)
    )


def evaluation_of_arrays() -> None:
    """Two inputs and outputs with masks and weights, after training; batches that the ranks do not divide."""
    keras.utils.set_random_seed(3)
    sequence, flat = keras.Input((5, 4), name="sequence"), keras.Input((6,), name="flat")
    steps = keras.layers.LSTM(5, return_sequences=True)(keras.layers.Masking()(sequence))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(flat))
    outputs = {"a": keras.layers.Dense(2, name="a")(steps), "b": keras.layers.Dense(1, name="b")(hidden)}

    def made(model: keras.Model) -> keras.Model:
        auc = keras.metrics.AUC(name="auc", from_logits=True)
        weighted = {"a": ["mae"]}
        return compiled(model, {"a": "mse", "b": "mse"}, weighted_metrics=weighted, metrics={"b": ["mae", auc]})

    model = made(keras.Model({"sequence": sequence, "flat": flat}, outputs))
    x = {"sequence": SEQUENCES, "flat": X}
    y = {"a": np.stack([Y[:, :2]] * 5, 1), "b": CLASSES[:, None] % 2}
    weights = {"a": np.ones((100, 1)), "b": WEIGHTS}
    history = ringtrain.fit(model, x, y, sample_weight=weights, **SAME, options=options())
    for rows in (16, 7, 64):
        given = {"sample_weight": weights, "batch_size": rows}
        expected = model.evaluate(x, y, verbose=0, return_dict=True, **given)
        _alike(_evaluated(model, x, y, **given), expected)
        listed = ringtrain.evaluate(model, x, y, rows, 0, weights)
        np.testing.assert_allclose(listed, model.evaluate(x, y, rows, 0, weights), rtol=1e-9)
        own = keras.tree.map_structure(lambda leaf: leaf[hvd.rank() :: hvd.size()], (x, y, weights))
        alone = model.evaluate(own[0], own[1], sample_weight=own[2], batch_size=rows, verbose=0, return_dict=True)
        assert abs(alone["loss"] - expected["loss"]) > 1e-6, "one rank's rows have the loss of all"
        ours, theirs = ringtrain.predict(model, x, rows, 0), model.predict(x, rows, 0)
        assert list(ours) == list(theirs)
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values)
    # Fewer batches than ranks; the first batches; a model from a file.
    saved = made(keras.models.load_model(history.run / "model.keras"))
    for rows, steps_ in ((1, None), (2, None), (100, 2)):
        pick = lambda nest: keras.tree.map_structure(lambda leaf: leaf[:rows], nest)  # noqa: B023, E731
        given = {"batch_size": 32, "steps": steps_}
        expected = model.evaluate(pick(x), pick(y), verbose=0, return_dict=True, **given)
        _alike(_evaluated(saved, pick(x), pick(y), **given), expected)
        ours = ringtrain.predict(saved, pick(x), verbose=0, **given)
        np.testing.assert_array_equal(ours["b"], model.predict(pick(x), verbose=0, **given)["b"])
    seen = _Seen()
    ringtrain.predict(model, x, batch_size=10, verbose=0, callbacks=[seen])
    assert sum(hvd.allgather_object(seen.num_batches, name="batches")) == 10 and seen.num_batches < 6
    refused("at least 1", lambda: ringtrain.predict(model, x, batch_size=0))
    other = keras.tree.map_structure(lambda leaf: leaf[:: 1 - 2 * (hvd.rank() == hvd.size() - 1)], x)
    refused(f"rank {hvd.size() - 1} has other data", lambda: ringtrain.predict(model, other, verbose=0))


class _Batches(keras.utils.PyDataset):
    def __getitem__(self, number: int) -> Any:
        return X[number * 16 :][:16], Y[number * 16 :][:16]

    def __len__(self) -> int:
        return 7


def evaluation_of_batches() -> None:
    """Datasets of known and unknown length, PyDataset, generators, and what only some ranks read."""

    def pairs() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)

    def generated(last: int = 7) -> Iterator[Any]:
        for number in range(last):
            yield X[number * 16 :][:16], Y[number * 16 :][:16]

    def failing() -> Iterator[Any]:
        yield from generated(3)
        if hvd.rank() == hvd.size() - 1:
            raise ValueError("a broken file")
        yield from generated()

    for per_call in (1, 3):
        model = compiled(dense(), metrics=["mae"], steps_per_execution=per_call)
        _equals_keras(model, pairs)
        _equals_keras(model, lambda: pairs().filter(lambda x, y: tf.shape(x)[0] > 1))
        _equals_keras(model, lambda: pairs().take(1))
        _equals_keras(model, lambda: pairs().repeat(), steps=9)
        _equals_keras(model, lambda: _Batches(workers=per_call))  # noqa: B023
        _equals_keras(model, generated)
        _equals_keras(model, generated, steps=2)
    expected = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    _alike(_evaluated(model, ringtrain.from_rank_0(generated() if hvd.rank() == 0 else None)), expected)
    unseeded = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100).batch(16)
    _alike(_evaluated(model, unseeded), model.evaluate(X, Y, batch_size=100, verbose=0, return_dict=True))

    def shard(rank: int, num_ranks: int) -> tf.data.Dataset:
        rows = slice(rank * 10, (rank + 1) * 10)
        return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(4)

    ours, end = ringtrain.predict(model, shard, verbose=0), hvd.size() * 10
    np.testing.assert_allclose(ours, model.predict(X[:end], verbose=0), rtol=1e-9)
    expected = model.evaluate(X[:end], Y[:end], verbose=0, return_dict=True)
    _alike(_evaluated(model, shard), expected)

    other = lambda: ((X + hvd.rank(), Y) for _ in range(3))  # noqa: E731
    refused("rank 1 has other data", lambda: ringtrain.evaluate(model, other(), verbose=0))
    refused("without an end", lambda: ringtrain.evaluate(model, pairs().repeat(), verbose=0))
    refused("without batches", lambda: ringtrain.predict(model, pairs().filter(lambda x, y: False), verbose=0))
    for function in (ringtrain.evaluate, ringtrain.predict):
        try:
            function(model, failing(), verbose=0)
        except Exception as error:
            assert "broken file" in str(error), error
        else:
            raise AssertionError("an error of one rank was not raised on all")


class _Maximum(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="maximum")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.cast(y, self.dtype))))

    def result(self) -> Any:
        return self.largest


class _Lasting(keras.metrics.Mean):
    def reset_state(self) -> None:
        """Keeps what it has counted."""


class OwnSteps(keras.Model):
    """Unbuilt, with a test step whose logs are no metrics, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.lasting = keras.layers.Dense(3), _Lasting("lasting")

    def call(self, inputs: Any) -> Any:
        return self.last(inputs)

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.lasting.update_state(tf.reduce_mean(y, -1))
        return {"first": tf.reduce_sum(self(x)[0]), "lasting": self.lasting.result()}

    def predict_step(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        counts = tf.cast(tf.abs(x[:, 0]) * 3, tf.int64)
        longest = tf.reduce_max(counts)
        return {
            "words": tf.strings.as_string(counts),
            "half": tf.cast(self(x), tf.bfloat16),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(counts)), counts),
            "sparse": tf.sparse.from_dense(x > 0),
            "padded": tf.sequence_mask(counts, longest),
            "one": (tf.reduce_sum(x), self(x)),
        }


def evaluation_of_own_models() -> None:
    keras.utils.set_random_seed(5 + hvd.rank())
    model, reference = OwnSteps(), OwnSteps()
    compiled(model), compiled(reference)
    ours = ringtrain.predict(model, X, batch_size=16, verbose=0)  # of rank 0's weights
    hvd.check_in_sync(model)
    reference(X[:1])
    reference.set_weights(model.get_weights())
    theirs = reference.predict(X, batch_size=16, verbose=0)
    assert isinstance(theirs["padded"], tf.RaggedTensor), "the later dimensions do not differ between batches"
    assert list(ours) == list(theirs)
    for name in ("words", "half"):
        assert ours[name].dtype == theirs[name].dtype
        np.testing.assert_array_equal(ours[name], theirs[name])
    for name in ("ragged", "padded"):
        assert ours[name].to_list() == theirs[name].to_list(), name
    np.testing.assert_array_equal(*(tf.sparse.to_dense(one["sparse"]) for one in (ours, theirs)))
    for one, other in zip(ours["one"], theirs["one"], strict=True):
        np.testing.assert_array_equal(one, other)
    for _ in range(2):  # the second one counts on
        _alike(
            _evaluated(model, X, Y, batch_size=16), reference.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
        )

    plain = compiled(dense(), metrics=[_Maximum(), "mae"])
    y = np.where(np.arange(100) == 50, 7.0, 0.0)[:, None] + np.zeros(3)
    assert _evaluated(plain, X, y, batch_size=8)["maximum"] == 7.0
    _alike(
        _evaluated(plain, X[:5], Y[:5], batch_size=1),
        plain.evaluate(X[:5], Y[:5], batch_size=1, verbose=0, return_dict=True),
    )
    # One rank stops after its second batch: what one process has until there.
    stops = _Seen(stop_at=1 if hvd.rank() == hvd.size() - 1 else -1)
    ours = ringtrain.predict(plain, X, batch_size=8, verbose=0, callbacks=keras.callbacks.CallbackList([stops]))
    np.testing.assert_array_equal(ours, plain.predict(X[: hvd.size() * 16], batch_size=8, verbose=0))
