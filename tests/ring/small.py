"""A small model, its data and its training, for properties that run on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import ringtrain.hvd as hvd

BATCH = 4


def build(seed: int = 7, dtype: str = "float64", layers: tuple[Any, ...] = ()) -> keras.Model:
    """A model of 6 inputs and 3 outputs; the same weights for the same seed."""
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(8, activation="tanh", dtype=dtype)
    return keras.Sequential([keras.Input((6,), dtype=dtype), hidden, *layers, keras.layers.Dense(3, dtype=dtype)])


def global_batches(num_steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same on every rank: inputs (size * BATCH, 6) and targets (size * BATCH, 3), different from step to step."""
    random = np.random.default_rng(3)
    shape = (num_steps, hvd.size() * BATCH)
    return list(zip(random.normal(size=(*shape, 6)), random.normal(size=(*shape, 3)), strict=True))


def shares(num_steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of each global batch."""
    own = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
    return [(x[own], y[own]) for x, y in global_batches(num_steps)]


def train(
    model: keras.Model, optimizer: Any, batches: list[tuple[np.ndarray, np.ndarray]], **options: Any
) -> keras.Model:
    """One step per batch under Keras' own training loop."""
    model.compile(optimizer, "mse", **options)
    for x, y in batches:
        model.train_on_batch(x, y)
    return model


def alone(
    model: keras.Model, optimizer: Any, batches: list[tuple[np.ndarray, np.ndarray]], **options: Any
) -> keras.Model:
    """Training of the reference that each rank computes by itself; without a graph, whose tracing takes longer."""
    return train(model, optimizer, batches, run_eagerly=True, **options)


def distance(model: keras.Model, other: keras.Model) -> float:
    """Largest difference of any two weights."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)


def spread(model: keras.Model) -> float:
    """Largest difference of any weight between two ranks."""
    return spread_of(np.concatenate([weight.reshape(-1) for weight in model.get_weights()]))


def spread_of(value: Any) -> float:
    """Largest difference of any element between two ranks."""
    everybody = hvd.allgather(tf.convert_to_tensor(value)[None]).numpy()
    return float(np.ptp(everybody, axis=0).max())


@contextlib.contextmanager
def horovods_operations() -> Iterator[list[tuple[str, str]]]:
    """Kind and device of all of Horovod's operations in a block, and in graphs that it makes."""
    found: list[tuple[str, str]] = []

    def note(op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        if "Horovod" in str(op_type):
            found.extend((str(op_type), output.device) for output in outputs)

    op_callbacks.add_op_callback(note)
    try:
        yield found
    finally:
        op_callbacks.remove_op_callback(note)


def plain(optimizer: Any, **_: Any) -> Any:
    """The negative control: takes the place of DistributedOptimizer and does nothing."""
    return optimizer


def raised(kind: type[BaseException], action: Callable[[], Any]) -> str:
    """The message of an exception that must come."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")
