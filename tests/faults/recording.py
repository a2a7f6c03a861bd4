"""A job whose ranks record the samples that their steps really get: each picture has its number in its first pixel."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.data import row_order

RECORDS = "RINGTRAIN_TEST_RECORDS"
"""variable with the folder of the records, a file per process"""
WRONG = "RINGTRAIN_TEST_WRONG"
"""variable with a number of samples by which the pipeline reads beside the right ones"""
NUM_TRAIN = 1437
SCALE = 2048.0
"""Numbers divided by it are exact as float32."""
seen: list[int] = []
"""of the step under way"""


def data() -> Any:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = (digits.images[..., None] / 16).astype(np.float32)
    pictures[:, 0, 0, 0] = np.arange(len(pictures)) / SCALE
    train, test = (pictures[:NUM_TRAIN], digits.target[:NUM_TRAIN]), (pictures[NUM_TRAIN:], digits.target[NUM_TRAIN:])
    if shift := int(os.environ.get(WRONG, 0)):  # a pipeline that trains neighbors twice
        rows = np.arange(NUM_TRAIN) // (shift + 1) * (shift + 1)
        train = train[0][rows], train[1][rows]
    return train, test


class Record(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            numbers = tf.cast(tf.round(x[:, 0, 0, 0] * SCALE), tf.int64)
            tf.numpy_function(lambda them: seen.extend(them.tolist()), [numbers], [], stateful=True)
        return x


def model(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    inputs = keras.Input(input_shape)
    x = keras.layers.Dense(32, activation="relu")(keras.layers.Flatten()(Record()(inputs)))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def odd_model(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """With dropout and batch normalization."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(Record(dtype="float32")(inputs))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(32)(x))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(keras.layers.Dropout(0.3)(keras.ops.relu(x))))


class Recording(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.file = (Path(os.environ[RECORDS]) / f"{os.getpid()}.jsonl").open("a")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        seen.clear()  # of a step that was interrupted

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        record = {"time_s": time.time(), "step": int(self.model.optimizer.iterations), "samples": list(seen)}
        seen.clear()
        print(json.dumps(record), file=self.file, flush=True)


def trained_by_epoch(folder: Path, events: Sequence[Mapping[str, Any]], batch_size: int) -> dict[int, Counter[int]]:
    """How often each sample was trained in the steps that count, by epoch.

    The journal says which processes have trained which steps that count; the samples are those that they got. A process
    that was killed after a step may not have recorded it: the rest of the step's batch was its.
    """
    begun = [event for event in events if event["event"] in ("start", "resize") and "generation" in event]
    last = [event for event in events if event["event"] == "end" and "generation" in event][-1]
    counted: dict[int, Counter[int]] = {}
    generation, upto = last["generation"], last["global_step"]
    while generation:
        of_ranks = {event["rank"]: event for event in begun if event["generation"] == generation}
        samples = [_samples_by_step(folder, event, begun) for event in of_ranks.values()]
        first = of_ranks[min(of_ranks)]
        for step in range(first["global_step"] + 1, upto + 1):
            epoch, index = divmod(step - 1, math.ceil(NUM_TRAIN / batch_size))
            got = [each[step] for each in samples if step in each]
            lost = [each for each in samples if step not in each]
            assert not any(later > step for each in lost for later in each), f"step {step} was not recorded"
            trained = Counter(sample for each in got for sample in each)
            counted.setdefault(epoch, Counter()).update(trained)
            if lost:
                assert generation != last["generation"]
                order = row_order.permutation(NUM_TRAIN, 0, epoch)
                whole = order[index * batch_size : (index + 1) * batch_size].tolist()
                counted[epoch].update(set(whole) - set(trained))
        generation, upto = first["after"], first["global_step"]
    return counted


def _samples_by_step(
    folder: Path, first: Mapping[str, Any], begun: Sequence[Mapping[str, Any]]
) -> dict[int, list[int]]:
    """What a process got as a member of a generation, which ends for it when its next one begins."""
    process, begin_s = first["process"], first["time_s"]
    later = [event["time_s"] for event in begun if event["process"] == process and event["time_s"] > begin_s]
    lines = (folder / f"{process}.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if begin_s <= record["time_s"] < min([*later, math.inf])]
    return {record["step"]: record["samples"] for record in records}


def recorded_s(folder: Path) -> list[float]:
    """Times at which steps were recorded, by any process."""
    return [json.loads(line)["time_s"] for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
