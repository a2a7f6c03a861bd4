"""`ringtrain.fit` in one process: its files, resume within an epoch, callbacks, the model afterwards."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
from ringtrain import hvd
from ringtrain.config.sections import CheckpointConfig, Config, HealthConfig, RunConfig, TrackingConfig
from ringtrain.errors import ConfigError, NonFiniteLoss
from ringtrain.hvd.process import PROCESS
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(100, 6)), RANDOM.normal(size=(100, 3))


class Killed(Exception):
    pass


class KillAfter(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == self.step:
            raise Killed


def _model(**more: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.2), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **more)
    return model


def _fit(model: keras.Model, folder: Path, *callbacks: Any, **more: Any) -> Any:
    options = Config(
        run=RunConfig(directory=str(folder)),
        checkpoint=CheckpointConfig(every_steps=1),
        health=HealthConfig(agree_every_steps=1),
        tracking=TrackingConfig(every_steps=0),
    )
    arguments = {"x": X, "y": Y, "batch_size": 32, "epochs": 4, "verbose": 0, "validation_data": (X[:40], Y[:40])}
    return ringtrain.fit(model, callbacks=callbacks, options=options, **arguments | more)


class History(keras.callbacks.Callback):
    """A callback of a script with the name of Keras' own."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses = [logs["loss"]]


def test_an_epoch_that_a_callback_had_ended_before_a_kill_has_its_end(tmp_path: Path) -> None:
    """The end of the epoch is not saved yet, but the step after which training stops is."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    class KillAtEnd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise Killed

    whole = _fit(_model(), tmp_path, Stop(), name="whole")
    with pytest.raises(Killed):
        _fit(_model(), tmp_path, Stop(), KillAtEnd(), name="cut")
    again = _fit(_model(), tmp_path, Stop(), name="cut")
    assert again.history == whole.history and len(whole.history["loss"]) == 1
    assert again.checksum == whole.checksum


def test_the_files_of_a_run(tmp_path: Path) -> None:
    history = _fit(_model(), tmp_path, epochs=2, validation_freq=2)
    summary = json.loads((history.run / "summary.json").read_text())
    assert re.search(r"\w-\d{8}-\d{6}$", history.run.name) and summary["checksum"] == history.checksum
    assert summary["numbers"]["steps_per_epoch"] == 4
    assert summary["metrics"] == {name: values[-1] for name, values in history.history.items()}
    assert len(history.history["loss"]) == 2 and len(history.history["val_loss"]) == 1
    again = keras.models.load_model(history.run / "model.keras", compile=False)
    assert again.count_params() == _model().count_params()


@pytest.mark.slow
def test_further_epochs_under_the_same_name(tmp_path: Path) -> None:
    whole, longer = _model(), _model()
    expected = _fit(whole, tmp_path, name="whole")
    assert len(_fit(_model(), tmp_path, name="longer", epochs=2).epoch) == 2
    history = _fit(longer, tmp_path, name="longer")
    assert history.history == expected.history and history.checksum == expected.checksum


def test_another_run_under_a_taken_name_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Names, first weights and seeds of layers do not count. The refused model and the run keep their weights."""
    dense, dropout = keras.layers.Dense, keras.layers.Dropout

    def model(*layers: Any, optimizer: Any = None, metric: str = "mae") -> keras.Model:
        layers = layers or (dense(8, "relu"), dropout(0.2))
        made = keras.Sequential([keras.Input((6,)), *layers, dense(3)])
        made.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=[metric])
        return made

    regularized = dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.1))
    checksum = _fit(model(), tmp_path, name="one", epochs=1).checksum
    cases: tuple[tuple[str, keras.Model, dict[str, Any]], ...] = (
        ("another training data", model(), {"x": X + 1}),
        ("training samples 100, this run has 50", model(), {"x": X[:50], "y": Y[:50]}),
        ("steps of an epoch 4, this run has 2", model(), {"steps_per_epoch": 2}),
        ("shuffle True, this run has False", model(), {"shuffle": False}),
        (r"metrics \[mae\], this run has \[mse\]", model(metric="mse"), {}),
        ("beta_1=0.9.*, this run has Adam.*beta_1=0.5", model(optimizer=keras.optimizers.Adam(0.01, beta_1=0.5)), {}),
        ("activation=relu.*, this run has Dense.activation=gelu", model(dense(8, "gelu"), dropout(0.2)), {}),
        ("layer 2 Dropout.rate=0.2., this run has", model(dense(8, "relu"), dropout(0.5)), {}),
        ("kernel_regularizer=L2.l2=0.1", model(regularized, dropout(0.2)), {}),
    )
    for words, other, more in cases:
        before = other.get_weights()
        with pytest.raises(
            ConfigError, match=f"was made with .*{words}.*: give fit another name; .* of its model.keras"
        ):
            _fit(other, tmp_path, name="one", epochs=2, **more)
        assert all(map(np.array_equal, before, other.get_weights()))
    alike = model(dense(8, "relu", name="other", kernel_initializer="zeros"), dropout(0.2, seed=3))
    assert _fit(alike, tmp_path, name="one", epochs=1).checksum == checksum
    further = keras.models.load_model(tmp_path / "one" / "model.keras")
    further.compile(keras.optimizers.Adam(0.01), "mae")
    assert _fit(further, tmp_path, name="two", x=X[:50], y=Y[:50], epochs=2).epoch == [0, 1]


