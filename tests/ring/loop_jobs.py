"""Jobs of `ringtrain.loop`, of `initial_epoch`, and of scripts with several fits, for run_fit.py."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import Killed, X, Y, dense, distance, options
from only import only, quick

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config import CheckpointConfig, HealthConfig

LOSS = keras.losses.MeanSquaredError()
STEPS = 4
"""batches of an epoch, of which the last one has 4 rows"""


def _batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, seed=4).batch(32)


def _step(model: keras.Model, optimizer: Any, metric: Any, wrap: Any = lambda tape: tape) -> Any:
    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = LOSS(y, outputs)
        gradients = wrap(tape).gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        metric.update_state(y, outputs)
        return loss

    return step


def _parts() -> tuple[keras.Model, Any, Any]:
    return dense(), keras.optimizers.Adam(0.01, use_ema=True), keras.metrics.MeanAbsoluteError("mae")


def _begun(name: str, model: Any, optimizer: Any, metrics: Any = (), **more: Any) -> Any:
    config = options(checkpoint=CheckpointConfig(every_steps=1), health=HealthConfig(agree_every_steps=1))
    arguments = {"epochs": 3, "steps_per_epoch": STEPS, "batch_size": 32, "verbose": False, "options": config}
    return ringtrain.loop(model, optimizer, name=name, metrics=metrics, **arguments | more)


def _looped(name: str, end: int = -1, kill: bool = False) -> tuple[Any, Any, list[float]]:
    """Trains a loop; before step `end`, it is interrupted, or one rank gets a signal."""
    model, optimizer, metric = _parts()
    step, seen, data = _step(model, optimizer, metric), [], _batches()
    with _begun(name, model, optimizer, [metric]) as run:
        for epoch in run.epochs():
            for number, (x, y) in run.batches(data):
                if number == end and kill:
                    raise Killed
                if number == end and hvd.rank():
                    os.kill(os.getpid(), signal.SIGTERM)
                run.log(loss=step(x, y))
            seen.append(float(metric.result()))
            run.log(twice=2.0 * epoch + hvd.rank())
    return model, run, seen


def _alone() -> tuple[keras.Model, list[float], list[float]]:
    """The same loop in one process; means of the loss are over rows."""
    model, optimizer, metric = _parts()
    step, seen, losses, data = _step(model, optimizer, metric), [], [], _batches()
    for _ in range(3):
        metric.reset_state()
        rows = [(float(step(x, y)), len(x)) for x, y in data]
        losses.append(float(np.mean([loss for loss, _ in rows])))
        seen.append(float(metric.result()))
    return model, seen, losses


@only(np=2)
@quick
def a_loop_trains_the_model_of_one_process() -> None:
    """With parts of unequal size; killed within an epoch, or ended by a signal, it resumes exactly."""
    alone, expected, losses = _alone()
    model, run, seen = _looped("loop")
    assert distance(model, alone) < 1e-10, distance(model, alone)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    assert run.history["mae"] == seen
    np.testing.assert_allclose(run.history["loss"], losses, rtol=1e-6)
    np.testing.assert_allclose(run.history["twice"], [0.5, 2.5, 4.5])
    assert (run.folder / "model.keras").exists()

    with contextlib.suppress(Killed):
        _looped("loop-killed", end=6, kill=True)
        raise AssertionError("was not killed")
    try:
        _looped("loop-killed", end=9)
    except SystemExit as ended:
        assert ended.code == 143
    else:
        raise AssertionError("not ended")
    resumed, again, _ = _looped("loop-killed")
    assert again.checksum == run.checksum and distance(resumed, model) == 0
    assert again.history == run.history
    complete, done, seen = _looped("loop-killed", end=0, kill=True)
    assert distance(complete, model) == 0 and done.history == run.history and not seen


def a_loop_refuses_what_would_train_apart() -> None:
    """Gradients that are not averaged, or twice; steps that are left; a loss of NaN; a model without weights."""
    tape = hvd.DistributedGradientTape

    def rows(run: Any) -> Iterator[Any]:
        for number in run.steps():
            begin = 10 * number + 5 * hvd.rank()
            yield X[begin:][:5], Y[begin:][:5]

    def trained(num_steps: int = 9, wrap: Any = lambda tape: tape, before: bool = False, **more: Any) -> Any:
        model, optimizer, metric = more.pop("parts", None) or _parts()
        step = _step(model, optimizer, metric, wrap)
        if before:
            step(X[:5], Y[:5])
        with _begun("", model, optimizer, [metric], epochs=2, **more) as run:
            for _ in run.epochs():
                for (x, y), _ in zip(rows(run), range(num_steps), strict=False):
                    bad = np.nan if num_steps == 8 and hvd.rank() else 1.0
                    run.log(loss=step(bad * x, y))
        return run

    assert trained(wrap=tape, distribute=False).global_step == 8
    unbuilt = keras.Sequential([keras.layers.Dense(3)]), keras.optimizers.SGD(), keras.metrics.Mean()
    for words, arguments in (
        ("rank 1 differs in|distribute=False needs", {"distribute": False}),
        ("rank 1 differs in|was traced before", {"before": True}),
        ("average gradients already", {"wrap": tape}),
        ("has left the steps of epoch 1 after 2 of 4", {"num_steps": 2}),
        ("non-finite loss on rank 1", {"num_steps": 8}),
        ("has no weights yet", {"parts": unbuilt}),
        ("train.virtual_ranks", {"options": {"train.virtual_ranks": 2}}),
    ):
        try:
            trained(**arguments)
        except (ringtrain.errors.RingtrainError, ValueError) as error:
            assert all(part in str(error) for part in words.split("|")), error
        else:
            raise AssertionError(f"trained in spite of {words}")
