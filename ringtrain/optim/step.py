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
from typing import Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.data.parts import Header, num_rows_of, rows_of
from ringtrain.errors import ConfigError
from ringtrain.hvd import train_step
from ringtrain.hvd.collectives import broadcast_variables, tensor_of
from ringtrain.hvd.keras_patches import (
    assigned_weights,
    distributed,
    innermost,
    layers_of,
    reduction_of,
    replaced,
    slots_of,
)
from ringtrain.hvd.step_timing import PLACE
from ringtrain.optim.kept_gradients import gradients_kept
from ringtrain.optim.sums import StepResult, Sums
from ringtrain.optim.uneven import LossWeights, sum_over_ranks

SEED_STEP = 7_368_787
"""prime by which the seeds of neighbours differ"""


class Step:
    """Training step of a compiled and built model on all ranks; the model trains by it while it is installed."""

    share: tf.Variable | None = None
    """of this rank, where each rank has statistics of its own"""
    has_empty_parts = False

    def __init__(self, model: keras.Model, sums: Sums | None = None) -> None:
        self.model = model
        self.sums = sums  # how statistics and metrics are summed with the gradients; None: each rank has its own
        # A model's own step updates weights: where parts are summed, it is undone as a whole; else one update follows.
        self.has_own = train_step.is_own(model)
        self._inner: train_step.TrainStep
        """the step without this layer"""
        self.fingerprint = tf.Variable(0.0, trainable=False, dtype=tf.float64)  # of all batches; below 2 ** 31
        self._metric_of: dict[str, str] = {}
        """by the name of a log, the name in `metric_results` of the result that it is"""
        self._assigned: dict[int, Any] = {}
        """weights that the model's code assigns in a step, by id"""
        # What a loss is divided by is summed over the parts of a batch: one for each rank, or those of `sums`.
        if sums is None:
            self._losses = LossWeights(model, hvd.size, sum_over_ranks, is_divided=hvd.size() > 1)
        else:
            self._losses = LossWeights(model, sums.num_parts, sums.over_parts)
        if sums is not None:
            self._prepare_sums(sums)

    @property
    def unlike(self) -> str:
        """What the first step has shown not to be as in one process; see `sources.unlike`."""
        names = ", ".join(sorted(self._losses.of_whole_parts))
        if not names:
            return ""
        return f"the loss {names} has no number per row: it is computed of each rank's rows, and averaged"

    def divide(self, has_header: bool, has_empty_parts: bool) -> None:
        """Declares before training how batches come: as (`data.Header`, batch), and whether a share can be 0."""
        self.has_empty_parts = has_empty_parts  # whose row then changes no metric and no statistic
        # A variable, as the step may be traced once for all batches.
        if has_header and self.sums is None:
            self.share = tf.Variable(1.0, trainable=False, dtype=tf.float64)

    def __enter__(self) -> Step:
        train_step.wrap(self.model, "ranks", self._around)
        self._losses.replace(self.share)
        return self

    def __exit__(self, *_: object) -> None:
        train_step.unwrap(self.model, "ranks")
        self._losses.restore()

    def _around(self, inner: train_step.TrainStep) -> train_step.TrainStep:
        # Called again whenever a layer further inside changes: the step calls the newest one.
        self._inner = inner
        if self.sums is None:
            return self._of_this_rank
        return functools.partial(self._of_all_ranks, self.sums)

    def _note(self, header: Header) -> None:
        """Adds a batch's fingerprint to that of all batches."""
        # Times a number, so that the same batches in another order have another fingerprint.
        self.fingerprint.assign(tf.math.floormod(self.fingerprint * 31 + header.fingerprint, tf.int32.max))

    # ---- each rank has statistics, seeds and metrics of its own; the optimizer reduces ------------------------------

    def _of_this_rank(self, data: Any) -> Any:
        """A step of the model with this rank's part of the batch."""
        # The share of this rank in the batch, which weighs its gradients.
        header: Header | None = None
        if self.share is not None and isinstance(data[0], Header):
            header, data = data
            self._note(header)
            self.share.assign(header.shares[0])
        elif self.share is not None:  # of a callback's `train_on_batch`, whole and the same on every rank
            self.share.assign(1.0)

        # A rank without rows trains a placeholder row with the weight 0: what seeds and metrics had is set back.
        counted: list[Any] = []
        if self.has_empty_parts:
            counted = self._seeds_and_metrics()
        before = [tf.identity(variable.value) for variable in counted]
        with self._losses.in_step(self.share), self._noting_assigned():
            if self.has_empty_parts and self.has_own:
                logs = self._logs_of(data)
            else:
                logs = self._inner(data)
        for variable, value in zip(counted, before, strict=True):
            variable.assign(tf.where(self.share > 0, variable.value, value))  # type: ignore[operator]
        if self.has_empty_parts and header is not None:
            self._share_statistics(header)
        self._share_assigned()
        if self.has_empty_parts and self.has_own:  # results without the placeholder row
            results = metric_results(self.model)
            logs = logs | {name: results[metric] for name, metric in self._metric_of.items()}
        return logs

    def _share_statistics(self, header: Header) -> None:
        """Gives a rank without rows rank 0's statistics: what follows from weights alone has changed on all ranks."""
        statistics = hvd.weights_of_one_rank(self.model)
        if not statistics:
            return

        def share() -> Any:
            own = [tf.identity(variable.value) for variable in statistics]
            broadcast_variables(statistics, root_rank=0)
            for variable, value in zip(statistics, own, strict=True):
                variable.assign(tf.where(self.share > 0, value, variable.value))  # type: ignore[operator]
            return tf.constant(True)

        # Some rank has no rows if this one has none, or one of fewer than there are ranks.
        share_of_batch, num_rows = header.shares[0], header.rows[0]
        is_short = tf.logical_or(share_of_batch <= 0, tf.logical_and(num_rows <= 1, share_of_batch > 1))
        tf.cond(is_short, share, lambda: tf.constant(False))

    @contextlib.contextmanager
    def _noting_assigned(self) -> Iterator[None]:
        """Context of a model's step that notes which weights its code assigns besides the update."""
        if not self.has_own:
            yield
            return
        # What an earlier trace has shown stays: a function of TensorFlow that the step calls is traced once.
        with assigned_weights(self.model.trainable_weights, lambda weight: self._assigned.update({id(weight): weight})):
            yield

    def _share_assigned(self) -> None:
        """Gives all ranks rank 0's weights, as far as a step assigns them: each rank rounds its own numbers."""
        weights = list(self._assigned.values())
        if self.has_own and tf.executing_eagerly():  # each rank may go another way through the step's code
            weights = self.model.trainable_weights
        optimizers = [innermost(one) for one in hvd.optimizers_of(self.model) if distributed(one)]
        weights = [weight for weight in weights if not any(one.is_local(weight) for one in optimizers)]
        if weights and (self.sums is not None or hvd.size() > 1):
            broadcast_variables(weights, root_rank=0)

    def _seeds_and_metrics(self) -> list[Any]:
        weights = {id(variable) for variable in self.model.weights}
        both = [*self.model.variables, *self.model.metrics_variables]
        return list({id(variable): variable for variable in both if id(variable) not in weights}.values())

    # ---- statistics, seeds and metrics are summed with the gradients -----------------------------------------------

    def _prepare_sums(self, sums: Sums) -> None:
        # A step is undone by setting variables back, and this layer changes one that is trained as well.
        model = self.model
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.SpectralNormalization):
                raise ConfigError(
                    f"model.name: layer {layer.name} (SpectralNormalization) changes its kernel in the forward pass,"
                    " which elastic runs and virtual ranks cannot undo: leave it out"
                )
        # Floats become means over all rows; counters and seeds advance once in a step, whatever its number of parts.
        self.reduction = reduction_of(model.optimizer)
        of_one_rank = hvd.weights_of_one_rank(model)
        self.moving = [variable for variable in of_one_rank if keras.backend.is_float_dtype(variable.dtype)]
        self.counters = [variable for variable in of_one_rank if keras.backend.is_int_dtype(variable.dtype)]
        self.seeds = hvd.seeds(model)
        self.metrics = list(model.metrics_variables)
        self.changed = [*hvd.layers_own_variables(model), *self.seeds, *self.metrics]
        """variables that a step changes before all of its sums are there"""
        # A step that updates by itself can be undone, but not divided: virtual ranks have none.
        self.weights = list(model.trainable_weights)
        """whose gradients are summed here"""
        if self.has_own:
            self.weights = []
            changed = [*model.weights, *slots_of(model), *self.changed]
            self.changed = list({id(variable): variable for variable in changed}.values())
        self._before = [tf.Variable(tensor_of(variable), trainable=False) for variable in self.changed]
        self._is_under_way = tf.Variable(False, trainable=False)
        hvd.share_state(model)

    def undo(self) -> bool:
        """Returns to the end of the last complete step, if a reduction has failed; returns whether one has."""
        # The variable is set in the graph, so that it tells how far a step has come that was interrupted anywhere.
        if not self._is_under_way:
            return False
        for variable, before in zip(self.changed, self._before, strict=True):
            variable.assign(before)
        self._is_under_way.assign(False)
        return True

    def _of_all_ranks(self, sums: Sums, batch: Any) -> Any:
        """A step of the model with this rank's rows, after which all ranks hold the same."""
        optimizer = self.model.optimizer
        if not isinstance(batch[0], Header):
            raise ConfigError(
                "ringtrain.fit: a callback calls train_on_batch, which elastic jobs and virtual ranks cannot:"
                " leave it out"
            )
        header, batch = batch
        self._note(header)

        # Keep what the forward pass changes, then note that a step is under way.
        kept = []
        for variable, copy in zip(self.changed, self._before, strict=True):
            kept.append(copy.assign(tensor_of(variable), read_value=False))
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
        computations = []
        for index, number in enumerate(numbers):
            rows = _rows_of_part(batch, index, len(numbers), header)
            computations.append(functools.partial(self._part, rows, number, before, header.shares[index]))
        sums.prepare(self, computations)
        parts = []
        logs: Mapping[str, Any] = {}
        for compute in computations:
            part, logs = compute()
            parts.append(part)
        PLACE.note("computed", [part.gradients for part in parts])
        total = sums.totals(self, parts)

        # Weights change only when all sums are there, and nothing can fail any more.
        flat = [tensor for tensor in tf.nest.flatten(total, expand_composites=True) if tensor is not None]
        with tf.control_dependencies(flat), innermost(optimizer).reduced_before():
            if not self.has_own:
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
            if self.has_own:
                self._share_assigned()
            self._is_under_way.assign(False)
        return self._logs_of_all(logs, total.logs)

    def _logs_of_all(self, logs: Mapping[str, Any], means: Sequence[Any]) -> Any:
        """Logs of a step of all ranks, given a part's, and the means over all rows of those that are no metrics."""
        # Metrics have the sums of all rows now. Other numbers are known as means over the parts only.
        results = metric_results(self.model)
        if not self.has_own:
            return results
        values = {name: results[metric] for name, metric in self._metric_of.items()}
        values |= dict(zip(self._names_besides_metrics(logs), means, strict=True))
        return {name: values[name] for name in logs}

    def _names_besides_metrics(self, logs: Mapping[str, Any]) -> list[str]:
        return [name for name in logs if name not in self._metric_of]

    def _logs_of(self, rows: Any) -> dict[str, Any]:
        """Logs of the model's step with some rows. Notes which of them are results of metrics, by whatever name."""
        results: list[tuple[Any, keras.Metric, str]] = []

        def noting(metric: keras.Metric) -> Any:
            original = metric.result

            def result() -> Any:
                value = original()
                results.extend((of_metric, metric, name) for name, of_metric in _by_name(metric, value).items())
                return value

            return result

        # A log is a metric's if it is the very tensor that `result` has returned: equal values would prove nothing.
        with replaced([(metric, {"result": noting(metric)}) for metric in self.model.metrics]):
            logs = flat_logs(self._inner(rows))
        known = _results(self.model)
        for log, value in logs.items():
            for of_metric, metric, name in results:
                if of_metric is value and (id(metric), name) in known:
                    self._metric_of[log], _ = known[id(metric), name]
        return logs

    def _part(
        self, rows: Any, number: Any, before: dict[int, Any], share: Any, until_loss: bool = False
    ) -> tuple[StepResult, Mapping[str, Any]]:
        """Results and logs of a part of the rows; with `until_loss`, raises LossIsKnown as early as possible."""
        # Each part starts from the same state, or its result would depend on how parts are distributed over ranks.
        for variable in [*self.moving, *self.counters]:
            variable.assign(before[id(variable)])
        for seed in self.seeds:
            seed.assign(before[id(seed)] + seed_of(number))
        for metric in self.metrics:
            metric.assign(tf.zeros_like(before[id(metric)]))
        updates: Any = contextlib.nullcontext({})
        if not self.has_own:
            updates = gradients_kept(self.model, self._losses.num_parts(), until_loss)
        with (
            self._losses.in_step(share),
            self.weighed(share),
            updates as gradients,
            self._noting_assigned(),
        ):
            logs = self._logs_of(rows)

        # Values are read now: the next part overwrites the variables.
        means = []
        if self.has_own:
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
        # A model may have several optimizers, as a GAN has, and each reduces its own gradients.
        reductions = [reduction_of(optimizer) for optimizer in hvd.optimizers_of(self.model)]
        before = [reduction.share for reduction in reductions]
        for reduction in reductions:
            reduction.share = share
        try:
            yield
        finally:
            for reduction, earlier in zip(reductions, before, strict=True):
                reduction.share = earlier


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs without dictionaries in them, as Keras passes them on: a step may return that of all compiled metrics."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            flat |= flat_logs(value)
        else:
            flat[name] = value
    return flat


