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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.data.parts import Header, rows_of
from ringtrain.errors import ConfigError
from ringtrain.hvd import train_step
from ringtrain.hvd.keras_patches import innermost, layers_of, set_untracked
from ringtrain.hvd.reduction import scaled
from ringtrain.hvd.step_timing import PLACE
from ringtrain.optim import own_step
from ringtrain.optim.uneven import LossWeights, sum_over_ranks

SEED_STEP = 7_368_787
"""prime by which the seeds of neighbours differ"""


class StepResult(NamedTuple):
    """Gradients, statistics and metrics of the rows of a part, or of all ranks together."""

    gradients: list[Any]
    """of `Step.weights`; None: a weight has none"""
    moving: list[Any]
    counters: list[Any]
    metrics: list[Any]
    logs: list[Any]
    """means over rows that a `train_step` returns besides metrics: float64 [], by name in order"""
    share: Any = None
    """float64 []: rows of the part times the number of parts, divided by all rows; None: 1"""

    def summands(self, is_first: Any) -> list[list[Any]]:
        """Statistics, counters, metrics and logs, multiplied so that the parts' sums are those of all rows."""
        share = 1.0 if self.share is None else self.share
        has_rows = 1.0 if self.share is None else share > 0
        return [
            [scaled(value, share) for value in self.moving],
            [value * tf.cast(is_first, value.dtype) for value in self.counters],
            [scaled(value, has_rows) for value in self.metrics],
            [scaled(value, share) for value in self.logs],
        ]


class Sums(Protocol):
    """How the parts of all ranks are added up.

    Attributes:
        is_one_part: Whether each rank has one part, so that a step of the model's own can update by itself.
    """

    is_one_part: bool

    def numbers(self, step: Step) -> Sequence[Any]:
        """Numbers of the parts that this rank's rows consist of; each has random numbers of its own."""

    def count(self) -> Any:
        """Number of the parts of all ranks: float64 []."""

    def over_parts(self, divisor: Any, loss: str) -> Any:
        """Sum over the parts of all ranks of a loss' divisor, float64 [], within the forward pass. Collective."""

    def totals(self, step: Step, parts: Sequence[StepResult]) -> StepResult:
        """Averaged gradients, and moving statistics, counters and metrics of all rows together. Collective."""


