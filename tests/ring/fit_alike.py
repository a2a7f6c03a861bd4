"""Data, models and comparisons for the jobs of `ringtrain.fit`."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config import CheckpointConfig, Config, RunConfig, TrackingConfig
from ringtrain.errors import RingtrainError

OUTPUT, ROOT = Path(sys.argv[1]), Path(__file__).parents[2]
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(100, 6)), RANDOM.normal(size=(100, 3))
CLASSES = RANDOM.integers(0, 3, 100)
WEIGHTS = np.where(np.arange(100) < 60, RANDOM.random(100) * (np.arange(100) % 32 < 16), 1.0)
"""0 for all rows of one of two ranks in the first step"""
SAME = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
LENGTHS = RANDOM.integers(1, 6, 100)
SEQUENCES = RANDOM.normal(size=(100, 5, 4)) * (np.arange(5) < LENGTHS[:, None])[..., None]


def options(folder: str = "", **more: Any) -> Config:
    runs = RunConfig(directory=str(OUTPUT / (folder or f"runs-{hvd.size()}")))
    return Config(run=runs, tracking=TrackingConfig(every_steps=0), **more)


def dense(*layers: Any, outputs: int = 3, **last: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    first = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh")]
    return keras.Sequential([*first, *layers, keras.layers.Dense(outputs, **last)])


def compiled(model: keras.Model, loss: Any = "mse", **more: Any) -> keras.Model:
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": loss, **more})
    return model


def distance(model: keras.Model, other: keras.Model) -> float:
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max((float(np.abs(ours - theirs).max()) for ours, theirs in pairs), default=0.0)


def equals_one_process(
    make: Callable[[], keras.Model],
    x: Any,
    y: Any,
    name: str,
    logs: bool = True,
    within: float = 1e-10,
    killed: bool = False,
    **arguments: Any,
) -> tuple[keras.Model, Any]:
    """The ranks' weights and logs are those of one process; returns the ranks' model and history.

    killed: The ranks' run is ended within its second epoch, and resumed.
    """
    arguments = SAME | arguments
    config = arguments.pop("options", None) or options()
    ours, reference = make(), make()
    if killed:
        with contextlib.suppress(Killed):
            ringtrain.fit(make(), x, y, name=name, options=config, callbacks=[KillAfter(5)], **arguments)
            raise AssertionError("was not killed")
    history = ringtrain.fit(ours, x, y, name=name, options=config, **arguments)
    expected = reference.fit(x, y, **arguments)
    assert distance(ours, reference) < within, distance(ours, reference)
    assert len(set(hvd.allgather_object(history.checksum))) == 1
    if logs:
        assert set(history.history) == set(expected.history)
        for metric, values in expected.history.items():
            np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)
    return ours, history


class Killed(Exception):
    """Ends all ranks' training after a step."""


class KillAfter(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def reversed_rows(x: Any, y: Any) -> tuple[Any, Any]:
    """The same arrays with their rows in another order."""
    return keras.tree.map_structure(lambda leaf: leaf[::-1], (x, y))


def whole_job(
    make: Callable[[], keras.Model],
    x: Any,
    y: Any,
    name: str,
    wrong: Callable[[Any, Any], tuple[Any, Any]] = reversed_rows,
    **arguments: Any,
) -> tuple[keras.Model, Any]:
    """As `equals_one_process`; on 2 ranks killed and resumed, and refused if the last rank has `wrong(x, y)`."""
    if hvd.size() > 2:
        return equals_one_process(make, x, y, name, **arguments)
    arguments = {"options": options(checkpoint=CheckpointConfig(every_steps=1)), **arguments}
    trained = equals_one_process(make, x, y, name, killed=True, **arguments)
    is_refused(make, x, y, name, wrong, **arguments)
    return trained


def resumes_and_is_refused(
    ours: keras.Model, history: Any, make: Any, x: Any, y: Any, name: str, **arguments: Any
) -> keras.Model:
    """A job that is killed within its second epoch and resumed ends as `ours`; one with other data is refused."""
    resumed, arguments = make(), SAME | arguments
    with contextlib.suppress(Killed):
        ringtrain.fit(make(), x, y, name=f"{name}-killed", callbacks=[KillAfter(5)], **arguments)
        raise AssertionError("was not killed")
    again = ringtrain.fit(resumed, x, y, name=f"{name}-killed", **arguments)
    assert distance(ours, resumed) == 0 and again.history == history.history
    assert again.checksum == history.checksum
    is_refused(make, x, y, name, **arguments)
    return resumed


def refused(words: str, function: Callable[[], Any]) -> None:
    """A call raises an error of ringtrain's that has these words."""
    try:
        function()
    except RingtrainError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def is_refused(make: Any, x: Any, y: Any, name: str, wrong: Any = reversed_rows, **arguments: Any) -> None:
    """A job is not trained with other data on the last rank, which is named."""
    arguments = {one: value for one, value in (SAME | arguments).items() if one not in ("logs", "within")}
    if hvd.rank() == hvd.size() - 1:
        x, y = wrong(x, y)
    try:
        ringtrain.fit(make(), x, y, name=f"{name}-wrong", **arguments)
    except (ringtrain.errors.ConfigError, ringtrain.errors.DataError) as error:
        assert f"rank {hvd.size() - 1} on " in str(error) and " than rank 0" in str(error), error
    else:
        raise AssertionError("trained with other data on one rank")


def snippet(page: str, first_line: str, *changes: tuple[str, str]) -> str:
    """The block of a page that begins with a line, with texts replaced, each of which must be there."""
    (block,) = re.findall(rf"^```python\n({re.escape(first_line)}.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    for old, new in changes:
        assert old in block, old
        block = block.replace(old, new)
    return block
