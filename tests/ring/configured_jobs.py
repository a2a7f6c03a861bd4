"""Jobs of the configured trainer with data and losses of a script, for run_fit.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from fit_alike import CLASSES, OUTPUT, ROOT, WEIGHTS, Killed, X, Y, snippet
from only import only

import ringtrain.hvd as hvd
from ringtrain import config_io, train
from ringtrain.errors import ConfigError

SGD = ["--optimizer.name", "sgd", "--optimizer.momentum", "0", "--optimizer.learning-rate", "0.05"]
MSE = [*SGD, "--optimizer.learning-rate-scaling", "none", "--model.loss", "mse", "--model.metrics", "mae"]


HELD_OUT = {"seed": 1}
"""of the order of validation data"""

# ---- what the configuration names ----------------------------------------------------------------------------------


def _frame() -> dict[str, Any]:
    table = pd.DataFrame(X.astype(np.float32), columns=[*"abcdef"])
    return {"x": table, "y": pd.Series(Y[:, 0]), "validation_split": 0.1, "shuffle": False}


def _batches(**seed: Any) -> Any:
    pairs = tf.data.Dataset.from_tensor_slices((X, Y))
    return pairs.shuffle(100, **seed).batch(32), pairs.take(20).shuffle(20, seed=HELD_OUT["seed"]).batch(16)


def _seeded() -> Any:
    return _batches(seed=3)


def _unseeded() -> Any:
    return _batches()


def _nested() -> dict[str, Any]:
    rest = {"shuffle": False, "sample_weight": {"a": WEIGHTS, "b": WEIGHTS}}
    return {"x": {"left": X[:, :2], "right": X[:, 2:]}, "y": {"a": Y[:, :1], "b": CLASSES}, **rest}


def _dense(input_shape: tuple[int, ...], num_targets: int) -> keras.Model:
    hidden = keras.layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input(input_shape), hidden, keras.layers.Dense(num_targets)])


def _two_outputs(input_shape: dict[str, tuple[int, ...]], num_targets: int) -> keras.Model:
    inputs = {name: keras.Input(shape, name=name) for name, shape in input_shape.items()}
    hidden = keras.layers.Concatenate()([*inputs.values()])
    outputs = {"a": keras.layers.Dense(1, name="a")(hidden), "b": keras.layers.Dense(3, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.SGD(0.05), {"a": "mse", "b": classes}, weighted_metrics={"b": ["accuracy"]})
    return model


class KillOnce(keras.callbacks.Callback):
    """Ends its first run after five steps."""

    is_done = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not KillOnce.is_done and int(self.model.optimizer.iterations) == 5:
            KillOnce.is_done = True
            raise Killed


# ---- jobs ----------------------------------------------------------------------------------------------------------


def _train(source: str, model: str, name: str, *options: str) -> dict[str, Any]:
    words = ["--data.name", f"configured_jobs:{source}", "--model.name", f"configured_jobs:{model}"]
    words += ["--train.batch-size", str(32 // hvd.size()), "--train.epochs", "3"]
    words += ["--run.directory", str(OUTPUT / f"configured-{hvd.size()}"), "--run.name", name]
    return train.train(config_io.read([*words, "--tracking.every-steps", "0", *options]))


def _is_that_of_keras(name: str, model: Callable[..., Any], shape: Any, targets: int, **arguments: Any) -> None:
    """The run's model and metrics are those of Keras' `fit` in one process, in float32."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    reference = model(shape, targets)
    if not reference.compiled:
        reference.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    history = reference.fit(**arguments, epochs=3, verbose=0)
    folder = OUTPUT / f"configured-{hvd.size()}" / name
    ours = keras.models.load_model(folder / "model.keras", compile=False)
    for one, other in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for metric, values in history.history.items():
        received = [record[metric.replace("val_", "test_")] for record in records]
        np.testing.assert_allclose(received, values, rtol=1e-4, err_msg=metric)


@only(np=2)
def configured_regression() -> None:
    """From a table of pandas: killed within an epoch and resumed, as if never interrupted, and as Keras."""
    options = [*MSE, "--checkpoint.every-steps", "1"]
    options += ["--train.callbacks", "configured_jobs:KillOnce"]
    try:
        _train("_frame", "_dense", "killed", *options)
    except Killed:
        pass
    else:
        raise AssertionError("not killed")
    resumed = _train("_frame", "_dense", "killed", *options)
    whole = _train("_frame", "_dense", "whole", *options)
    assert resumed["resumed_from"] and resumed["checksum"] == whole["checksum"]
    assert whole["numbers"]["global_batch_size"] == 32 and whole["on_resume"] == "nothing is read again"
    _is_that_of_keras("killed", _dense, (6,), 1, **_frame(), batch_size=32)


@only(np=2)
def configured_batches() -> None:
    """Of tf.data: ended by a signal to one rank and resumed, as Keras; without a seed, rank 0's batches.

    The order of validation data may be another one after a resume, but not on a rank.
    """
    options = [*MSE, "--health.agree-every-steps", "1"]
    chaos = ["--chaos", "rank=1 step=6 mode=sigterm"]
    stopped = _train("_seeded", "_dense", "batches", *options, *chaos)
    assert stopped["stopped_by"] == "SIGTERM" and stopped["global_step"] < 12
    HELD_OUT["seed"] = 2
    resumed = _train("_seeded", "_dense", "batches", *options, *chaos)  # the fault happens once
    assert resumed["resumed_from"] and resumed["global_step"] == 12
    tf.random.set_seed(None)  # as in a new process
    train_batches, held_out = _seeded()
    _is_that_of_keras("batches", _dense, (6,), 3, x=train_batches, validation_data=held_out, shuffle=False)
    unseeded = _train("_unseeded", "_dense", "unseeded", *options)
    assert unseeded["global_step"] == 12 and "with other random numbers" in unseeded["on_resume"]
    HELD_OUT["seed"] = hvd.rank()
    try:
        _train("_seeded", "_dense", "other-order", *options)
    except ConfigError as error:
        assert "rank 1 on " in str(error) and "test data" in str(error), error
    else:
        raise AssertionError("trained with other orders of validation data")
    finally:
        HELD_OUT["seed"] = 1


@only(np=2)
def configured_inputs_and_outputs() -> None:
    """A compiled model with two inputs and outputs; the divisor of a loss is another on each rank."""
    _train("_nested", "_two_outputs", "nested")
    _is_that_of_keras("nested", _two_outputs, {"left": (2,), "right": (4,)}, 0, **_nested(), batch_size=32)


@only(np=2)
def configured_snippet() -> None:
    """Several runs in one process, of fewer epochs."""
    rate = '"--optimizer.learning-rate", rate'
    shorter = (rate, f'{rate}, "--train.epochs", "1", "--run.directory", {str(OUTPUT / "of-models")!r}')
    text = snippet("docs/models.md", "from ringtrain import config_io, train", shorter)
    keras.config.set_floatx("float32")
    os.chdir(ROOT)
    exec(text, {})
    assert len([*(OUTPUT / "of-models").glob("*/summary.json")]) == 2
