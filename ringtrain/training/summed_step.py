"""The training step of a model on ranks that share all of its state.

    rows of this rank -> parts -> sums of all ranks -> one update

Moving statistics, seeds and metrics are summed with the gradients, so that any rank can continue for all others; and
nothing changes unless all sums succeed (`SummedStep.undo`). Elastic runs have one part for each rank, virtual ranks a
part for each of them (`virtual_ranks`), for which the model must have Keras' own `train_step`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.data.parts import Header, rows_of
from ringtrain.errors import ConfigError
from ringtrain.hvd.collectives import tensor_of
from ringtrain.hvd.keras_patches import innermost, reduction_of, set_untracked, slots_of
from ringtrain.hvd.reduction import scaled
from ringtrain.hvd.step_timing import PHASES
from ringtrain.training.metric_results import metric_results
from ringtrain.training.step import Step
from ringtrain.training.sums import StepResult, Sums, seed_of
from ringtrain.training.uneven import LossWeights


class SummedStep(Step):
    """Step after which all ranks hold the same state."""

    def __init__(self, model: keras.Model, sums: Sums) -> None:
        self.sums = sums  # how statistics and metrics are summed with the gradients
        super().__init__(model)
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

    def _loss_weights(self) -> LossWeights:
        return LossWeights(self.model, self.sums.num_parts, self.sums.over_parts)

    def divide(self, has_header: bool, has_empty_parts: bool) -> None:
        """Does nothing: each batch comes as (`data.Header`, batch), with the shares of its parts."""

    def undo(self) -> bool:
        """Returns to the end of the last complete step, if a reduction has failed; returns whether one has."""
        # The variable is set in the graph, so that it tells how far a step has come that was interrupted anywhere.
        if not self._is_under_way:
            return False
        for variable, before in zip(self.changed, self._before, strict=True):
            variable.assign(before)
        self._is_under_way.assign(False)
        return True

    def train(self, batch: Any) -> Any:
        """A step of the model with this rank's rows, after which all ranks hold the same."""
        optimizer = self.model.optimizer
        if not isinstance(batch[0], Header):
            raise ConfigError(
                "ringtrain.fit: a callback calls train_on_batch, which elastic jobs and virtual ranks cannot:"
                " leave it out"
            )
        header, batch = batch
        self.note(header)

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
        numbers = self.sums.numbers(self)
        computations = []
        for index, number in enumerate(numbers):
            rows = _rows_of_part(batch, index, header)
            computations.append(functools.partial(self._part, rows, number, before, header.shares[index]))
        self.sums.prepare(self, computations)
        parts = []
        logs: Mapping[str, Any] = {}
        for compute in computations:
            part, logs = compute()
            parts.append(part)
        PHASES.note("computed", [part.gradients for part in parts])
        total = self.sums.totals(self, parts)

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
                self.share_assigned()
            self._is_under_way.assign(False)
        return self._logs_of_all(logs, total.logs)

    def _logs_of_all(self, logs: Mapping[str, Any], means: Sequence[Any]) -> Any:
        """Logs of a step of all ranks, given a part's, and the means over all rows of those that are no metrics."""
        # Metrics have the sums of all rows now. Other numbers are known as means over the parts only.
        results = metric_results(self.model)
        if not self.has_own:
            return results
        values = {name: results[metric] for name, metric in self.metric_of.items()}
        values |= dict(zip(self._names_besides_metrics(logs), means, strict=True))
        return {name: values[name] for name in logs}

    def _names_besides_metrics(self, logs: Mapping[str, Any]) -> list[str]:
        return [name for name in logs if name not in self.metric_of]

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
            updates = gradients_kept(self.model, self.losses.num_parts(), until_loss)
        with (
            self.losses.in_step(share),
            self.weighed(share),
            updates as gradients,
            self.noting_assigned(),
        ):
            logs = self.logs_of(rows)

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


def _rows_of_part(batch: Any, index: int, header: Header) -> Any:
    """Rows of one of the parts of this rank's rows."""

    def of_leaf(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        begin = tf.reduce_sum(header.rows[:index])
        return rows_of(leaf, begin, begin + header.rows[index])

    return keras.tree.map_structure(of_leaf, batch)


class LossIsKnown(Exception):
    """Ends the step of a part for which the loss is enough."""


@contextlib.contextmanager
def gradients_kept(model: keras.Model, num_parts: Any, until_loss: bool = False) -> Iterator[dict[int, Any]]:
    """Context in which a model's optimizer keeps gradients, by the weight's id, instead of applying them."""
    optimizer = model.optimizer
    kept: dict[int, Any] = {}
    scale_loss = optimizer.scale_loss
    is_scaled = False

    # With a loss scale, a part's loss is its summand in the mean over all parts: gradients of a mean over few rows are
    # larger than those over all rows, and would overflow in float16 at a smaller scale.
    def scale_summand(loss: Any) -> Any:
        nonlocal is_scaled
        if until_loss:
            raise LossIsKnown  # Keras scales it when it is complete
        is_scaled = True
        return scale_loss(loss) / tf.cast(num_parts, loss.dtype)

    def keep(pairs: Any) -> None:
        for gradient, variable in pairs:
            if is_scaled and gradient is not None:
                gradient = scaled(gradient, num_parts)  # after the backward pass, in the weight's own type
            kept[id(variable)] = gradient

    names: dict[str, Any] = {"apply_gradients": keep}
    if until_loss or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        names["scale_loss"] = scale_summand
    before = {name: vars(optimizer).pop(name) for name in names if name in vars(optimizer)}  # a script's own
    set_untracked(optimizer, **names)
    try:
        yield kept
    finally:
        for name in names:
            del vars(optimizer)[name]
        if before:
            set_untracked(optimizer, **before)
