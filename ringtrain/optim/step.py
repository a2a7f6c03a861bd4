"""The training step of a model on all ranks.

    rows of this rank -> parts -> gradients of each part -> sums over all ranks -> one update

Where all ranks have equally many rows, and each has moving statistics of its own, Keras' step is enough: the optimizer
of `hvd.DistributedOptimizer` reduces the gradients (hvd/reduction.py). A `Step` is for the other cases:

    shares      Ranks have different numbers of rows, or losses with masks and weights: `uneven`. Arrays and streams.
    sums        Moving statistics, seeds and metrics are summed with the gradients, so that any rank can continue for
                all others; and nothing changes unless all sums succeed (`Step.undo`). This needs Keras' own
                `train_step`. Elastic runs and virtual ranks.
    parts       Each part is that of a virtual rank: `virtual_ranks`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.errors import ConfigError
from ringtrain.hvd import train_step
from ringtrain.hvd.keras_patches import innermost, layers_of, set_untracked
from ringtrain.hvd.step_timing import PLACE
from ringtrain.optim.uneven import LossWeights

SEED_STEP = 7_368_787
"""prime by which the seeds of neighbours differ"""


class StepResult(NamedTuple):
    """Gradients, statistics and metrics of the rows of a part, or of all ranks together."""

    gradients: list[Any]
    """of `Step.weights`; None: a weight has none"""
    moving: list[Any]
    counters: list[Any]
    metrics: list[Any]


class Sums(Protocol):
    """How the parts of all ranks are added up."""

    def numbers(self, step: Step) -> Sequence[Any]:
        """Numbers of the parts that this rank's rows consist of; each has random numbers of its own."""

    def totals(self, step: Step, parts: Sequence[StepResult]) -> StepResult:
        """Averaged gradients, and moving statistics, counters and metrics of all rows together. Collective."""


