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


def in_order() -> dict[str, Any]:
    return {"x": X, "y": Y, "validation_data": (X[:20], Y[:20]), "shuffle": False}


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


def nested() -> dict[str, Any]:
    rest = {"shuffle": False, "sample_weight": {"a": WEIGHTS, "b": WEIGHTS}}
    return {"x": {"left": X[:, :2], "right": X[:, 2:]}, "y": {"a": Y[:, :1], "b": CLASSES}, **rest}


def unshaped() -> Any:
    return tf.data.Dataset.from_generator(lambda: iter([(X, Y)]), output_types=(tf.float32, tf.float32))


def seldom() -> dict[str, Any]:
    return {"x": X, "y": Y, "validation_split": 0.2, "validation_freq": 2}


def texts() -> Any:
    return X, np.array(["a", "b"] * 50)


def one_hot() -> Any:
    return (X, np.eye(3)[CLASSES]), (X[:20], np.eye(3)[CLASSES[:20]])


def masks() -> Any:
    return (np.tile(X[:, None], (1, 4, 1)), np.tile(CLASSES[:, None], (1, 4))), None


def labels() -> Any:
    return (X, CLASSES), (X, CLASSES)


def negative() -> Any:
    return (X, CLASSES - 1), (X, CLASSES - 1)


def with_nan() -> Any:
    y = Y.copy()
    y[7] = np.nan
    return (X, y), (X, Y)


def unequal() -> Any:
    return X, Y[1:]


def empty() -> Any:
    return {"x": X[:0], "y": Y[:0]}


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


def reference(arguments: dict[str, Any], model: Callable[..., Any] = dense, **compiled: Any) -> tuple[Any, Any]:
    """Model and history of Keras' `fit` with the same arguments."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    x = arguments["x"]
    shape = {name: leaf.shape[1:] for name, leaf in x.items()} if isinstance(x, dict) else (6,)
    made = model(shape, 0 if isinstance(x, dict) else 3)
    if not made.compiled:
        made.compile(keras.optimizers.SGD(0.05), **{"loss": "mse", "metrics": ["mae"], **compiled})
    sizes = {} if isinstance(x, tf.data.Dataset | keras.utils.PyDataset) else {"batch_size": 32}
    return made, made.fit(**arguments, **sizes, epochs=3, verbose=0)


def same(model: keras.Model, other: keras.Model, within: float = 1e-6) -> None:
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=within)


@pytest.mark.parametrize("source", ["in_order", "weighted", "batches", "numbered"])
def test_weights_and_metrics_are_those_of_keras_fit(start: Any, source: str, tmp_path: Path) -> None:
    """The last batch of 4 rows is trained; validation metrics have the trainer's prefix."""
    model, summary = start(source, "dense", *MSE)
    tf.random.set_seed(None)  # as in a new process
    arguments = globals()[source]()
    if isinstance(arguments, tuple):
        arguments = {"x": arguments[0], "validation_data": arguments[1], "shuffle": False}
    expected, history = reference(arguments)
    same(model, expected)
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
        ("alone", "dense", (*MSE, "--train.jit")),
        ("generated", "unbuilt", ()),
        ("one_hot", "mlp", ("--model.loss", "categorical_crossentropy")),
        ("masks", "dense", ("--model.loss", "sparse_categorical_crossentropy", *SGD)),
        ("negative", "dense", ("--model.loss", f"{__name__}:cubed", "--schedule.warmup-epochs", "1")),
        ("one_hot", "mlp", ("--model.loss", "bce", "--train.precision", "mixed_float16")),
    ],
)
def test_forms_of_data_and_targets(start: Any, source: str, model: str, options: tuple[str, ...]) -> None:
    _, summary = start(source, model, *options)
    assert "accuracy" in summary["metrics"] or "bce" not in options
    assert np.isfinite(summary["metrics"]["loss"]) and summary["global_step"] == summary["numbers"]["num_steps"]
    assert ("test_loss" in summary["metrics"]) == (source not in ("alone", "generated", "masks"))
    if "categorical_crossentropy" in options:  # of logits, as ringtrain's models return them
        assert summary["metrics"]["loss"] < 1.2 and summary["metrics"]["accuracy"] > 0.3


