"""`ringtrain.fit` refuses what it cannot do before it starts; a model that its function compiles stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
from ringtrain.config.sections import OF_SCRIPT, option_types
from ringtrain.errors import ConfigError, DataError, RingtrainError

X, Y = np.zeros((8, 3)), np.zeros((8, 1))


class OwnFit(keras.Sequential):
    def fit(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


class Calls(keras.Sequential):
    def fit(self, x: Any = None, **arguments: Any) -> Any:
        return super().fit(x, **arguments) if x else None


def _model(kind: type = keras.Sequential, compiled: bool = True) -> keras.Model:
    model = kind([keras.Input((3,)), keras.layers.Dense(1)])
    if compiled:
        model.compile("sgd", "mse")
    return model


class OtherNames(keras.Sequential):
    def fit(self, features: Any, epochs: int = 1) -> Any:
        return super().fit(features, epochs=epochs)


def _scoped() -> keras.Model:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        return _model()


BACKUP = keras.callbacks.BackupAndRestore("x")
REFUSED: dict[str, tuple[keras.Model, dict[str, Any], str]] = {
    "uncompiled": (_model(compiled=False), {}, r"not compiled: call model\.compile"),
    "own fit": (_model(OwnFit), {}, "OwnFit has a fit of its own that does not call"),
    "own fit per rank": (
        _model(Calls),
        {"batch_per_rank": True},
        "a fit of its own and batch_per_rank",
    ),
    "own fit that returns": (_model(Calls), {"y": None, "x": {}}, "the fit of Calls has not called super"),
    "own fit without x": (_model(OtherNames), {}, r"OtherNames has a fit of its own without .*\bx, y: give it"),
    "scope": (_scoped(), {}, "in the scope of a OneDeviceStrategy .*: leave the strategy out"),
    "batch": (_model(), {"batch_size": 0}, "got batch_size 0, expected at least 1"),
    "late epoch": (_model(), {"epochs": 2, "initial_epoch": 2}, "got initial_epoch 2 with epochs 2.*expected 0 to 1"),
    "backup": (_model(), {"callbacks": [BACKUP]}, "leave out BackupAndRestore: name= saves"),
    "text": (_model(), {"x": "text"}, "got builtins.str.* for x, expected arrays in memory"),
    "no rows": (_model(), {"x": X[:0], "y": Y[:0]}, "got no training samples, expected at least one"),
    "option": (_model(), {"options": {"train.epochs": 3}}, r"options set train\.epochs, which is an argument"),
    "strategy": (_model(), {"options": {"strategy.name": "ps-sync"}}, "expected ring or mpi-ring"),
    "unknown": (
        _model(),
        {"options": {"checkpoint.every_step": 3}},
        "unknown key checkpoint.every_step: .*every_steps",
    ),
    "no options": (_model(), {"options": 3}, r"got int for options, expected a ringtrain\.config\.Config, or a dict"),
    "no name": (_model(), {"resume": "must"}, "got must, which needs the name of the run to resume: give name as well"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_starts(case: str) -> None:
    model, arguments, message = REFUSED[case]
    with pytest.raises((ConfigError, DataError), match=f"^(ringtrain.fit: |resume: |a model with ).*{message}"):
        ringtrain.fit(model, **{"x": X, "y": Y, "verbose": 0, **arguments})


def test_keras_limits(tmp_path: Path) -> None:
    model, options = _model(), {"run.directory": str(tmp_path), "tracking": {"every_steps": 0}}
    keras.config.set_max_epochs(2)
    try:
        with pytest.warns(UserWarning, match="Limiting epochs to 2"):
            history = ringtrain.fit(model, X, Y, epochs=5, verbose=0, options=options)
        assert history.epoch == [0, 1]
        keras.config.set_max_steps_per_epoch(1)
        with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 1"):
            ringtrain.fit(model, X, Y, batch_size=2, verbose=0, options=options)
        assert int(model.optimizer.iterations) == 3
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


def test_texts_are_predicted() -> None:
    """As the tasks of KerasHub take them."""
    inputs = keras.Input((), dtype="string")
    model = keras.Model(inputs, keras.layers.StringLookup(vocabulary=["a", "b"])(inputs))
    for texts in (["b", "c", "a"], np.array(["b", "c", "a"])):
        assert ringtrain.predict(model, texts, batch_size=2, verbose=0).tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_data_that_cannot_be_evaluated(name: str) -> None:
    function = getattr(ringtrain, name)
    for given, message in (
        ((row for row in [X]), "a generator of held-out data, expected a number of steps"),
        (tf.data.Dataset.from_tensors((X, Y)).repeat(), "a tf.data.Dataset without an end"),
        (tf.data.Dataset.from_tensors((X, Y)).take(0), "without batches"),
        (X[:0], "arrays without rows"),
        (None, "got nothing for held-out data"),
    ):
        with pytest.raises(DataError, match=f"^ringtrain.{name}: .*{message}"):
            function(_model(), given, verbose=0)
    with pytest.raises(DataError, match="got steps 0, expected at least 1"):
        function(_model(), X, steps=0, verbose=0)


def test_a_rank_that_calls_it_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the error of Horovod after another rank has exited."""
    from ringtrain import hvd

    def fail(action: Any) -> None:
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down.")

    monkeypatch.setattr(hvd, "run_together", fail)
    with pytest.raises(RingtrainError, match=r"every rank must call it, .* hvd\.rank\(\) == 0") as raised:
        ringtrain.fit(_model(), X, Y, verbose=0)
    assert raised.value.__suppress_context__


def test_the_options_that_it_takes_exist() -> None:
    known = option_types()
    assert all(any(name.startswith(option) for name in known) for option in OF_SCRIPT)
