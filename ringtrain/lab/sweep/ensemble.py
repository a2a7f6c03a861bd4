"""Averaged prediction of several trained models compared with each of them, in one process: for ringtrain sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ringtrain import config_io, data
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks
from ringtrain.run import resume, setup


def evaluate(runs: Sequence[str]) -> dict[str, Any]:
    """Evaluates models on the test samples of their own configurations.

    Args:
        runs: Folders, the best first.
    """
    ranks.begin(config_io.read_toml(Path(runs[0], "config.toml")))
    labels, first = predict(Path(runs[0]))
    predicted = [first]
    for run in runs[1:]:
        its_labels, probabilities = predict(Path(run))
        if not np.array_equal(its_labels, labels):
            raise LaunchError(f"{run}: was tested on other samples than {runs[0]}: an ensemble needs the same")
        predicted.append(probabilities)
    scores = [score(labels, probabilities) for probabilities in predicted]
    averaged = score(labels, np.mean(predicted, axis=0))
    return {
        "models": [{"run": run, **its} for run, its in zip(runs, scores, strict=True)],
        "averaged": averaged,
        "better_than_best_by": averaged["accuracy"] - scores[0]["accuracy"],
        "num_test": len(first),
    }


def predict(run: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels [n] and predicted probabilities [n, classes] of a run's test samples."""
    config = config_io.read_toml(run / "config.toml")
    named = setup.find(config)
    data_set = named.read_data()
    keras.config.set_dtype_policy(config.train.precision)
    model = named.build_model(data_set.input_shape, data_set.num_classes)
    resume.load_weights(model, run / "model.keras")
    samples = data.evaluation_shard(len(data_set.test), 0, 1)
    labels, probabilities = [], []
    for inputs, own in data.evaluation_batches(data_set.test, samples, config.train.batch_size):
        logits = np.asarray(keras.ops.convert_to_numpy(model.predict_on_batch(inputs)), np.float64)
        exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities.append(exponents / exponents.sum(axis=-1, keepdims=True))
        labels.append(np.asarray(own))
    return np.concatenate(labels), np.concatenate(probabilities)


def score(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> dict[str, float]:
    """Accuracy and cross-entropy from labels [n] and probabilities [n, classes]."""
    of_the_label = np.take_along_axis(probabilities, labels[:, None], axis=-1)
    accuracy = np.mean(np.argmax(probabilities, axis=-1) == labels)
    return {"accuracy": float(accuracy), "loss": float(-np.mean(np.log(np.maximum(of_the_label, 1e-300))))}
