"""The configured trainer with any data and loss: in one process it trains what Keras' `fit` trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from ringtrain import data, models
from ringtrain.config import files
from ringtrain.config.derived import lower_is_better
from ringtrain.config.sections import Config, DataConfig, ModelConfig
from ringtrain.data.fit_arguments import arguments_of
from ringtrain.errors import ConfigError, DataError
from ringtrain.models import losses_metrics
from ringtrain.train import train
from ringtrain.training import log_capture, script
from ringtrain.training.configured import ConfiguredSource

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(100, 6)), RANDOM.normal(size=(100, 3))
CLASSES = RANDOM.integers(0, 3, 100)
WEIGHTS = RANDOM.random(100)


# ---- data and models of a user -------------------------------------------------------------------------------------


def weighted() -> dict[str, Any]:
    return {"x": X, "y": Y, "sample_weight": WEIGHTS, "validation_split": 0.2, "shuffle": False}


def frames() -> Any:
    table = pd.DataFrame(X, columns=[*"abcdef"])
    return (table[:80], pd.Series(Y[:80, 0])), (table[80:], pd.Series(Y[80:, 0]))


def alone() -> Any:
    return X, Y


def batches() -> Any:
    pairs = tf.data.Dataset.from_tensor_slices((X, Y))
    return pairs.shuffle(100, seed=3).batch(32), pairs.take(20).batch(16)


class Numbered(keras.utils.PyDataset):
    num_batches = 4

    def __getitem__(self, index: int) -> Any:
        return X[index * 32 : (index + 1) * 32], Y[index * 32 : (index + 1) * 32]


def numbered() -> dict[str, Any]:
    return {"x": Numbered(), "validation_data": Numbered(), "shuffle": False}


def generated() -> dict[str, Any]:
    def endless() -> Iterator[Any]:
        while True:
            for index in range(4):
                yield Numbered()[index]

    return {"x": endless(), "steps_per_epoch": 4}


def seldom() -> dict[str, Any]:
    return {"x": X, "y": Y, "validation_split": 0.2, "validation_freq": 2}


def texts() -> Any:
    return X, np.array(["a", "b"] * 50)


def one_hot() -> Any:
    return (X, np.eye(3)[CLASSES]), (X[:20], np.eye(3)[CLASSES[:20]])


def labels() -> Any:
    return (X, CLASSES), (X, CLASSES)


def with_nan() -> Any:
    y = Y.copy()
    y[7] = np.nan
    return (X, y), (X, Y)


def unequal() -> Any:
    return X, Y[1:]


def dense(input_shape: tuple[int, ...], num_targets: int) -> keras.Model:
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(8), keras.layers.Dense(num_targets)])


@keras.saving.register_keras_serializable(package="test_configured")
class Unbuilt(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.last(inputs)


def unbuilt(input_shape: tuple[int, ...], num_targets: int) -> keras.Model:
    model = Unbuilt()
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


class OwnFit(keras.Sequential):
    def fit(self, *args: Any, **named: Any) -> Any:
        return super().fit(*args, **named)


def with_fit(input_shape: tuple[int, ...], num_targets: int) -> keras.Model:
    return OwnFit([keras.Input(input_shape), keras.layers.Dense(num_targets)])


def cubed(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


def no_loss() -> int:
    return 3


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[keras.Model, dict[str, Any]]]:
    """Trains a configuration; returns the model that it has written, and the summary."""
    monkeypatch.setattr(log_capture, "watch", lambda: None)  # it ends with the process, and would hold pytest's output
    # An earlier test of the process may have initialized TensorFlow.
    monkeypatch.setattr(ConfiguredSource, "pin", script.ScriptSource.pin)

    def start(source: str, model: str = "dense", *options: str, name: str = "run") -> tuple[Any, dict[str, Any]]:
        words = ["--data.name", f"{__name__}:{source}" if ":" not in source else "npz", "--train.epochs", "3"]
        words += ["--data.file", source.removeprefix("npz:")] if ":" in source else []
        words += ["--model.name", model if model == "mlp" else f"{__name__}:{model}", "--run.directory", str(tmp_path)]
        summary = train(files.read([*words, "--run.name", name, *options]))
        file = tmp_path / name / "model.keras"
        return keras.models.load_model(file, compile=False) if file.exists() else None, summary

    return start


SGD = ("--optimizer.name", "sgd", "--optimizer.momentum", "0", "--optimizer.learning-rate", "0.05")
MSE = ("--model.loss", "mse", "--model.metrics", "mae", *SGD)


def reference(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Model and history of Keras' `fit` with the same arguments."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = dense((6,), 3)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    sizes = {} if isinstance(arguments["x"], tf.data.Dataset | keras.utils.PyDataset) else {"batch_size": 32}
    return model, model.fit(**arguments, **sizes, epochs=3, verbose=0)


@pytest.mark.parametrize("source", ["weighted", "batches", "numbered"])
def test_weights_and_metrics_are_those_of_keras_fit(start: Any, source: str, tmp_path: Path) -> None:
    """The last batch of 4 rows is trained; validation metrics have the trainer's prefix."""
    model, summary = start(source, "dense", *MSE)
    tf.random.set_seed(None)  # as in a new process
    arguments = globals()[source]()
    if isinstance(arguments, tuple):
        arguments = {"x": arguments[0], "validation_data": arguments[1], "shuffle": False}
    expected, history = reference(arguments)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for metric, values in history.history.items():
        ours = [record[metric.replace("val_", "test_")] for record in records]
        np.testing.assert_allclose(ours, values, rtol=1e-4, err_msg=metric)
    assert summary["numbers"]["steps_per_epoch"] == (3 if source == "weighted" else 4)
    assert summary["on_resume"] and "script" not in summary
    assert "accuracy" not in summary["metrics"], "a regression has none"


