"""Averaged prediction of several trained models compared with each of them, in one process: for ringtrain sweep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from numpy.typing import NDArray

from ringtrain import config_io, data
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.run import resume, setup


def main(words: Sequence[str]) -> int:
    """Evaluates models on the test samples of their own configurations.

    Args:
        words: --run FOLDER per model, the best first; --out FILE.

    Raises:
        LaunchError: The models have different test samples.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args(stats.split(words)[0])
    ranks.begin(config_io.read_toml(Path(options.run[0], "config.toml")))
    labels, first = predict(Path(options.run[0]))
    found = [first]
    for run in options.run[1:]:
        own, probabilities = predict(Path(run))
        if not np.array_equal(own, labels):
            raise LaunchError(f"{run}: was tested on other samples than {options.run[0]}: an ensemble needs the same")
        found.append(probabilities)
    named = dict(zip([*map(str, options.run), "all averaged"], [*found, np.mean(found, axis=0)], strict=True))
    scores = {name: score(labels, probabilities) for name, probabilities in named.items()}
    rows = [[name, f"{one['accuracy']:.2%}", f"{one['loss']:.4f}"] for name, one in scores.items()]
    results = {
        "table": [["", "test accuracy", "cross-entropy"], *rows],
        "models": [{"run": run, **scores[run]} for run in options.run],
        "averaged": scores["all averaged"],
        "better_than_best_by": scores["all averaged"]["accuracy"] - scores[options.run[0]]["accuracy"],
        "num_test": len(found[0]),
    }
    stats.write(Path(options.out), "ensemble", {}, results)
    return 0


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