def test_another_content_of_a_dataset_is_refused(tmp_path: Path) -> None:
    def fit(x: Any) -> None:
        batches = tf.data.Dataset.from_tensor_slices((x, Y)).shuffle(9, seed=1).batch(50)
        _fit(_model(), tmp_path, name="folds", x=batches, y=None, batch_size=None, epochs=1)

    fit(X)
    fit(X)
    with pytest.raises(ConfigError, match="was made with another content of the training data: "):
        fit(X + 1)


class Unregistered(keras.layers.Layer):
    """Keras cannot load a model that has it, and cannot write one if it holds an object."""

    def __init__(self, held: Any = 1, **more: Any) -> None:
        super().__init__(**more)
        self.held, self.inner = held, keras.layers.Dense(4)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


@pytest.mark.parametrize(
    "make",
    [lambda: keras.layers.Lambda(lambda inputs: 2 * inputs), Unregistered, lambda: Unregistered(object())],
    ids=["lambda", "unregistered", "not exported"],
)
def test_a_second_start_gives_the_weights_of_the_result(tmp_path: Path, make: Any) -> None:
    """Those of the first epoch, which a callback restores; also if the first start was killed just before."""

    class KilledAtTheEnd(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            raise Killed

    def fit(name: str, *more: Any) -> tuple[list[Any], Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), make(), keras.layers.Dense(3)])
        model.compile("adam", "mse")
        best = keras.callbacks.EarlyStopping("loss", patience=9, min_delta=10, restore_best_weights=True)
        history = _fit(model, tmp_path, best, History(), *more, name=name, epochs=3)
        return model.get_weights(), history

    expected, history = fit("whole")
    with pytest.raises(Killed):
        fit("killed", KilledAtTheEnd())
    for name in ("whole", "killed", "killed"):
        weights, again = fit(name)
        assert all(map(np.array_equal, expected, weights)), name
        assert again.history == history.history and again.checksum == history.checksum
    (history.run / "result.npz").unlink()
    (history.run / "model.keras").unlink(missing_ok=True)
    assert fit("whole")[1].checksum == history.checksum, "ended again from its last checkpoint"


def test_a_call_without_a_name_never_resumes_that_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart continues the first run of the process, and trains the others anew."""
    first = _fit(_model(), tmp_path, epochs=1)
    again = _fit(_model(), tmp_path, epochs=1)
    assert again.run != first.run
    monkeypatch.setenv(ATTEMPT, Attempt(number=1, run_name=first.run.name).to_json())
    monkeypatch.setattr(PROCESS, "num_runs", 0)
    assert [_fit(_model(), tmp_path, epochs=1).run == first.run for _ in range(2)] == [True, False]
    assert f"{first.run} is complete, this call has trained nothing: raise epochs" in capsys.readouterr().err


def test_an_error_shows_the_scripts_line() -> None:
    """And all of ringtrain's own, if Keras is to show its own."""
    lengths = []
    for is_filtered in (True, False):
        (keras.config.enable_traceback_filtering if is_filtered else keras.config.disable_traceback_filtering)()
        try:
            with pytest.raises(ConfigError, match="not compiled") as raised:
                ringtrain.fit(keras.Sequential([keras.layers.Dense(1)]), X, Y)
        finally:
            keras.config.enable_traceback_filtering()
        lengths.append(len(raised.traceback))
        assert raised.traceback[0].path == Path(__file__)
    assert lengths[0] == 2 < lengths[1]


