"""Lines of a script that ringtrain prove names; tests/ring/test_prove.py has whole proofs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringtrain import data
from ringtrain.lab.prove import suspects
from ringtrain.lab.prove.suspects import Suspect

SCRIPT = """
import random
import time as clock

import keras
import numpy as np
import tensorflow as tf

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(8, 2))
RANDOM.shuffle(ROWS)


class Nudge(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[-1].kernel.assign(
            self.model.layers[-1].kernel * random.random()
        )


class Clock(keras.metrics.Mean):
    def update_state(self, y, y_pred, sample_weight=None):
        return super().update_state(clock.time())


class Model(keras.Model):
    def call(self, inputs):
        return super().call(inputs) + tf.keras.backend.random_normal((1, 1))

    def train_step(self, batch):
        self.layers[-1].bias.assign_sub(batch[1][0])
        return super().train_step(batch)


def drawn():
    while True:
        yield np.random.normal(size=(4, 2)), np.zeros((4, 1))


def dataset():
    seeded = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :1])).shuffle(8, seed=1)
    return (
        seeded.map(lambda *row: row)
        .shuffle(8)
        .batch(4)
    )


def model():
    inputs = keras.Input((2,))
    made = Model(inputs, keras.layers.Dense(1)(inputs))
    made.compile("sgd", "mse", metrics=[Clock(name="clock")])
    return made
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "own_script.py"
    path.write_text(SCRIPT)
    spec: Any = importlib.util.spec_from_file_location("own_script", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_script", module)
    monkeypatch.chdir(tmp_path)
    spec.loader.exec_module(module)
    return module


def test_lines_are_named_with_the_part_of_the_job_that_they_belong_to(script: ModuleType) -> None:
    arguments = data.FitArguments(x=script.drawn(), callbacks=[script.Nudge()])
    found = [one for one in suspects.of_script(script.model(), arguments) if one.where.startswith("own_script.py")]
    lines = SCRIPT.splitlines()
    of_kind: dict[str, list[tuple[str, str, str]]] = {}
    for one in found:
        number = int(one.where.partition(":")[2])
        if one.kind != "is":
            assert lines[number - 1].strip() == one.text
        of_kind.setdefault(one.kind, []).append((one.role, one.name, one.text.partition("(")[0]))
    assert of_kind["order"] == [("script", "", ".shuffle")]
    assert of_kind["clock"] == [("metric", "clock", "return super")]
    assert {role for role, *_ in of_kind["random"]} == {"callback", "data", "model"}
    assert [(role, name) for role, name, _ in of_kind["writes"]] == [("callback", "Nudge"), ("model", "Model")]
    assert {("callback", "Nudge"), ("metric", "clock"), ("model", "Model")} <= {one[:2] for one in of_kind["is"]}


def test_a_phrase_names_what_is_asked_for_and_not_all() -> None:
    found = [Suspect("writes", "callback", "Nudge", f"own.py:{line}", "weight.assign(0)") for line in (3, 3, 5, 7, 9)]
    phrase = suspects.named(found, "writes", roles=("callback",))
    assert (
        phrase.startswith("; likely own.py:3: weight.assign(0) in callback Nudge; own.py:5")
        and "own.py:9" not in phrase
    )
    assert suspects.named(found, "writes", roles=("metric",)) == suspects.named(found, "clock") == ""


def test_a_short_fit_has_the_first_rows_and_a_last_batch_of_its_own_size(script: ModuleType) -> None:
    rows = script.ROWS.repeat(8, 0)[:59]
    arguments = data.FitArguments(x=rows, y=rows[:, :1], max_steps=3, epochs=2)
    train, _ = data.inputs(arguments, 10)
    assert len(train) == 2 * 10 + 9
    arguments = data.FitArguments(x=rows, y=rows[:, :1], max_steps=2, steps_per_epoch=2, epochs=2)
    train, _ = data.inputs(arguments, 10)
    assert len(train) == 3 * 10 + 9
    stream, _ = data.inputs(data.FitArguments(x=script.dataset().repeat(9), max_steps=3, parts=2), 1)
    assert len(stream) == 3 and next(iter(stream.dataset))[0].shape[0] == 2
