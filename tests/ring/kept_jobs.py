"""Jobs of scripts that keep Keras' own `fit`, with `hvd.callbacks.Run`, for run_fit.py."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import keras
import numpy as np
from fit_alike import X, Y, compiled, dense, distance, options
from only import only

import ringtrain.hvd as hvd
from ringtrain.config import HealthConfig, HvdConfig
from ringtrain.errors import RingtrainError

ROWS, BATCH = 96, 32


def _shard(rows: Any) -> Any:
    """This rank's part of every batch."""
    batches = np.array_split(rows[:ROWS], ROWS // BATCH)
    return np.concatenate([np.array_split(batch, hvd.size())[hvd.rank()] for batch in batches])


def _model(wrap: Any = hvd.DistributedOptimizer) -> keras.Model:
    return compiled(dense(), optimizer=wrap(keras.optimizers.SGD(0.05, momentum=0.9)), metrics=["mae"])


def _fit(name: str, epochs: int, *callbacks: keras.callbacks.Callback, **more: Any) -> tuple[keras.Model, Any, Any]:
    model = _model()
    if hvd.rank():
        model.set_weights([weight + 1 for weight in model.get_weights()])
    config = options(health=HealthConfig(agree_every_steps=1))
    run = hvd.callbacks.Run(name, batch_size=BATCH // hvd.size(), options=config)
    arguments = {"batch_size": BATCH // hvd.size(), "shuffle": False, "verbose": 0, **more}
    history = model.fit(_shard(X), _shard(Y), epochs=epochs, callbacks=[run, *callbacks], **arguments)
    return model, history, run


def _alone(epochs: int, **more: Any) -> tuple[keras.Model, Any]:
    model = _model(lambda optimizer: optimizer)
    return model, model.fit(X[:ROWS], Y[:ROWS], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **more)


@only(np=2)
def a_kept_fit_resumes_after_a_whole_epoch() -> None:
    """Weights and metrics are those of one process; rank 0's weights are used; a complete run trains nothing."""
    held_out = (X[96:], Y[96:])
    alone, expected = _alone(4, validation_data=held_out)
    rank = slice(96 + 2 * hvd.rank(), 98 + 2 * hvd.rank())
    validation = {"validation_data": (X[rank], Y[rank])}
    _, history, run = _fit("kept", 2, **validation)
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values[:2], rtol=1e-6, err_msg=metric)
    model, history, run = _fit("kept", 4, **validation)
    assert history.epoch == [2, 3]
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)
    assert distance(model, alone) < 1e-10, distance(model, alone)
    assert len(set(hvd.allgather_object(run.checksum))) == 1
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["global_step"] == 12 and summary["resumed_from"] and (run.folder / "model.keras").exists()
    for metric, values in expected.history.items():
        np.testing.assert_allclose(summary["metrics"][metric], values[-1], rtol=1e-6, err_msg=metric)
    trained = history.history
    again, history, run = _fit("kept", 4, **validation)
    assert history.history == trained
    assert not history.epoch and distance(again, alone) < 1e-10


@only(np=2)
def a_kept_fit_ends_on_all_ranks() -> None:
    """SIGTERM to one rank within an epoch; started again, that epoch is trained as if nothing had happened."""

    def send(epoch: int, logs: Any) -> None:
        if epoch == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    alone, _ = _alone(3)
    sender = keras.callbacks.LambdaCallback(on_epoch_begin=send)
    try:
        _fit("kept-ended", 3, sender)
    except SystemExit as end:
        assert end.code == 143, end.code
    else:
        raise AssertionError("not ended")
    model, history, _ = _fit("kept-ended", 3)
    assert history.epoch == [1, 2]
    assert distance(model, alone) < 1e-10


@only(np=2)
def a_kept_fit_refuses_what_cannot_work() -> None:
    run = hvd.callbacks.Run("kept-refused", batch_size=16, options=options())
    late = hvd.callbacks.Run("kept-refused", batch_size=16, options=options(hvd=HvdConfig(compression="fp16")))
    for message, wrap, rows in (
        ("options set hvd.compression: leave it out, pass it to", hvd.DistributedOptimizer, 32),
        ("the optimizer is not distributed", lambda optimizer: optimizer, 32),
        ("different numbers of batches", hvd.DistributedOptimizer, 32 + 16 * hvd.rank()),
        ("non-finite loss on rank 1", hvd.DistributedOptimizer, 32),
    ):
        x = np.where(hvd.rank() and "finite" in message, np.nan, X[:rows])
        try:
            used = late if message.startswith("options") else run
            _model(wrap).fit(x, Y[:rows], batch_size=16, verbose=0, callbacks=[used])
        except RingtrainError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")
