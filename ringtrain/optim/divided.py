"""Comparison of a training step with a whole batch and with its two halves, in one process, before training.

What a `train_step`, a loss or an optimizer does with the rows of a batch by itself (clips gradients, adds up losses,
mixes rows) gives other gradients where ranks divide the batch. The step is traced once more, with these differences: it
updates no weights, random numbers are those of the first row for all rows, and batch normalization uses its moving
statistics. Afterwards all variables are as before.
"""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random

from ringtrain import hvd
from ringtrain.errors import ConfigError
from ringtrain.hvd import train_step
from ringtrain.hvd.keras_patches import compiled_losses, innermost, layers_of
from ringtrain.optim import metric_states, own_step
from ringtrain.optim.metric_states import NUM_ROWS, Rows
from ringtrain.optim.uneven import LossWeights

TOLERANCE, TOLERANCE_16_BITS = 1e-3, 5e-2
"""largest distance of gradients from rounding, relative to their norm"""
MAX_DIVISORS = 16
OF_SHAPES = ("normal", "uniform", "truncated_normal", "randint", "gamma", "binomial", "beta")
"""functions of random numbers in Keras' backend whose argument `shape` begins with the rows"""
OF_TENSORFLOW = ("normal", "uniform", "truncated_normal")
STATEFUL = {
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "RandomShuffle",
    "Multinomial",
    "RandomGamma",
    "RandomPoissonV2",
    "StatefulStandardNormalV2",
    "StatefulUniform",
    "StatefulUniformInt",
    "StatefulUniformFullInt",
    "StatefulTruncatedNormal",
    "StatefulRandomBinomial",
}
"""operations of `tf.random`"""


@dataclass
class Comparison:
    """What was seen of a step."""

    draws: bool = False
    """whether it draws random numbers by Keras"""
    draws_by_tensorflow: bool = False
    distance: float | None = None
    """of the mean of the halves' gradients from that of the whole batch, if it is more than rounding"""
    metrics: metric_states.StateKinds | None = None
    """what was seen of metrics"""
    constants: int = 0
    """checksum of the numbers in the step that are no variables, as of an array that a layer keeps"""
    error: str = ""
    """why gradients were not compared"""


def is_known(model: keras.Model) -> bool:
    """Returns whether a model consists of Keras' own parts, whose steps with divided batches are known."""
    kind = type(model)
    losses = [entry.loss for entry in compiled_losses(model)]
    parts = [*layers_of(model)[1:], *losses, *map(innermost, hvd.optimizers_of(model))]
    return (
        kind.train_step is keras.Model.train_step
        and kind.compute_loss is keras.Model.compute_loss
        and kind.__module__.startswith("keras.")
        and all(type(part).__module__.startswith("keras.") for part in parts)
        and all(map(_is_of_keras, losses))
        and all(isinstance(operation, keras.Layer) for operation in getattr(model, "operations", ()))
        and not any(isinstance(part, keras.layers.Lambda) for part in parts)
        and not any(map(_has_foreign_parts, layers_of(model)[1:]))
    )


def _has_foreign_parts(layer: keras.Layer) -> bool:
    """Returns whether a layer has a function or a regularizer that is not Keras'."""
    for value in vars(layer).values():
        is_part = isinstance(value, FunctionType | keras.regularizers.Regularizer)
        module = str(getattr(value if isinstance(value, FunctionType) else type(value), "__module__", ""))
        if is_part and not module.startswith(("keras.", "ringtrain.")):
            return True
    return False


def _is_of_keras(loss: Any) -> bool:
    function = getattr(loss, "fn", loss)
    return str(getattr(function, "__module__", "")).startswith("keras.")


def refuse_metrics(model: keras.Model, batch: Any, rows: Rows | None = None) -> list[str]:
    """Raises ConfigError for a metric whose state is no sum over the parts of a batch, each of which begins with zeros.

    Args:
        model: Built and compiled.
        batch: One of the model's batches, or its specification.
        rows: None: rows are made up.

    Returns:
        Names of metrics of the script that could not be tested.
    """
    names = metric_states.of_script(model)
    rows = rows or metric_states.made_up_rows(batch)
    if not names or rows is None:
        return names
    if train_step.is_own(model):
        seen = compare(model, batch, rows).metrics
    else:
        seen = metric_states.of_test_step(model, rows)
    if seen and seen.not_over_updates:
        raise ConfigError(
            f"metrics: an update of {', '.join(seen.not_over_updates)} is no addition, as of a minimum or a last value,"
            " but virtual ranks and elastic jobs sum what the parts of a batch add: leave the metric out of compile,"
            " and evaluate it afterwards"
        )
    if seen:
        return []
    return names


def compare(model: keras.Model, batch: Any, rows: Rows | None) -> Comparison:
    """Compares a step of a built and compiled model with `NUM_ROWS` rows and with two halves of them.

    Args:
        batch: One of the model's batches, or its specification.
        rows: Returns the batch of the rows from one number up to another. None: the step is only traced.
    """
    comparison = Comparison()
    try:
        _compare(model, batch, rows, comparison)
    except Exception as error:  # of the script's own code, which may not be traced again or with so few rows
        comparison.draws = comparison.draws or bool(hvd.seeds(model))
        first_line = str(error).strip().partition("\n")[0]
        comparison.error = f"{type(error).__name__}: {first_line[:100]}"
    finally:
        model.reset_metrics()
    return comparison