@pytest.mark.parametrize(
    ("source", "model", "options"),
    [
        ("frames", "mlp", (*MSE, "--train.monitor", "test_mae", "--train.patience", "2")),
        ("alone", "dense", (*MSE, "--optimizer.accumulation-steps", "2")),
        ("generated", "unbuilt", ()),
        ("one_hot", "mlp", ("--model.loss", "categorical_crossentropy")),
        ("alone", "dense", ("--model.loss", f"{__name__}:cubed", "--schedule.warmup-epochs", "1")),
        ("one_hot", "mlp", ("--model.loss", "bce", "--train.precision", "mixed_float16")),
    ],
)
def test_forms_of_data_and_targets(start: Any, source: str, model: str, options: tuple[str, ...]) -> None:
    _, summary = start(source, model, *options)
    assert "accuracy" in summary["metrics"] or "bce" not in options
    assert "mae" in summary["metrics"] or model != "unbuilt", "which it compiles itself"
    assert np.isfinite(summary["metrics"]["loss"]) and summary["global_step"] == summary["numbers"]["num_steps"]
    assert ("test_loss" in summary["metrics"]) == (source not in ("alone", "generated"))
    if "categorical_crossentropy" in options:  # of logits, as ringtrain's models return them
        assert summary["metrics"]["loss"] < 1.2 and summary["metrics"]["accuracy"] > 0.3


