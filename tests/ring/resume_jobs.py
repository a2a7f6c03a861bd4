"""Jobs that end within an epoch and resume, with callbacks and averages that change a model; see run_fit.py."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_alike import OUTPUT, KillAfter, Killed, X, Y, compiled, dense, distance, options
from only import only

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config.sections import CheckpointConfig, HealthConfig, with_values

AT_ONCE = HealthConfig(agree_every_steps=1)


def _fit(name: str, make: Callable[[], keras.Model], *callbacks: Any, **more: Any) -> tuple[keras.Model, Any]:
    model, config = make(), options(health=AT_ONCE, **more)
    arguments = {"batch_size": 32, "epochs": 3, "validation_data": (X[:40], Y[:40]), "verbose": 0}
    return model, ringtrain.fit(model, X, Y, name=name, callbacks=callbacks, options=config, **arguments)


def _plain() -> keras.Model:
    return compiled(dense(), optimizer=keras.optimizers.SGD(0.2, momentum=0.9))


@only(np=2)
def a_run_goes_on_from_its_mirror() -> None:
    """Killed within an epoch on a host whose disk is then lost: the weights and files of a run that was not."""
    if importlib.util.find_spec("fsspec") is None:
        return  # an extra, which CI installs
    whole, history = _fit("mirror-whole", _plain, checkpoint=CheckpointConfig(every_steps=1))

    def mirrored(*callbacks: Any) -> tuple[keras.Model, Any]:
        config = options(health=AT_ONCE, checkpoint=CheckpointConfig(every_steps=1))
        config = with_values(config, {"run.mirror": str(OUTPUT / f"mirror-{hvd.size()}")})
        model, arguments = _plain(), {"batch_size": 32, "epochs": 3, "validation_data": (X[:40], Y[:40]), "verbose": 0}
        return model, ringtrain.fit(model, X, Y, name="lost", callbacks=callbacks, options=config, **arguments)

    with contextlib.suppress(Killed):
        mirrored(KillAfter(7))
        raise AssertionError("was not killed")
    run = OUTPUT / f"runs-{hvd.size()}" / "lost"
    while hvd.rank() == 0 and run.exists():
        shutil.rmtree(run, ignore_errors=True)  # the thread of the killed run may still write into it
    hvd.allgather_object(0, name="the_disk_is_lost")
    resumed, again = mirrored()
    assert distance(whole, resumed) == 0, distance(whole, resumed)
    assert history.history == again.history
    there = OUTPUT / f"mirror-{hvd.size()}" / "lost"
    hvd.allgather_object(0, name="the_mirror_is_written")
    for name in ("summary.json", "metrics.jsonl", "logs/journal-0.jsonl"):
        assert (there / name).read_bytes() == (run / name).read_bytes(), name
    saved = [sorted(path.name[:13] for path in (folder / "checkpoints").iterdir()) for folder in (run, there)]
    assert saved[0] == saved[1], saved


class LogsOfARank(keras.Model):
    """Returns logs of other names and shapes on each rank, and one of all ranks."""

    def train_step(self, data: Any) -> Any:
        logs = {f"of_{hvd.rank()}": tf.constant(1.0), "sizes": tf.zeros([1 + hvd.rank()])}
        return super().train_step(data) | logs | {"rank": tf.constant(float(hvd.rank()))}


@only(np=2)
def logs_that_differ_by_rank() -> None:
    """They are named once and left out, also for callbacks, which must decide the same on all ranks."""
    seen: list[set[str]] = []
    sees = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append({*logs}))

    def make() -> keras.Model:
        base = dense()
        return compiled(LogsOfARank(base.inputs, base.outputs))

    with contextlib.redirect_stderr(io.StringIO()) as said:
        ringtrain.fit(make(), X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[sees], options=options())
    assert seen == [{"loss", "rank"}] * 2, seen
    text = "left out are logs that not all ranks have in one shape: of_0, of_1"
    assert said.getvalue().count(text) == (hvd.rank() == 0), said.getvalue()


@only(np=2)
def a_callback_ends_a_loss_of_nan_quietly() -> None:
    """On all ranks, without an error and without a checkpoint."""
    y = Y.copy()
    y[-1] = np.nan  # in the last batch of the first epoch, on the last rank
    given = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0, "name": "nan"}
    config = options(checkpoint=CheckpointConfig(every_steps=1), health=AT_ONCE)
    history = ringtrain.fit(_plain(), X, y, callbacks=[keras.callbacks.TerminateOnNaN()], options=config, **given)
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "a callback" and summary["global_step"] == 4
    hvd.allgather_object("ended")
    saved = sorted(path.name for path in (history.run / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-00000003", saved


def seeds_go_on_with_another_number_of_ranks() -> None:
    """Begun by 2 ranks and continued by 3: no rank draws the numbers of its first epoch again, or another rank's."""
    seen: list[Any] = []

    class Sees(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append([seed.numpy().tolist() for seed in (*hvd.seeds(self.model), *hvd.global_seed())])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            keras.random.uniform(())

    def fit(*callbacks: Any, name: str = "seeds") -> None:
        config = options("seeds", checkpoint=CheckpointConfig(every_steps=1))
        model = compiled(dense(keras.layers.Dropout(0.2), keras.layers.Dropout(0.2)))
        given = {"batch_size": 32, "epochs": 2, "verbose": 0, "name": name, "options": config}
        ringtrain.fit(model, X, Y, callbacks=[Sees(), *callbacks], **given)

    if hvd.size() == 2:
        with contextlib.suppress(Killed):
            fit(KillAfter(6))
            raise AssertionError("was not killed")
        return
    fit()
    fit(name="seeds-begun")
    states, begun = zip(*hvd.allgather_object(seen), strict=True)
    for drawn in zip(*states, *begun, strict=True):  # of one generator, on all ranks of both runs
        assert len({tuple(state) for state in drawn}) == 2 * hvd.size(), (states, begun)
    if hvd.rank() == 0:
        counts = [[state[1] for state in of_rank_0[:2]] for of_rank_0 in (states[0], begun[0])]
        assert counts == [[6, 6], [0, 0]], counts