def _compare(model: keras.Model, batch: Any, rows: Rows | None, comparison: Comparison) -> None:
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if model.run_eagerly or not all(isinstance(leaf, tf.Tensor | tf.TensorSpec) for leaf in leaves):
        comparison.draws = bool(hvd.seeds(model))
        comparison.error = "it runs eagerly, or has inputs that are not dense"
        return

    # Trace the step; what it does with random numbers may already make the comparison impossible.
    gradients: list[Any] = []
    halves = _Halves(model)
    noise = _Noise(comparison)

    def step(batch: Any) -> tuple[list[Any], Any]:
        gradients.clear()
        halves.divisors.clear()
        with halves.in_step(None):
            model.train_step(batch)
        missing = [tf.constant(0.0, tf.float64)] * (MAX_DIVISORS - len(halves.divisors))
        return list(gradients), tf.stack([*halves.divisors, *missing])

    with halves, noise, _captured(model, gradients), _with_moving_statistics(model):
        spec = tf.nest.map_structure(_with_any_rows, batch)
        with train_step.inlined_functions():
            traced = tf.function(step, autograph=False).get_concrete_function(spec)
    comparison.constants = _checksum_of_constants(traced.graph)
    if STATEFUL & set(own_step.operations(traced.graph)):
        comparison.draws_by_tensorflow = noise.mixes = True
    if noise.mixes:
        comparison.error = "random numbers depend on the number of rows"
    if rows is None:
        comparison.error = "its inputs are not dense"
    if rows is None or noise.mixes:
        return

    whole, first, second = _gradients(model, traced, halves, rows, comparison)
    distance = _distance(whole, first, second)
    tolerance = TOLERANCE
    if any("16" in layer.compute_dtype for layer in layers_of(model)):
        tolerance = TOLERANCE_16_BITS
    if distance > tolerance:
        comparison.distance = distance


def _checksum_of_constants(graph: Any) -> int:
    """Of those in a graph and the tensors that it captures, in no order."""
    checksums = []
    for operation in graph.get_operations():
        if operation.type == "Const":
            checksums.append(zlib.crc32(operation.get_attr("value").SerializeToString()))
    for tensor, _ in graph.captures:
        if tensor.dtype == tf.string:
            checksums.append(zlib.crc32(repr(tensor.numpy().tolist()).encode()))
        elif tensor.dtype not in (tf.resource, tf.variant):
            checksums.append(zlib.crc32(np.ascontiguousarray(tensor.numpy()).data.cast("B")))
    return zlib.crc32(repr(sorted(checksums)).encode())


def _gradients(model: keras.Model, traced: Any, halves: _Halves, rows: Rows, comparison: Comparison) -> list[list[Any]]:
    """Gradients of the whole batch, and of each half, always from the same variables; also notes sums of metrics."""
    of_check = {halves.size.ref(), halves.totals.ref()}
    changed = [variable for variable in traced.graph.variables if variable.ref() not in of_check]
    before = [(variable, variable.read_value()) for variable in changed]
    of_metrics = {variable.value.ref() for variable in model.metrics_variables}
    gradients: dict[int, list[Any]] = {}
    """by the number of the first row, negative for the whole batch"""

    def update(begin: int, end: int) -> None:
        if end - begin == NUM_ROWS:  # comes first
            halves.size.assign(1)
            of_rows, divisors = traced(rows(begin, end))
            halves.totals.assign(divisors)
            gradients.setdefault(-1, of_rows)
        else:
            halves.size.assign(2)
            of_rows, _ = traced(rows(begin, end))
            gradients.setdefault(begin, of_rows)
        for variable, value in before:  # also weights that the step assigns, and seeds
            if variable.ref() not in of_metrics:
                variable.assign(value)

    try:
        comparison.metrics = metric_states.sums(metric_states.metrics_of(model), model.reset_metrics, update)
    finally:
        for variable, value in before:
            variable.assign(value)
    return [gradients[begin] for begin in sorted(gradients)]


def _with_any_rows(tensor: Any) -> Any:
    if tensor is None:
        return None
    rows = [None] if tensor.shape.rank else []
    return tf.TensorSpec([*rows, *tensor.shape[1:]], tensor.dtype)


def _distance(whole: Sequence[Any], first: Sequence[Any], second: Sequence[Any]) -> float:
    """Distance of the mean of two lists of gradients from a third, relative to its norm; 0 if it is not finite."""
    apart, norm = 0.0, 0.0
    for of_whole, of_first, of_second in zip(whole, first, second, strict=True):
        expected = tf.cast(of_whole, tf.float64)
        mean = (tf.cast(of_first, tf.float64) + tf.cast(of_second, tf.float64)) / 2
        apart += float(tf.reduce_sum(tf.square(mean - expected)))
        norm += float(tf.reduce_sum(tf.square(expected)))
    if not norm:
        return 0.0
    ratio = np.sqrt(apart / norm)
    if not np.isfinite(ratio):
        return 0.0
    return float(ratio)