def test_arrays_of_a_file(start: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X[:20], y_test=Y[:20])
    options = [*MSE, "--train.epochs", "1", "--data.max-samples", "40"]
    model, summary = start(f"npz:{tmp_path}/a.npz", "dense", *options)
    assert model.output_shape == (None, 3)
    assert (summary["numbers"]["num_train"], summary["numbers"]["num_test"]) == (40, 20)


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "model", "options", "message"),
    [
        ("alone", "dense", (), "returns a model without a loss, and the targets are not integer classes"),
        ("alone", "mlp", (), "returned targets that are not known to be integer classes"),
        ("with_nan", "dense", MSE, "training targets: sample 7 contains NaN"),
        ("unequal", "dense", MSE, r"unequal: Data cardinality is ambiguous.* 100.*99"),
        ("no_loss", "dense", MSE, r"no_loss: returned int, expected \(x, y\)"),
        ("alone", "dense", (*MSE, "--train.monitor", "test_accuracy", "--train.patience", "1"), "got test_accuracy"),
        (
            "batches",
            "dense",
            (*MSE, "--optimizer.learning-rate-scaling", "linear"),
            "training batches .* and optimizer.learning_rate_scaling linear",
        ),
        ("seldom", "dense", (*MSE, "--train.patience", "1"), "got test_loss, but .*seldom .* after each epoch"),
        ("texts", "dense", MSE, "texts: Invalid dtype: str"),
        ("alone", "unbuilt", ("--optimizer.name", "lamb"), "returns a compiled model: compile it there"),
        ("alone", "unbuilt", ("--model.metrics", "top-5"), "returns a compiled model: compile it there"),
        ("one_hot", "with_fit", MSE, "returns a OwnFit, which has a fit of its own"),
    ],
)
def test_refused_before_anything_is_written(
    start: Any, source: str, model: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        start(source, model, *options)
    assert not (tmp_path / "run").exists()


def test_what_a_function_may_not_return() -> None:
    for result, message in (
        ({"x": X, "batch_size": 3}, ".*batch_size and epochs are train.batch_size and train.epochs"),
        ({"a": X}, "returned a dict with a, expected arguments of fit"),
        ((X, Y, X), "returned tuple, expected"),
    ):
        with pytest.raises(DataError, match=f"^mine:load: {message}"):
            arguments_of("mine:load", result)


def test_integer_classes_are_known_as_such() -> None:
    """Unless the loss takes no classes."""
    source = DataConfig(name=f"{__name__}:labels")
    for loss, is_data_set in (("", True), ("sparse_categorical_crossentropy", True), ("mse", False)):
        of_classes = models.needs_classes(ModelConfig(name="a:b", loss=loss))
        assert isinstance(data.source(source, of_classes)(), data.DataSet) == is_data_set, loss
    with pytest.raises(ConfigError, match=r"model\.loss: digits has integer classes"):
        data.source(DataConfig(), models.needs_classes(ModelConfig(loss="mse")))


def test_the_listed_losses_and_metrics_are_keras_own() -> None:
    from keras.src import losses, metrics

    def names(known: Any) -> set[str]:
        return {name for name in known if name == name.lower()}

    need_arguments = {"io_u", "mean_io_u", "one_hot_io_u", "one_hot_mean_io_u", "precision_at_recall"}
    need_arguments |= {"recall_at_precision", "sensitivity_at_specificity", "specificity_at_sensitivity"}
    assert set(losses_metrics.LOSSES) == names(losses.ALL_OBJECTS_DICT)
    assert set(losses_metrics.KERAS_METRICS) == names(metrics.ALL_OBJECTS_DICT) - need_arguments - {
        *("mean", "sum", "metric", "mean_metric_wrapper")
    }
    for name in losses_metrics.LOSSES:
        assert keras.losses.get(name) is not None
        loss = models.loss(ModelConfig(loss=name))()
        assert isinstance(loss, str) or loss.get_config()["from_logits"] is True


def test_misspelled_names() -> None:
    from ringtrain.training import configured

    for changed, message in (
        ({"loss": "mea"}, r"model\.loss: got mea, did you mean m"),
        ({"metrics": ("aucc",)}, r"model\.metrics: got aucc, did you mean auc"),
        (
            {"loss": "mse", "label_smoothing": 0.1},
            r"model\.loss mse and model\.label_smoothing 0\.1 do not go together",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            configured.find(Config(data=DataConfig(name="a:b"), model=ModelConfig(**changed)))


def test_lower_errors_are_better() -> None:
    assert all(
        map(lower_is_better, ("test_mae", "mse", "test_kl_divergence", "test_b_mape", "poisson", "false_positives"))
    )
    assert not any(map(lower_is_better, ("test_auc", "r2_score", "precision", "true_positives")))