class Step:
    """Training step of a compiled and built model on all ranks; the model trains by it while it is installed.

    Args:
        sums: How statistics and metrics are summed with the gradients. None: each rank has its own.

    Attributes:
        fingerprint: Of all batches so far, if they have one; below 2 ** 31.
    """

    share: tf.Variable | None = None
    """of this rank, where each rank has statistics of its own"""
    has_header = has_empty_parts = False
    _is_divided = False
    """whether losses may count other than by the rows of a part"""

    def __init__(self, model: keras.Model, sums: Sums | None = None) -> None:
        self.model = model
        self.sums = sums
        self.has_own = train_step.is_own(model)
        self._inner: train_step.TrainStep
        """the step without this layer"""
        self.fingerprint = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        if sums is None:
            self._losses = LossWeights(model, hvd.size, sum_over_ranks, is_divided=hvd.size() > 1)
        else:
            self._losses = LossWeights(model, sums.count, sums.over_parts)
        if sums is not None:
            self._prepare_sums(sums)

    def divide(self, has_header: bool, has_empty_parts: bool) -> None:
        """Declares how batches come, before the model trains.

        Args:
            has_header: As (`data.Header`, batch), since parts have different numbers of rows, or ranks compare what
                they have read.
            has_empty_parts: A share can be 0. The row in its place then changes no metric and no statistic.
        """
        self._is_divided = True
        self.has_header, self.has_empty_parts = has_header, has_empty_parts
        if has_header and self.sums is None:
            self.share = tf.Variable(1.0, trainable=False, dtype=tf.float64)

    def __enter__(self) -> Step:
        train_step.wrap(self.model, "ranks", self._around)
        if self.sums is None:
            self._losses.replace(self.share)
        elif self._is_divided:
            self._losses.replace(None)
        return self

    def __exit__(self, *_: object) -> None:
        train_step.unwrap(self.model, "ranks")
        self._losses.restore()

    def _around(self, inner: train_step.TrainStep) -> train_step.TrainStep:
        self._inner = inner
        if self.sums is None:
            return self._of_this_rank
        return functools.partial(self._of_all_ranks, self.sums)

    def _note(self, header: Header) -> None:
        """Adds a batch's fingerprint to that of all batches."""
        self.fingerprint.assign(tf.math.floormod(self.fingerprint * 31 + header.fingerprint, tf.int32.max))

    # ---- each rank has statistics, seeds and metrics of its own; the optimizer reduces ------------------------------

    def _of_this_rank(self, data: Any) -> Any:
        """A step of the model with this rank's part of the batch."""
        # The share of this rank in the batch, which weighs its gradients.
        if self.share is not None:
            header, data = data
            self._note(header)
            self.share.assign(header.shares[0])

        # A rank without rows trains a placeholder row with the weight 0: what it changes is set back.
        changed = self._changed_by_a_row() if self.has_empty_parts else []
        before = [tf.identity(variable.value) for variable in changed]
        with self._losses.in_step(self.share):
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

    def _prepare_sums(self, sums: Sums) -> None:
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
        self.metrics = list(model.metrics_variables)
        self.changed = [*hvd.layers_own_variables(model), *self.seeds, *self.metrics]
        """variables that a step changes before all of its sums are there"""
        self.weights = list(model.trainable_weights)
        """whose gradients are summed here; []: the model's own step updates, and is undone as a whole"""
        if self.has_own and sums.is_one_part:
            slots = [variable for optimizer in hvd.optimizers_of(model) for variable in optimizer.variables]
            self.changed = list({id(one): one for one in (*model.weights, *slots, *self.changed)}.values())
            self.weights = []
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
        optimizer = self.model.optimizer
        header: Header | None = None
        if self.has_header:
            header, batch = batch
            self._note(header)

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
        logs: Mapping[str, Any] = {}
        for place, number in enumerate(numbers):
            rows = _rows_of_part(batch, place, len(numbers), header)
            part, logs = self._part(rows, number, before, header.shares[place] if header else None)
            parts.append(part)
        PLACE.note("computed", [part.gradients for part in parts])
        total = sums.totals(self, parts)

        # Weights change only when all sums are there, and nothing can fail any more.
        flat = [tensor for tensor in tf.nest.flatten(total, expand_composites=True) if tensor is not None]
        with tf.control_dependencies(flat), innermost(optimizer).reduced_before():
            pairs = zip(total.gradients, self.weights, strict=True)
            given = [(gradient, weight) for gradient, weight in pairs if gradient is not None]
            if self.weights:
                optimizer.apply_gradients(given)
            for variable, value in zip(self.moving, total.moving, strict=True):
                variable.assign(value)
            for variable, value in zip(self.counters, total.counters, strict=True):
                variable.assign(value)
            for variable, value in zip(self.metrics, total.metrics, strict=True):
                variable.assign(before[id(variable)] + value)
            for seed in self.seeds:
                seed.assign(seed.value - seed_of(numbers[-1]))
            self._is_under_way.assign(False)
        return self._logs_of_all(logs, total.logs)

    def _logs_of_all(self, logs: Mapping[str, Any], means: Sequence[Any]) -> Any:
        """Logs of a step of all ranks, given a part's, and the means over all rows of those that are no metrics."""
        results = self.model.get_metrics_result()
        if not self.has_own:
            return results
        others = dict(zip(self._names_besides_metrics(logs), means, strict=True))
        return {name: others[name] if name in others else results[name] for name in logs}

    def _names_besides_metrics(self, logs: Mapping[str, Any]) -> list[str]:
        results = self.model.get_metrics_result()
        return [name for name in logs if name not in results]

    def _part(self, rows: Any, number: Any, before: dict[int, Any], share: Any) -> tuple[StepResult, Any]:
        """Gradients of a part of the rows, and the statistics, counters, metrics and logs to which it leads."""
        for variable in [*self.moving, *self.counters]:
            variable.assign(before[id(variable)])
        for seed in self.seeds:
            seed.assign(before[id(seed)] + seed_of(number))
        for metric in self.metrics:
            metric.assign(tf.zeros_like(before[id(metric)]))
        begun = own_step.num_operations()
        updates: Any = self._gradients_kept() if self.weights else contextlib.nullcontext({})
        with self._losses.in_step(share), self.weighed(share), updates as gradients:
            logs = self._inner(rows)
        means = []
        if self.has_own:
            if self.weights:
                own_step.refuse_effects(self.model, begun, [*self.moving, *self.counters, *self.seeds, *self.metrics])
            means = [tf.cast(logs[name], tf.float64) for name in self._names_besides_metrics(logs)]
        result = StepResult(
            gradients=[gradients.get(id(weight)) for weight in self.weights],
            moving=[variable.value + 0 for variable in self.moving],
            counters=[variable.value + 0 for variable in self.counters],
            metrics=[variable.value + 0 for variable in self.metrics],
            logs=means,
            share=share,
        )
        return result, logs

    @contextlib.contextmanager
    def weighed(self, share: Any) -> Iterator[None]:
        """Context in which the optimizers weigh this rank's gradients."""
        reductions = [innermost(optimizer).reduction for optimizer in hvd.optimizers_of(self.model)]
        before = [reduction.share for reduction in reductions]
        for reduction in reductions:
            reduction.share = share
        try:
            yield
        finally:
            for reduction, earlier in zip(reductions, before, strict=True):
                reduction.share = earlier

    @contextlib.contextmanager
    def _gradients_kept(self) -> Iterator[dict[int, Any]]:
        """Context in which the optimizer keeps the gradients, by the weight's id, instead of applying them."""
        optimizer, kept = self.model.optimizer, dict[int, Any]()

        def keep(pairs: Any) -> None:
            if kept:
                what = f"{own_step.named(self.model)} updates weights more than once in a step"
                raise ConfigError(f"{what}: {own_step.ADVICE}")
            kept.update((id(variable), gradient) for gradient, variable in pairs)

        def keep_lists(gradients: Any, variables: Any = None) -> None:
            given = self.model.trainable_weights if variables is None else variables
            keep(zip(gradients, given, strict=True))

        names = {"apply_gradients": keep, "apply": keep_lists}
        before = {name: vars(optimizer).pop(name) for name in names if name in vars(optimizer)}  # a script's own
        set_untracked(optimizer, **names)
        try:
            yield kept
        finally:
            for name in names:
                del vars(optimizer)[name]
            if before:
                set_untracked(optimizer, **before)