@contextlib.contextmanager
def replaced(objects: Sequence[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Context in which objects have other attributes, behind Keras' tracking of attributes."""
    before = []
    for changed, values in objects:
        attributes = vars(changed)
        before.append({name: attributes[name] for name in values if name in attributes})
    try:
        for changed, values in objects:
            vars(changed).update(values)
        yield
    finally:
        for (changed, values), kept in zip(objects, before, strict=True):
            for name in values:
                vars(changed).pop(name, None)
            vars(changed).update(kept)


def _captured(model: keras.Model, gradients: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which a model's optimizers append the gradients that they would reduce, and update nothing."""

    def attributes(optimizer: Any) -> dict[str, Any]:
        def record(grads: Any, *_: Any) -> list[Any]:
            grads = list(grads)
            gradients.extend(tf.convert_to_tensor(gradient) for gradient in grads if gradient is not None)
            return grads

        def clip(grads: Any) -> list[Any]:
            optimizer._reached.append("hook")
            if optimizer._reduced_before:
                return list(grads)
            return record(grads)

        return {
            "reduce": record,
            "_clip_gradients": clip,
            "_backend_update_step": lambda *_: None,
            "_apply_weight_decay": lambda *_: None,
            "gradient_accumulation_steps": None,
            "use_ema": False,
        }

    objects = []
    for optimizer in map(innermost, hvd.optimizers_of(model)):
        for single in getattr(optimizer, "optimizers", [optimizer]):
            objects.append((single, attributes(single)))
    return replaced(objects)


def _with_moving_statistics(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Context in which batch normalization depends on no other row."""

    def call(layer: Any) -> Callable[..., Any]:
        original = layer.call
        return lambda inputs, training=None, **rest: original(inputs, training=False, **rest)

    return replaced([(layer, {"call": call(layer)}) for layer in hvd.batch_norm_layers(model)])


class _Halves(LossWeights):
    """Weights of a rank with one of `size` parts; sums over ranks are those of a whole batch. A context.

    Attributes:
        divisors: Sums over ranks that the step asks for.
        totals: Their values in the whole batch.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model, lambda: self.size, self._total)
        self.size = tf.Variable(1.0, trainable=False, dtype=tf.float64)
        self.totals = tf.Variable(np.ones(MAX_DIVISORS), trainable=False)
        self.divisors: list[Any] = []

    def __enter__(self) -> None:
        self.replace(None)

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _total(self, divisor: Any) -> Any:
        number = len(self.divisors)
        self.divisors.append(divisor)
        return tf.where(self.size == 1, divisor, self.totals[number])


class _Noise:
    """Context in which random numbers are the same for all rows, and noted.

    Attributes:
        mixes: Whether some depend on the number of rows nevertheless.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.mixes = False
        self._count = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> None:
        keras_functions: dict[str, Any] = {name: self._of_shape(keras_random, name) for name in OF_SHAPES}
        keras_functions |= {"dropout": self._dropout(keras_random.dropout)}
        keras_functions |= {name: self._mixing(getattr(keras_random, name)) for name in ("shuffle", "categorical")}
        functions = {name: self._of_shape(tf.random, name) for name in OF_TENSORFLOW}
        self._patches.enter_context(replaced([(keras_random, keras_functions), (tf.random, functions)]))

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _note(self, module: Any = keras_random) -> int:
        """Notes a call; returns a seed for it."""
        self._count += 1
        if module is keras_random:
            self.comparison.draws = True
        else:
            self.comparison.draws_by_tensorflow = True
        return self._count

    def _of_shape(self, module: Any, name: str) -> Callable[..., Any]:
        original = getattr(module, name)
        signature = inspect.signature(original)
        constant = original
        if module is tf.random:
            stateless = getattr(tf.random, f"stateless_{name}")
            constant = lambda seed, name=None, **rest: stateless(seed=(seed, 0), **rest)  # noqa: E731

        def drawn(*args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():  # of the first value of a variable
                return original(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            shape, seed = arguments["shape"], self._note(module)
            if tf.is_tensor(shape):
                arguments["shape"] = tf.concat([tf.ones_like(shape[:1]), shape[1:]], 0)
            elif shape:
                arguments["shape"] = (1, *shape[1:])
            return tf.broadcast_to(constant(**{**arguments, "seed": seed}), shape)

        return drawn

    def _dropout(self, original: Any) -> Callable[..., Any]:
        def dropped(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
            if not 0 < rate < 1 or not len(inputs.shape):
                return original(inputs, rate, noise_shape, seed)
            of_row = None if noise_shape is None else (1, *noise_shape[1:])
            return inputs * original(tf.ones_like(inputs[:1]), rate, of_row, self._note())

        return dropped

    def _mixing(self, original: Any) -> Callable[..., Any]:
        def mixing(*args: Any, **kwargs: Any) -> Any:
            self._note()
            self.mixes = True
            return original(*args, **kwargs)

        return mixing
