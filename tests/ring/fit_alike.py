"""Data, models and comparisons for the jobs of `ringtrain.fit`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.config.sections import Config, RunConfig, TrackingConfig
from ringtrain.errors import RingtrainError

OUTPUT, ROOT = Path(sys.argv[1]), Path(__file__).parents[2]
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(100, 6)), RANDOM.normal(size=(100, 3))
CLASSES = RANDOM.integers(0, 3, 100)
WEIGHTS = np.where(np.arange(100) < 60, RANDOM.random(100) * (np.arange(100) % 32 < 16), 1.0)
"""0 for all rows of one of two ranks in the first step"""
SAME = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}


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


def equals_one_process(make: Callable[[], keras.Model], x: Any, y: Any, name: str, **arguments: Any) -> None:
    """The ranks' weights and logs are those of one process."""
    arguments = SAME | arguments
    config = arguments.pop("options", None) or options()
    ours, reference = make(), make()
    history = ringtrain.fit(ours, x, y, name=name, options=config, **arguments)
    expected = reference.fit(x, y, **arguments)
    assert distance(ours, reference) < 1e-10, distance(ours, reference)
    assert len(set(hvd.allgather_object(history.checksum))) == 1
    assert set(history.history) == set(expected.history)
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-6, err_msg=metric)


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


def refused(words: str, function: Callable[[], Any]) -> str:
    """Returns the text of an error of ringtrain's that a call raises, which has these words."""
    try:
        function()
    except RingtrainError as error:
        assert words in str(error), error
        return str(error)
    raise AssertionError(f"not refused: {words}")


def snippet(page: str, first_line: str, *changes: tuple[str, str]) -> str:
    """The block of a page that begins with a line, with texts replaced, each of which must be there."""
    (block,) = re.findall(rf"^```python\n({re.escape(first_line)}.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    for old, new in changes:
        assert old in block, old
        block = block.replace(old, new)
    return block