class SumsOverRanks:
    """Sums by allreduce, of one part per rank, for any number of ranks: it may change between two steps."""

    is_one_part = True

    def numbers(self, step: Step) -> Sequence[Any]:
        return [tf.cast(hvd.rank_op(), tf.int64)]

    def count(self) -> Any:
        return tf.cast(hvd.size_op(), tf.float64)

    def over_parts(self, divisor: Any, loss: str) -> Any:
        return sum_over_ranks(divisor, loss)

    def totals(self, step: Step, parts: Sequence[StepResult]) -> StepResult:
        (part,) = parts  # of this rank
        inner, reduction = innermost(step.model.optimizer), step.reduction
        share = part.share
        if share is None:
            share = tf.cast(1.0 if reduction.share is None else reduction.share.read_value(), tf.float64)
        given = [place for place, gradient in enumerate(part.gradients) if gradient is not None]
        weights = [step.weights[place] for place in given]
        gradients: list[Any] = [None] * len(part.gradients)
        if given:
            with step.weighed(share):
                own = inner.weighted([part.gradients[place] for place in given], weights)
            for place, gradient in zip(given, inner.reduce(own, weights), strict=True):
                gradients[place] = gradient

        # A rank without rows has computed a placeholder row, which counts 0 times.
        moving, counters, metrics, logs = part._replace(share=share).summands(hvd.rank_op() == 0)
        summands = [
            [value / tf.cast(self.count(), value.dtype) for value in moving],
            counters,
            metrics,
            [value / self.count() for value in logs],
        ]
        flat = [value for values in summands for value in values]
        rest = iter(reduced_by_dtype([flat], lambda rows: reduction.sum_of_parts(rows[0])))
        return StepResult(gradients, *([next(rest) for _ in values] for values in summands))


def step_of_all_ranks(model: keras.Model, input_shape: Sequence[int], sums: Sums) -> Step:
    """Installs a step after which all ranks hold the same state, for as long as the model exists.

    Args:
        model: Compiled model with Keras' own `train_step`, which is trained on rows with integer classes.
        input_shape: Of a row.

    Raises:
        ConfigError: The model has a `train_step` of its own, or a layer whose forward pass cannot be undone.
    """
    if train_step.is_own(model):
        raise ConfigError(
            f"model.name: {type(model).__name__} has a train_step of its own, which elastic runs and virtual ranks"
            " would not call: leave it to Keras"
        )
    model._symbolic_build(data_batch=(tf.zeros([2, *input_shape]), tf.zeros([2], tf.int64)))  # makes the metrics
    return Step(model, sums=sums).__enter__()


def _rows_of_part(batch: Any, place: int, count: int, header: Header | None) -> Any:
    """Rows of one of `count` parts of this rank's rows; without a header all parts have equally many."""

    def of_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        if header is None and count == 1:
            return leaf
        if header is None:
            length = (leaf.shape[0] or tf.shape(leaf)[0]) // count
            return leaf[place * length : (place + 1) * length]
        begin = tf.reduce_sum(header.rows[:place])
        return rows_of(leaf, begin, begin + header.rows[place])

    return keras.tree.map_structure(of_leaf, batch)


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
