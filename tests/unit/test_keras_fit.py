"""`ringtrain.fit` refuses what it cannot do before it starts; a model that its function compiles stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
from ringtrain.config.sections import OF_SCRIPT, Config, StrategyConfig, TrainConfig, option_types
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


def _mirrored() -> keras.Model:
    class MirroredStrategy:
        num_replicas_in_sync = 2

    model = _model()
    object.__setattr__(model, "_distribute_strategy", MirroredStrategy())
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (_model(compiled=False), {}, r"not compiled: call model\.compile"),
        (_model(OwnFit), {}, r"OwnFit has a fit of its own that does not call"),
        (_model(Calls), {"batch_per_rank": True}, "a fit of its own and batch_per_rank"),
        (_model(Calls), {"y": None, "x": {}}, r"the fit of Calls has not called super"),
        (_model(), {"batch_size": 0}, r"got batch_size 0, expected at least 1"),
        (_model(), {"callbacks": [keras.callbacks.BackupAndRestore("x")]}, r"leave out BackupAndRestore: name= saves"),
        (
            _model(),
            {"options": Config(train=TrainConfig(epochs=3))},
            r"options set train\.epochs, which is an argument",
        ),
        (_model(), {"x": X[:0], "y": Y[:0]}, r"got no training samples, expected at least one"),
        (_model(), {"options": Config(strategy=StrategyConfig(name="ps-sync"))}, r"expected ring or mpi-ring"),
        (_model(), {"options": {"checkpoint.every_step": 3}}, r"unknown key checkpoint\.every_step: .*every_steps"),
        (_model(), {"options": {"checkpoint": {"every_steps": "3"}}}, r"every_steps: got '3', expected int"),
        (_model(), {"options": 3}, r"got int for options, expected a ringtrain\.config\.Config, or a dict"),
        (_model(), {"resume": "must"}, r"got must, which needs the name of the run to resume: give name as well"),
        (_mirrored(), {}, r"a MirroredStrategy \(devices: 2\): leave the strategy out"),
        (_model(), {"epochs": 2, "initial_epoch": 2}, r"got initial_epoch 2 with epochs 2.*expected 0 to 1"),
    ],
    ids=[
        "uncompiled",
        "own fit",
        "own fit per rank",
        "own fit that returns",
        "nothing to train",
        "backup",
        "options",
        "no rows",
        "strategy",
        "unknown option",
        "type of an option",
        "no options",
        "must without name",
        "two replicas",
        "late initial epoch",
    ],
)
def test_refused_before_anything_starts(model: keras.Model, arguments: dict[str, Any], message: str) -> None:
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


@pytest.mark.parametrize("texts", [["b", "c", "a"], np.array(["b", "c", "a"])])
def test_texts_are_predicted(texts: Any) -> None:
    """As the tasks of KerasHub take them."""
    inputs = keras.Input((), dtype="string")
    model = keras.Model(inputs, keras.layers.StringLookup(vocabulary=["a", "b"])(inputs))
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


def test_the_public_functions_are_there_without_loading_keras() -> None:
    assert {"fit", "start"} <= set(dir(ringtrain))
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        ringtrain.fitt  # noqa: B018


def test_the_options_that_it_takes_exist() -> None:
    known = option_types()
    assert all(any(name.startswith(option) for name in known) for option in OF_SCRIPT)


def _built(name: str, **options: Any) -> tuple[keras.Model, dict[str, str]]:
    from ringtrain import hvd, strategies
    from ringtrain.config.derived import derive
    from ringtrain.config.sections import with_values
    from ringtrain.data.classes import checked
    from ringtrain.training import configured

    hvd.init()
    config = with_values(Config(), {"model.name": f"{__name__}:{name}", **options})
    data_set = checked("zeros", (np.zeros((64, 4)), np.arange(64) % 3), (np.zeros((9, 4)), np.arange(9) % 3))
    numbers = derive(config, 1, 64, 9)
    return configured.compiled_model(configured.find(config), data_set, config, numbers, strategies.make(config))


def compiled_here(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_classes + 2, activation="softmax")])
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.RMSprop(0.02), loss, metrics=["sparse_top_k_categorical_accuracy"])
    return model


def test_a_compiled_model_keeps_loss_metrics_and_optimizer() -> None:
    model, plan = _built("compiled_here")
    assert type(model.optimizer).__name__ == "RMSprop"
    assert (
        isinstance(model.loss, keras.losses.SparseCategoricalCrossentropy)
        and not model.loss.get_config()["from_logits"]
    )
    assert plan.pop("targets") == "3 integer classes; for other targets, return floats"
    assert plan == {"learning rate": f"0.02 (RMSprop, as {__name__}:compiled_here compiles it)"}


@pytest.mark.parametrize(
    "option",
    [
        {"model.label_smoothing": 0.1},
        {"model.metrics": ("top-5",)},
        {"model.loss": "sparse_categorical_crossentropy"},
        {"optimizer.name": "lamb"},
    ],
)
def test_options_that_belong_into_its_compile_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(RingtrainError, match="returns a compiled model: compile it there"):
        _built("compiled_here", **option)
