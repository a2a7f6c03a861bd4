"""Training step after which all ranks hold the same state, and which changes nothing unless all reductions succeed.

Moving statistics and metrics are reduced with the gradients, so that any rank can continue for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.errors import ConfigError
from ringtrain.hvd.keras_patches import gradients_of, innermost, layers_of
from ringtrain.hvd.step_timing import PLACE

SEED_STEP = 7_368_787
"""prime by which the seeds of neighbours differ"""


class StepResult(NamedTuple):
    """Gradients, statistics and metrics of the rows of a rank, of a virtual rank, or of all ranks together."""

    gradients: list[Any]
    """of `SharedStep.weights`"""
    moving: list[Any]
    counters: list[Any]
    metrics: list[Any]


class SharedStep:
    """Training step of a compiled model whose ranks may have different numbers of rows: see `hvd.weigh_gradients`.

    Args:
        input_shape: Of a row.
    """

    def __init__(self, model: keras.Model, input_shape: Sequence[int]) -> None:
        if type(model).train_step is not keras.Model.train_step:
            raise ConfigError(
                f"model.name: {type(model).__name__} has a train_step of its own, which elastic runs and virtual ranks"
                " would not call: leave it to Keras"
            )
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.SpectralNormalization):
                raise ConfigError(
                    f"model.name: layer {layer.name} (SpectralNormalization) changes its kernel in the forward pass,"
                    " which elastic runs and virtual ranks cannot undo: leave it out"
                )
        self.model, self.reduction = model, innermost(model.optimizer).reduction
        own = hvd.weights_of_one_rank(model)
        self.moving = [one for one in own if keras.backend.is_float_dtype(one.dtype)]
        self.counters = [one for one in own if keras.backend.is_int_dtype(one.dtype)]
        self.seeds = hvd.seeds(model)
        model._symbolic_build(data_batch=(tf.zeros([2, *input_shape]), tf.zeros([2], tf.int64)))  # makes the metrics
        self.weights = list(model.trainable_weights)
        self.metrics = list(model.metrics_variables)
        self.changed = [*hvd.layers_own_variables(model), *self.seeds, *self.metrics]
        """variables besides weights and optimizer, which the forward pass changes"""
        self._before = [tf.Variable(one.value, trainable=False) for one in self.changed]
        self._is_under_way = tf.Variable(False, trainable=False)
        object.__setattr__(model, "train_step", self.train_step)
        hvd.share_state(model)

    def undo(self) -> bool:
        """Returns to the end of the last complete step, if a reduction has failed; returns whether one has."""
        if not self._is_under_way:
            return False
        for one, before in zip(self.changed, self._before, strict=True):
            one.assign(before)
        self._is_under_way.assign(False)
        return True

    def parts(self) -> Sequence[Any]:
        """Numbers of the parts that this rank's rows consist of; each has random numbers of its own."""
        return [tf.cast(hvd.rank_op(), tf.int64)]

    def totals(self, parts: Sequence[StepResult]) -> StepResult:
        """Averaged gradients, and moving statistics, counters and metrics of all ranks' rows together. Collective."""
        (part,), inner = parts, innermost(self.model.optimizer)
        share = tf.cast(1.0 if self.reduction.share is None else self.reduction.share.read_value(), tf.float64)
        given = [place for place, gradient in enumerate(part.gradients) if gradient is not None]
        weights = [self.weights[place] for place in given]
        gradients: list[Any] = [None] * len(part.gradients)
        reduced = inner.reduce(inner.weighted([part.gradients[place] for place in given], weights), weights)
        for place, gradient in zip(given, reduced, strict=True):
            gradients[place] = gradient
        rank, size = hvd.rank_op(), tf.cast(hvd.size_op(), tf.float64)
        # A rank without rows has one in its place, which counts nothing.
        own = [
            *(one * tf.cast(share / size, one.dtype) for one in part.moving),
            *(one * tf.cast(rank == 0, one.dtype) for one in part.counters),
            *(one * tf.cast(share > 0, one.dtype) for one in part.metrics),
        ]
        rest = iter(reduced_by_dtype([own], lambda rows: self.reduction.sum_of_parts(rows[0])))
        moving, counters, metrics = ([next(rest) for _ in each] for each in part[1:])
        return StepResult(gradients, moving, counters, metrics)

    def train_step(self, batch: Any) -> Any:
        """A step of Keras with this rank's rows."""
        model, optimizer = self.model, self.model.optimizer
        pairs = zip(self.changed, self._before, strict=True)
        kept = [before.assign(one.value, read_value=False) for one, before in pairs]
        with tf.control_dependencies(kept):
            begun = self._is_under_way.assign(True, read_value=False)
        numbers = self.parts()
        # What follows changes variables only when they are kept: it needs this input.
        with tf.control_dependencies([begun]):
            batch = keras.tree.map_structure(lambda one: None if one is None else tf.identity(one), batch)
            before = {id(one): kept.read_value() for one, kept in zip(self.changed, self._before, strict=True)}
        parts = [self._part(batch, place, len(numbers), number, before) for place, number in enumerate(numbers)]
        PLACE.note("computed", [part.gradients for part in parts])
        total = self.totals(parts)
        # And weights only when nothing can fail any more.
        flat = [one for one in tf.nest.flatten(total, expand_composites=True) if one is not None]
        with tf.control_dependencies(flat), innermost(optimizer).reduced_before():
            pairs = zip(total.gradients, self.weights, strict=True)
            optimizer.apply_gradients([(gradient, one) for gradient, one in pairs if gradient is not None])
            for one, value in zip([*self.moving, *self.counters], [*total.moving, *total.counters], strict=True):
                one.assign(value)
            for one, value in zip(self.metrics, total.metrics, strict=True):
                one.assign(before[id(one)] + value)
            for one in self.seeds:
                one.assign(one.value - seed_of(numbers[-1]))
            self._is_under_way.assign(False)
        return model.get_metrics_result()

    def _part(self, batch: Any, place: int, count: int, number: Any, before: dict[int, Any]) -> StepResult:
        """Gradients of a part of the rows, and the statistics, counters and metrics to which it leads."""
        model = self.model

        def rows_of(tensor: Any) -> Any:
            if tensor is None:
                return None
            length = (tensor.shape[0] or tf.shape(tensor)[0]) // count
            return tensor[place * length : (place + 1) * length]

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(rows_of, batch))
        for one in [*self.moving, *self.counters]:
            one.assign(before[id(one)])
        for one in self.seeds:
            one.assign(before[id(one)] + seed_of(number))
        for one in self.metrics:
            one.assign(tf.zeros_like(before[id(one)]))
        y_pred, loss, gradients = gradients_of(model, x, y, sample_weight)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return StepResult(
            gradients, *([one.value + 0 for one in each] for each in (self.moving, self.counters, self.metrics))
        )


def seed_of(number: Any) -> Any:
    """Offset of the shared seeds for a part of a batch, which gives it random numbers of its own."""
    return number * SEED_STEP % 2**31


def reduced_by_dtype(parts: Sequence[Sequence[Any]], reduce: Any) -> list[Any]:
    """Reduces lists of tensors to one: `reduce` gets all of a dtype as rows [parts, n], and returns a vector [n]."""
    results: list[Any] = [None] * len(parts[0])
    for dtype in dict.fromkeys(tensor.dtype for tensor in parts[0]):
        places = [place for place, tensor in enumerate(parts[0]) if tensor.dtype == dtype]
        vectors = [tf.concat([tf.reshape(part[place], [-1]) for place in places], 0) for part in parts]
        cut = tf.split(reduce(tf.stack(vectors)), [tf.size(parts[0][place]) for place in places])
        for place, tensor in zip(places, cut, strict=True):
            results[place] = tf.ensure_shape(tf.reshape(tensor, tf.shape(parts[0][place])), parts[0][place].shape)
    return results
