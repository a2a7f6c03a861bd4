"""Jobs of `ringtrain.loop`, of `initial_epoch`, and of scripts with several fits, for run_fit.py."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import KillAfter, Killed, X, Y, compiled, dense, distance, equals_one_process, options
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


@only(np=3)
def a_mean_of_numbers_counts_by_rows() -> None:
    """As guides track the loss of a batch, of which ranks have parts of unequal size."""

    def steps(model: keras.Model, optimizer: Any, mean: Any) -> Any:
        step = _step(model, optimizer, keras.metrics.MeanAbsoluteError())

        def counted(x: Any, y: Any) -> None:
            mean.update_state(step(x, y))

        return counted

    model, optimizer, _ = _parts()
    mean, data = keras.metrics.Mean("of_steps"), _batches()
    step = steps(model, optimizer, mean)
    for x, y in data:
        step(x, y)
    expected = float(mean.result())

    model, optimizer, _ = _parts()
    mean, data = keras.metrics.Mean("of_steps"), _batches()
    step = steps(model, optimizer, mean)
    with _begun("means", model, optimizer, [mean], epochs=1) as run:
        for _, (x, y) in run.batches(data):
            step(x, y)
        mean.reset_state()
        mean.update_state(2.0)  # the script's own, after the steps
        mean.update_state(4.0)
        assert float(mean.count) == 2.0
    np.testing.assert_allclose(run.history["of_steps"], [expected], rtol=1e-6)


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


def _adversarial(name: str, end: int = -1) -> Any:
    """Two models with an optimizer each, of which one trains against the other, on random numbers."""
    keras.utils.set_random_seed(5)
    maker = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)], name="maker")
    judge = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)], name="judge")
    of_maker, of_judge = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)

    @tf.function
    def step(real: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            judge_loss = tf.reduce_mean(judge(maker(keras.random.normal((16, 2)))) - judge(real, training=True))
        of_judge.apply(tape.gradient(judge_loss, judge.trainable_weights), judge.trainable_weights)
        with tf.GradientTape() as tape:
            maker_loss = -tf.reduce_mean(judge(maker(keras.random.normal((16, 2)))))
        of_maker.apply(tape.gradient(maker_loss, maker.trainable_weights), maker.trainable_weights)
        return maker_loss, judge_loss

    with _begun(name, [maker, judge], [of_maker, of_judge], steps_per_epoch=3, epochs=2) as run:
        for number in run.steps():
            if number == end:
                raise Killed
            maker_loss, judge_loss = step(X[32 * (number % 3) :][run.rows(32)])
            run.log(maker_loss=maker_loss, judge_loss=judge_loss)
    return run


@only(np=2)
def a_loop_with_two_models_resumes() -> None:
    run = _adversarial("loop-two")
    with contextlib.suppress(Killed):
        _adversarial("loop-two-killed", end=4)
        raise AssertionError("was not killed")
    again = _adversarial("loop-two-killed")
    assert again.checksum == run.checksum and again.history == run.history
    assert {"maker.keras", "judge.keras"} <= {path.name for path in run.folder.iterdir()}


@only(np=2)
@quick
def what_a_loop_trains_but_does_not_save_is_named() -> None:
    """A target network that follows the trained one, as in DDPG."""
    said = []
    for num_models in (1, 2):
        model, optimizer, metric = _parts()
        target = keras.models.clone_model(model)
        optimizer.build(model.trainable_variables)
        step = _step(model, optimizer, metric)
        models = [model, target][:num_models]
        run, batches = _begun(f"targets-{num_models}", models, optimizer, [metric], epochs=1), _batches()
        with contextlib.redirect_stderr(io.StringIO()) as stderr, run:
            for _, (x, y) in run.batches(batches):
                run.log(loss=step(x, y))
                target.set_weights(model.get_weights())
        said.append(stderr.getvalue())
    named = "is of no model, optimizer or metric of the loop: it is not saved"
    assert (named in said[0]) == (hvd.rank() == 0)
    assert named not in said[1]


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


@only(np=2)
def an_initial_epoch_is_that_of_keras() -> None:
    """Arrays, and batches of which all epochs are one iteration; under a name, the checkpoint decides."""

    def make() -> keras.Model:
        return compiled(dense(), metrics=["mae"])

    def endless() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(32).repeat()

    more = {"initial_epoch": 2, "epochs": 5, "validation_data": (X[:40], Y[:40]), "validation_freq": [1, 4]}
    every = {"options": options(checkpoint=CheckpointConfig(every_steps=1))}
    _, history = equals_one_process(make, X, Y, "initial", killed=True, **more, **every)
    assert history.epoch == [2, 3, 4] and len(history.history["val_loss"]) == 1
    short = {"steps_per_epoch": 2, "batch_size": None, "initial_epoch": 1, "epochs": 3}
    equals_one_process(make, endless(), None, "initial-endless", killed=False, **short)
    # What began with epoch 0 goes on where it was, and keeps its order of the batches.
    arguments = {"steps_per_epoch": 2, "shuffle": False, "verbose": 0, "options": options()}
    ringtrain.fit(make(), endless(), name="initial-later", epochs=1, **arguments)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model = make()
        ringtrain.fit(model, endless(), name="initial-later", epochs=4, initial_epoch=2, **arguments)
    assert said.getvalue().count("in epoch 1, counted from 0, instead of initial_epoch 2") == (hvd.rank() == 0)
    alone = make()
    alone.fit(endless(), epochs=4, steps_per_epoch=2, shuffle=False, verbose=0)
    assert distance(model, alone) < 1e-10


@only(np=2)
def several_fits_resume_in_the_right_one() -> None:
    """Frozen, trained, thawed and trained: killed in either fit, the script resumes in it."""

    def script(name: str, *kills: int) -> tuple[keras.Model, list[Any]]:
        model = dense(keras.layers.Dense(4, name="inner"))
        histories = []
        for number in range(2):
            model.get_layer("inner").trainable = number == 1
            model.compile(keras.optimizers.Adam(0.01), "mse")
            callbacks = [KillAfter(kill) for kill in kills[number : number + 1]]
            arguments = {"batch_size": 32, "epochs": 2, "verbose": 0, "callbacks": callbacks}
            config = options(checkpoint=CheckpointConfig(every_steps=1))
            histories.append(ringtrain.fit(model, X, Y, name=f"{name}-{number}", options=config, **arguments))
        return model, histories

    model, histories = script("thawed")
    for kills in ((3,), (99, 6)):  # steps of the first fit, and of the second
        with contextlib.suppress(Killed):
            script("thawed-killed", *kills)
            raise AssertionError("was not killed")
    resumed, again = script("thawed-killed")
    assert distance(model, resumed) == 0
    assert [one.checksum for one in again] == [one.checksum for one in histories]
    assert [one.history for one in again] == [one.history for one in histories]