def _by_name(metric: keras.Metric, result: Any) -> dict[str, Any]:
    """Results of a metric by name: one, or those of a dictionary."""
    if isinstance(result, Mapping):
        return flat_logs(result)
    return {metric.name: result}


def _results(model: keras.Model) -> dict[tuple[int, str], tuple[str, Any]]:
    """Results of a model's metrics with their names in `metric_results`, by the metric's id and its own name."""
    found = []
    for metric in model.metrics:
        found += [(metric, name, value) for name, value in _by_name(metric, metric.result()).items()]
    last = {name: metric for metric, name, _ in found}
    results = {}
    for number, (metric, name, value) in enumerate(found, 1):
        unique = name
        if last[name] is not metric:
            unique = f"{name} (result {number})"
        results[id(metric), name] = unique, value
    return results


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Results of a model's metrics by name, and what a `compute_metrics` of its own makes of their states."""
    # Of several metrics of one name, only the last has it here, as in Keras; the others are numbered.
    results = dict(_results(model).values()) | flat_logs(model.get_metrics_result())
    if type(model).compute_metrics is keras.Model.compute_metrics:
        return results
    unchanged = {"update_state": lambda *_, **__: None}
    try:
        with replaced([(metric, unchanged) for metric in model.metrics]):
            return results | flat_logs(model.compute_metrics(None, None, None, None))
    except Exception:  # the model's own code: it needs the batch
        return results


def _rows_of_part(batch: Any, index: int, count: int, header: Header) -> Any:
    """Rows of one of `count` parts of this rank's rows."""

    def of_leaf(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        # A tensor with other rows than the first has equal parts: see Parts.cut.
        rows, equal = num_rows_of(leaf), num_rows_of(leaf) // count
        is_like_first = tf.equal(rows, tf.reduce_sum(header.rows))
        begin = tf.where(is_like_first, tf.reduce_sum(header.rows[:index]), index * equal)
        return rows_of(leaf, begin, begin + tf.where(is_like_first, header.rows[index], equal))

    return keras.tree.map_structure(of_leaf, batch)


def seed_of(number: Any) -> Any:
    """Offset of the shared seeds for a part of a batch, which gives it random numbers of its own."""
    return number * SEED_STEP % 2**31