class Step:
    """Training step of a compiled and built model on all ranks; the model trains by it while it is installed.

    Args:
        has_shares: Whether batches come as (share, batch), since the ranks' numbers of rows differ; see
            `hvd.weigh_gradients`.
        has_empty_parts: Whether a share can be 0. The row in its place then changes no metric and no statistic.
        sums: How statistics and metrics are summed with the gradients. None: each rank has its own.

    Attributes:
        fingerprint: Of all batches so far, if they come as ([share, fingerprint], batch); below 2 ** 31.
    """

    def __init__(
        self,
        model: keras.Model,
        has_shares: bool = False,
        has_empty_parts: bool = False,
        sums: Sums | None = None,
    ) -> None:
        self.model = model
        self.has_empty_parts = has_empty_parts
        self.sums = sums
        self._inner: train_step.TrainStep
        """the step without this layer"""
        self.share = tf.Variable(1.0, trainable=False, dtype=tf.float64) if has_shares else None
        self.fingerprint = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._losses = LossWeights(model, self.share)
        if sums is not None:
            self._prepare_sums()

    def __enter__(self) -> Step:
        train_step.wrap(self.model, "ranks", self._around)
        if self.sums is None:
            self._losses.replace()
        return self

    def __exit__(self, *_: object) -> None:
        train_step.unwrap(self.model, "ranks")
        if self.sums is None:
            self._losses.restore()

    def _around(self, inner: train_step.TrainStep) -> train_step.TrainStep:
        self._inner = inner
        if self.sums is None:
            return self._of_this_rank
        return functools.partial(self._of_all_ranks, self.sums)

    # ---- each rank has statistics, seeds and metrics of its own; the optimizer reduces ------------------------------

    def _of_this_rank(self, data: Any) -> Any:
        """A step of the model with this rank's part of the batch."""
        # The share of this rank in the batch, which weighs its gradients.
        if self.share is not None:
            header, data = data
            share = header
            if header.shape.rank:
                share, fingerprint = header[0], header[1]
                self.fingerprint.assign(tf.math.floormod(self.fingerprint * 31 + fingerprint, tf.int32.max))
            self.share.assign(share)

        # A rank without rows trains a placeholder row with the weight 0: what it changes is set back.
        changed = self._changed_by_a_row() if self.has_empty_parts else []
        before = [tf.identity(variable.value) for variable in changed]
        with self._losses.in_step():
            logs = self._inner(data)
        for variable, value in zip(changed, before, strict=True):
            variable.assign(tf.where(self.share > 0, variable.value, value))  # type: ignore[operator]
        return logs

    def _changed_by_a_row(self) -> list[Any]:
        """Metrics, seeds and this rank's moving statistics."""
        weights = {id(variable) for variable in self.model.weights}
        seeds_and_metrics = [*self.model.variables, *self.model.metrics_variables]
        rest = {id(variable): variable for variable in seeds_and_metrics if id(variable) not in weights}
        return [*rest.values(), *hvd.weights_of_one_rank(self.model)]

    # ---- statistics, seeds and metrics are summed with the gradients -----------------------------------------------

    def _prepare_sums(self) -> None:
        model = self.model
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.SpectralNormalization):
                raise ConfigError(
                    f"model.name: layer {layer.name} (SpectralNormalization) changes its kernel in the forward pass,"
                    " which elastic runs and virtual ranks cannot undo: leave it out"
                )
        self.reduction = innermost(model.optimizer).reduction
        own = hvd.weights_of_one_rank(model)
        self.moving = [variable for variable in own if keras.backend.is_float_dtype(variable.dtype)]
        self.counters = [variable for variable in own if keras.backend.is_int_dtype(variable.dtype)]
        self.seeds = hvd.seeds(model)
        self.weights = list(model.trainable_weights)
        self.metrics = list(model.metrics_variables)
        self.changed = [*hvd.layers_own_variables(model), *self.seeds, *self.metrics]
        """variables besides weights and optimizer, which the forward pass changes"""
        self._before = [tf.Variable(variable.value, trainable=False) for variable in self.changed]
        self._is_under_way = tf.Variable(False, trainable=False)
        hvd.share_state(model)

    def undo(self) -> bool:
        """Returns to the end of the last complete step, if a reduction has failed; returns whether one has."""
        if not self._is_under_way:
            return False
        for variable, before in zip(self.changed, self._before, strict=True):
            variable.assign(before)
        self._is_under_way.assign(False)
        return True

    def _of_all_ranks(self, sums: Sums, batch: Any) -> Any:
        """A step of the model with this rank's rows, after which all ranks hold the same."""
        model, optimizer = self.model, self.model.optimizer

        # Keep what the forward pass changes, then note that a step is under way.
        kept = []
        for variable, copy in zip(self.changed, self._before, strict=True):
            kept.append(copy.assign(variable.value, read_value=False))
        with tf.control_dependencies(kept):
            begun = self._is_under_way.assign(True, read_value=False)

        # What follows needs this input, and so changes variables only after they are kept.
        before = {}
        with tf.control_dependencies([begun]):
            batch = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), batch)
            for variable, copy in zip(self.changed, self._before, strict=True):
                before[id(variable)] = copy.read_value()

        # Gradients and sums of each part of this rank's rows, then of all ranks'.
        numbers = sums.numbers(self)
        parts = []
        for place, number in enumerate(numbers):
            parts.append(self._part(batch, place, len(numbers), number, before))
        PLACE.note("computed", [part.gradients for part in parts])
        total = sums.totals(self, parts)

        # Weights change only when all sums are there, and nothing can fail any more.
        flat = [tensor for tensor in tf.nest.flatten(total, expand_composites=True) if tensor is not None]
        with tf.control_dependencies(flat), innermost(optimizer).reduced_before():
            pairs = zip(total.gradients, self.weights, strict=True)
            optimizer.apply_gradients([(gradient, weight) for gradient, weight in pairs if gradient is not None])
            for variable, value in zip(self.moving, total.moving, strict=True):
                variable.assign(value)
            for variable, value in zip(self.counters, total.counters, strict=True):
                variable.assign(value)
            for variable, value in zip(self.metrics, total.metrics, strict=True):
                variable.assign(before[id(variable)] + value)
            for seed in self.seeds:
                seed.assign(seed.value - seed_of(numbers[-1]))
            self._is_under_way.assign(False)
        return model.get_metrics_result()

    def _part(self, batch: Any, place: int, count: int, number: Any, before: dict[int, Any]) -> StepResult:
        """Gradients of a part of the rows, and the statistics, counters and metrics to which it leads."""

        def rows_of(tensor: Any) -> Any:
            if tensor is None:
                return None
            length = (tensor.shape[0] or tf.shape(tensor)[0]) // count
            return tensor[place * length : (place + 1) * length]

        for variable in [*self.moving, *self.counters]:
            variable.assign(before[id(variable)])
        for seed in self.seeds:
            seed.assign(before[id(seed)] + seed_of(number))
        for metric in self.metrics:
            metric.assign(tf.zeros_like(before[id(metric)]))
        with self._gradients_kept() as gradients:
            self._inner(keras.tree.map_structure(rows_of, batch))
        return StepResult(
            gradients=[gradients.get(id(weight)) for weight in self.weights],
            moving=[variable.value + 0 for variable in self.moving],
            counters=[variable.value + 0 for variable in self.counters],
            metrics=[variable.value + 0 for variable in self.metrics],
        )

    @contextlib.contextmanager
    def _gradients_kept(self) -> Iterator[dict[int, Any]]:
        """Context in which the optimizer keeps the gradients, by the weight's id, instead of applying them."""
        optimizer, kept = self.model.optimizer, dict[int, Any]()

        def keep(grads_and_vars: Any) -> None:
            kept.update((id(variable), gradient) for gradient, variable in grads_and_vars)

        before = vars(optimizer).pop("apply_gradients", None)  # which a script may have set on the object
        set_untracked(optimizer, apply_gradients=keep)
        try:
            yield kept
        finally:
            del vars(optimizer)["apply_gradients"]
            if before is not None:
                set_untracked(optimizer, apply_gradients=before)


