"""Jobs of `ringtrain.fit`, which run_properties.py calls on every rank.

tests/fuzz draws jobs that all ranks run alike, and compares them with Keras' own `fit`. In these jobs, ranks differ,
one of them fails or gets a signal, or Keras has no such `fit`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from fit_alike import X, Y, compiled, dense, distance, options, refused
from only import only, quick

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config.sections import HealthConfig, HvdConfig


@only(np=2)
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, x = compiled(dense(dtype="float32")), X.copy()
        x[32 + 16 :, 0] = np.where(np.arange(52) == 0, 1e7, x[48:, 0])  # on the last rank, in the second step
        ringtrain.fit(model, x, Y, batch_size=32, epochs=1, shuffle=False, verbose=0, options=options())
        hvd.check_in_sync(model)
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
    finally:
        keras.config.set_dtype_policy("float32")


class Subclass(keras.Model):
    """Without weights before its first batch, and with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(3)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        for part in self.parts:
            inputs = part(inputs, training=training) if isinstance(part, keras.layers.Dropout) else part(inputs)
        return inputs


@only(np=2)
def unbuilt_and_unseeded() -> None:
    """Ranks that begin with different weights train rank 0's; they drop different units."""
    keras.utils.set_random_seed(hvd.rank())
    model = compiled(Subclass(), metrics=["mae"])
    ringtrain.fit(model, X, Y, batch_size=30, epochs=2, verbose=0, options=options())
    hvd.check_in_sync(model)
    states = hvd.allgather_object([int(v) for one in model.parts[1:2] for v in one.seed_generator.state.numpy()])
    assert len({tuple(state) for state in states}) == hvd.size()


def _resumable() -> keras.Model:
    keras.utils.set_random_seed(5)  # of the units that are dropped
    model = dense(keras.layers.Dropout(0.2))
    return compiled(model, optimizer=keras.optimizers.Adam(0.01), metrics=["mae"])


class Once(keras.callbacks.Callback):
    """Calls a function with the model on the last rank, after the third step of its first run."""

    def __init__(self, call: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.call, self.left = call, 3

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and hvd.rank() == hvd.size() - 1:
            self.call(self.model)


@only(np=2)
@quick
def a_signal_saves_and_ends_all() -> None:
    """SIGTERM or SIGINT to one rank ends all after the same step; what is saved is resumed. So does a callback."""

    def run(name: str, *callbacks: Any, chaos: str = "") -> tuple[keras.Model, Any]:
        model, arguments = _resumable(), {"batch_size": 32, "epochs": 2, "verbose": 0, "callbacks": callbacks}
        config = options(chaos=chaos, health=HealthConfig(agree_every_steps=1))
        return model, ringtrain.fit(model, X, Y, name=name, options=config, **arguments)

    reference, _ = run("undisturbed")
    interrupt = Once(lambda model: os.kill(os.getpid(), signal.SIGINT))
    for name, callbacks, chaos in (("ended", (), "rank=1 step=3 mode=sigterm"), ("interrupted", (interrupt,), "")):
        try:
            run(name, *callbacks, chaos=chaos)
        except (SystemExit, KeyboardInterrupt) as end:
            assert getattr(end, "code", None) == (143 if chaos else None)
        else:
            raise AssertionError("not ended")
        resumed, history = run(name, *callbacks, chaos=chaos)  # the fault happens once
        assert distance(reference, resumed) == 0
        assert len(history.history["loss"]) == 2
    _, history = run("stopped", Once(lambda model: setattr(model, "stop_training", True)))
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "a callback"
    assert summary["global_step"] == 4 and {*hvd.allgather_object(tuple(history.epoch))} == {(0,)}, (
        "its epoch has ended"
    )


@only(np=2)
def a_signal_after_the_last_step_ends_a_complete_run() -> None:
    """The script ends when its results are there. The same script then goes on."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    model, arguments = _resumable(), {"batch_size": 32, "epochs": 1, "verbose": 0, "options": options()}
    ends = keras.callbacks.LambdaCallback(on_train_end=lambda logs: os.kill(os.getpid(), signal.SIGTERM))
    try:
        ringtrain.fit(model, X, Y, name="ended-late", callbacks=[ends], **arguments)
    except SystemExit as end:
        assert end.code == 143
    else:
        raise AssertionError("not ended")
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    again = _resumable()
    history = ringtrain.fit(again, X, Y, name="ended-late", **arguments)
    summary = json.loads((history.run / "summary.json").read_text())
    assert summary["stopped_by"] == "" and (history.run / "model.keras").exists()
    assert distance(again, model) == 0


@only(np=2)
def another_run_is_not_resumed() -> None:
    """A checkpoint of another batch, rate, optimizer, loss, model or of other data is refused, with the fix."""
    arguments: dict[str, Any] = {"epochs": 1, "verbose": 0, "options": options()}
    ringtrain.fit(compiled(dense()), X, Y, name="another", batch_size=32, **arguments)
    adam, faster = keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.1)
    given: Any
    for words, given, batch_size in (
        (
            "was made with global batch (batch_size x ranks) 32, this run has 16: give",
            compiled(dense()),
            16,
        ),
        (
            "was made with learning rate 0.05, this run has 0.1: give fit",
            compiled(dense(), optimizer=faster),
            32,
        ),
        ("was made with optimizer.name SGD, this run has Adam", compiled(dense(), optimizer=adam), 32),
        ("was made with number of layers 2, this run has 3", compiled(dense(keras.layers.Dense(8))), 32),
        ("was made with loss mse, this run has mae: give fit another name", compiled(dense(), "mae"), 32),
        ("was made with another training data: give fit another name", Y + 1, 32),
    ):
        model, y = (compiled(dense()), given) if isinstance(given, np.ndarray) else (given, Y)
        given = {"y": y, "name": "another", "batch_size": batch_size, **arguments}
        refused(words, lambda model=model, given=given: ringtrain.fit(model, X, **given))


@only(np=2)
@quick
def what_differs_is_refused() -> None:
    """Other data or another model on one rank, data that are no arrays, a model that is not compiled."""
    compressed = options(hvd=HvdConfig(compression="fp16"))
    for words, arguments in (
        ("has other training data than rank 0", {"y": Y + hvd.rank()}),
        ("expected arrays in memory", {"x": iter(())}),
        ("not compiled", {"model": dense()}),
        (
            "hvd.compression fp16 and hvd.DistributedOptimizer do not go together",
            {
                "model": compiled(dense(), optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD())),
                "options": compressed,
            },
        ),
        (
            "has another layer 2 than rank 0",
            {"model": compiled(dense(*map(keras.layers.Dense, range(8, 8 + hvd.rank()))))},
        ),
    ):
        given = {"model": compiled(dense()), "x": X, "y": Y, "options": options(), "verbose": 0} | arguments
        refused(words, lambda given=given: ringtrain.fit(**given))
