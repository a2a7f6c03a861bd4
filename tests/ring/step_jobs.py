"""Steps with numbers, variables or failures that differ between ranks, and steps that XLA compiles; see run_fit.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import SAME, WEIGHTS, X, Y, compiled, dense, equals_one_process, options
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config.sections import TrainConfig
from ringtrain.errors import RingtrainError
from ringtrain.hvd import train_step


class Prepared(keras.Model):
    """Scales rows in `fit` and `evaluate`, as the tasks of KerasHub do; validation has the rows of `fit`."""

    def fit(self, x: Any, y: Any, validation_data: Any, **more: Any) -> Any:
        if isinstance(validation_data, tf.data.Dataset):
            validation_data = validation_data.map(lambda held_out, targets: (held_out / 2, targets))
        else:
            validation_data = (validation_data[0] / 2, validation_data[1])
        return super().fit(x / 2, y, validation_data=validation_data, **more)

    def evaluate(self, x: Any = None, y: Any = None, **more: Any) -> Any:
        if not more.get("_use_cached_eval_dataset"):
            x = x / 2
        return super().evaluate(x, y, **more)


def _prepared() -> keras.Model:
    inputs = keras.Input((6,))
    return compiled(Prepared(inputs, dense()(inputs)))


@only(np=2)
def rows_that_a_fit_prepares_are_evaluated_as_they_are() -> None:
    equals_one_process(_prepared, X, Y, "prepared-in-fit", validation_data=(X[:40], Y[:40]))
    of_unknown_length = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(20).filter(lambda *_: True)
    equals_one_process(_prepared, X, Y, "prepared-unknown-length", validation_data=of_unknown_length)


class Picky(keras.layers.Layer):
    """Cannot compute a batch of evaluation whose first number is above 1000."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            return x
        with tf.control_dependencies([tf.debugging.assert_less(x[0, 0], tf.cast(1000, x.dtype))]):
            return tf.identity(x)


@only(np=2)
def a_failure_of_evaluation_on_one_rank_is_raised_on_all() -> None:
    """Rank 0 alone has a row to evaluate; scripts may catch the error, and continue together."""
    model = compiled(keras.Sequential([keras.Input((6,)), Picky(), keras.layers.Dense(3)]))
    held_out = (np.full((1, 6), 2000.0), np.zeros((1, 3)))
    try:
        ringtrain.fit(model, X, Y, validation_data=held_out, name="picky", options=options(), **SAME)
        raise AssertionError("nothing was raised")
    except (tf.errors.InvalidArgumentError, RingtrainError) as error:
        assert isinstance(error, RingtrainError) == (hvd.rank() > 0), error
        assert hvd.rank() == 0 or ("rank 0 on " in str(error) and "InvalidArgumentError" in str(error)), error
    assert hvd.allgather_object(hvd.rank(), name="after_picky") == list(range(hvd.size()))


@only(np=3)
def compiled_by_xla() -> None:
    """Unequal parts, by the option or as compiled; what XLA cannot do is named, or trained without it."""

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if train_step.has_layer(self.model, "ranks"):  # not in Keras' own fit
                compiles.add(train_step.has_layer(self.model, "jit"))

    compiles: set[bool] = set()
    by_option = {"options": options(train=TrainConfig(jit=True))}
    equals_one_process(lambda: compiled(dense()), X, Y, "xla", callbacks=[Noting()], **by_option)
    assert compiles == {True}
    compiles.clear()
    weights = {"sample_weight": WEIGHTS}
    equals_one_process(lambda: compiled(dense(), jit_compile=True), X, Y, "no-xla", callbacks=[Noting()], **weights)
    assert compiles == {False}