def test_arrays_of_a_file(start: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X[:20], y_test=Y[:20])
    for most, sizes in (("0", (100, 20)), ("40", (40, 20)), ("10", (10, 10))):
        options = [*MSE, "--train.epochs", "1", "--data.max-samples", most]
        model, summary = start(f"npz:{tmp_path}/a.npz", "dense", *options, name=most)
        assert model.output_shape == (None, 3)
        assert (summary["numbers"]["num_train"], summary["numbers"]["num_test"]) == sizes


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "model", "options", "message"),
    [
        ("alone", "dense", (), "returns a model without a loss, and the targets are not integer classes"),
        ("alone", "mlp", (), "returned targets that are not known to be integer classes"),
        ("nested", "mlp", ("--model.loss", "mse"), "mlp cannot take inputs of shape .*: it takes one array"),
        ("with_nan", "dense", MSE, "training targets: sample 7 contains NaN"),
        ("unequal", "dense", MSE, r"unequal: Data cardinality is ambiguous.* 100.*99"),
        ("empty", "dense", MSE, "got no training samples"),
        ("unshaped", "dense", MSE, "unshaped: got a tf.data.Dataset of unknown shapes"),
        ("no_loss", "dense", MSE, r"no_loss: returned int, expected \(x, y\)"),
        ("alone", "dense", (*MSE, "--train.monitor", "test_accuracy", "--train.patience", "1"), "got test_accuracy"),
        ("batches", "dense", (*MSE, "--optimizer.learning-rate-scaling", "linear"), "linear and training batches"),
        ("alone", "dense", (*MSE, "--train.patience", "1"), "got test_loss, but .*alone has no test data"),
        (
            "seldom",
            "dense",
            (*MSE, "--train.patience", "1"),
            "got test_loss, but .*seldom .* after each epoch",
        ),
        ("texts", "dense", MSE, "texts: Invalid dtype: str"),
    ],
)
def test_refused_before_anything_is_written(
    start: Any, source: str, model: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        start(source, model, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"x": X, "batch_size": 3}, ".*batch_size and epochs are train.batch_size and train.epochs"),
        ({"a": X}, "returned a dict with a, expected arguments of fit"),
        ((X, Y, X), "returned tuple, expected"),
        (((X,), (X,)), "returned tuple, expected"),
    ],
)
def test_what_a_function_may_not_return(result: Any, message: str) -> None:
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": "mea"}, r"model\.loss: got mea, did you mean m"),
        ({"metrics": ("aucc",)}, r"model\.metrics: got aucc, did you mean auc"),
        (
            {"loss": "mse", "label_smoothing": 0.1},
            r"model\.loss mse and model\.label_smoothing 0\.1 do not go together",
        ),
    ],
)
def test_misspelled_names(changed: dict[str, Any], message: str) -> None:
    from ringtrain.training import configured

    with pytest.raises(ConfigError, match=message):
        configured.find(Config(data=DataConfig(name="a:b"), model=ModelConfig(**changed)))


class OwnFit(keras.Sequential):
    def fit(self, *args: Any, **named: Any) -> Any:
        return super().fit(*args, **named)


def samples() -> Any:
    return (X, np.arange(len(X)) % 3), (X[:9], np.arange(9) % 3)


def classifier(shape: tuple[int, ...], classes: int, steps: int = 1, kind: Any = keras.Sequential) -> keras.Model:
    model = kind([keras.Input(shape), keras.layers.Dense(classes)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=steps)
    return model


def classifier_of_two_steps(shape: tuple[int, ...], classes: int) -> keras.Model:
    return classifier(shape, classes, steps=2)


def classifier_of_three_steps(shape: tuple[int, ...], classes: int) -> keras.Model:
    return classifier(shape, classes, steps=3)


def classifier_with_a_fit(shape: tuple[int, ...], classes: int) -> keras.Model:
    return classifier(shape, classes, kind=OwnFit)


def test_steps_per_execution_of_a_compiled_model(start: Callable[..., Any]) -> None:
    batch = ("--train.batch-size", str(len(X) // 4))
    models = ("classifier", "classifier_of_two_steps", "classifier_of_three_steps")
    checksums = {start("samples", model, *batch, name=model)[1]["checksum"] for model in models}
    assert len(checksums) == 1


def test_a_model_with_a_fit_of_its_own_is_refused(start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="returns a OwnFit, which has a fit of its own"):
        start("samples", "classifier_with_a_fit")


def test_lower_errors_are_better() -> None:
    assert all(
        map(lower_is_better, ("test_mae", "mse", "test_kl_divergence", "test_b_mape", "poisson", "false_positives"))
    )
    assert not any(map(lower_is_better, ("test_auc", "r2_score", "precision", "true_positives")))