class SumsOverRanks:
    """Sums by allreduce, of one part per rank, for any number of ranks: it may change between two steps."""

    def numbers(self, step: Step) -> Sequence[Any]:
        return [tf.cast(hvd.rank_op(), tf.int64)]

    def totals(self, step: Step, parts: Sequence[StepResult]) -> StepResult:
        (part,) = parts  # of this rank
        inner, reduction = innermost(step.model.optimizer), step.reduction
        share = tf.cast(1.0 if reduction.share is None else reduction.share.read_value(), tf.float64)
        given = [place for place, gradient in enumerate(part.gradients) if gradient is not None]
        weights = [step.weights[place] for place in given]
        gradients: list[Any] = [None] * len(part.gradients)
        reduced = inner.reduce(inner.weighted([part.gradients[place] for place in given], weights), weights)
        for place, gradient in zip(given, reduced, strict=True):
            gradients[place] = gradient
        rank, size = hvd.rank_op(), tf.cast(hvd.size_op(), tf.float64)
        # A rank without rows has computed a placeholder row: its factor is 0.
        own = [
            *(value * tf.cast(share / size, value.dtype) for value in part.moving),
            *(value * tf.cast(rank == 0, value.dtype) for value in part.counters),
            *(value * tf.cast(share > 0, value.dtype) for value in part.metrics),
        ]
        rest = iter(reduced_by_dtype([own], lambda rows: reduction.sum_of_parts(rows[0])))
        moving, counters, metrics = ([next(rest) for _ in each] for each in part[1:])
        return StepResult(gradients, moving, counters, metrics)


def step_of_all_ranks(model: keras.Model, input_shape: Sequence[int], sums: Sums) -> Step:
    """Installs a step after which all ranks hold the same state, for as long as the model exists.

    Args:
        model: Compiled model with Keras' own `train_step`, which is trained on rows with integer classes.
        input_shape: Of a row.

    Raises:
        ConfigError: The model has a `train_step` of its own, or a layer whose forward pass cannot be undone.
    """
    if type(model).train_step is not keras.Model.train_step or train_step.has_own_step(model):
        raise ConfigError(
            f"model.name: {type(model).__name__} has a train_step of its own, which elastic runs and virtual ranks"
            " would not call: leave it to Keras"
        )
    model._symbolic_build(data_batch=(tf.zeros([2, *input_shape]), tf.zeros([2], tf.int64)))  # makes the metrics
    return Step(model, sums=sums).__enter__()


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