def test_the_model_is_keras_again(tmp_path: Path) -> None:
    model = _model(jit_compile=True)
    history = _fit(model, tmp_path, epochs=1).history
    assert type(model.optimizer) is keras.optimizers.Adam and model.jit_compile
    evaluated = model.evaluate(X[:40], Y[:40], verbose=0, return_dict=True)
    assert {f"val_{name}": [value] for name, value in evaluated.items()}.items() <= history.items()
    model.save(tmp_path / "saved.keras")
    with zipfile.ZipFile(tmp_path / "saved.keras") as saved:
        optimizer = json.loads(saved.read("config.json"))["compile_config"]["optimizer"]
    assert (optimizer["module"], optimizer["class_name"]) == ("keras.optimizers", "Adam")
    model.jit_compile = False
    assert "train_step" not in vars(model) and "apply" not in vars(model.optimizer) and model.train_function is None
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    model.fit(X, Y, epochs=1, verbose=0)
    assert not np.array_equal(model.get_weights()[0], reference.get_weights()[0])
    assert type(keras.models.load_model(tmp_path / "saved.keras").optimizer) is keras.optimizers.Adam


def test_one_process_compiles_whole_steps_by_xla(tmp_path: Path) -> None:
    """As Keras does, bit for bit; else other bits would show that one of them was not compiled."""
    ours, reference, plain = _model(jit_compile=True), _model(jit_compile=True), _model()
    history = _fit(ours, tmp_path, shuffle=False).history
    for model in reference, plain:
        expected = model.fit(X, Y, batch_size=32, epochs=4, shuffle=False, validation_data=(X[:40], Y[:40]), verbose=0)
        is_same = all(map(np.array_equal, ours.get_weights(), model.get_weights()))
        assert is_same == (history == expected.history) == (model is reference)


def test_a_weight_that_begins_with_infinity_is_saved(tmp_path: Path) -> None:
    class Lowest(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.lowest = self.add_weight(shape=(), initializer=keras.initializers.Constant(np.inf), trainable=False)

        def call(self, inputs: Any) -> Any:
            return inputs

    def fit(name: str, rate: float) -> Any:
        model = keras.Sequential([keras.Input((6,)), Lowest(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
        return _fit(model, tmp_path, name=name, epochs=2, validation_data=None)

    assert len(fit("infinite", 0.1).epoch) == 2
    with pytest.raises(NonFiniteLoss):
        fit("diverges", 1e30)


class Largest(keras.metrics.Metric):
    """A state that is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


def _unlike(model: keras.Model) -> list[str]:
    """What differs on several ranks, or may."""
    from ringtrain.training.unlike import own_code, unlike_one_process

    hvd.init()
    hvd.DistributedOptimizer(model.optimizer)
    model._symbolic_build(data_batch=(X[:8].astype("float32"), (Y[:8] > 0).astype("float32")))
    return [*unlike_one_process(model), *own_code(model)]


class OwnStep(keras.Model):
    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch)


def test_what_may_not_be_as_in_one_process_is_named() -> None:
    """By classes alone."""

    def found(layers: list[Any], loss: str, metrics: list[Any], kind: Any = keras.Model) -> list[str]:
        inputs = outputs = keras.Input((6,))
        for layer in [*layers, keras.layers.Dense(3, activation="sigmoid")]:
            outputs = layer(outputs)
        model = kind(inputs, outputs)
        model.compile("adam", loss, metrics=metrics)
        return _unlike(model)

    sums = ["mae", "accuracy", keras.metrics.AUC(), keras.metrics.F1Score(), keras.metrics.R2Score()]
    assert found([], "mse", sums) == []
    assert found([keras.layers.Reshape((6, 1)), keras.layers.GRU(4)], "mse", sums) == []
    (random,) = found([keras.layers.Reshape((6, 1)), keras.layers.GRU(4, dropout=0.2)], "mse", sums)
    assert random.startswith("random layers")
    (largest,) = found([], "mse", [*sums, Largest()])
    assert largest.startswith("the states of largest are added up")
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    normalized, random, loss, step = found(layers, "dice", sums, OwnStep)
    assert normalized.startswith("batch normalization") and random.startswith("random layers")
    assert loss.startswith("the loss of") and "whole batch" in loss
    assert step.startswith("OwnStep.train_step gets each rank's rows")
