"""Sums over the parts of a step's batch: of gradients, moving statistics, counters, metrics and divisors of losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import tensorflow as tf

from ringtrain import hvd
from ringtrain.hvd.keras_patches import innermost
from ringtrain.hvd.reduction import scaled
from ringtrain.training.uneven import sum_over_ranks

if TYPE_CHECKING:
    from ringtrain.training.summed_step import SummedStep

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
    share: Any = 1.0
    """float64 []: rows of the part times the number of parts, divided by all rows"""

    def summands(self, is_first: Any) -> list[list[Any]]:
        """Statistics, counters, metrics and logs, multiplied so that the parts' sums are those of all rows."""
        return [
            [scaled(value, self.share) for value in self.moving],
            [value * tf.cast(is_first, value.dtype) for value in self.counters],
            [scaled(value, self.share > 0) for value in self.metrics],
            [scaled(value, self.share) for value in self.logs],
        ]


class Sums(Protocol):
    """Sums over the parts of all ranks."""

    def numbers(self, step: SummedStep) -> Sequence[Any]:
        """Numbers of the parts that this rank's rows consist of; each has random numbers of its own."""

    def num_parts(self) -> Any:
        """Number of the parts of all ranks: float64 []."""

    def prepare(self, step: SummedStep, computations: Sequence[Callable[..., Any]]) -> None:
        """Computes what this rank's parts, one computation each, need of all parts before the first. Collective."""
        # With until_loss=True, a computation may end early by LossIsKnown.

    def over_parts(self, divisor: Any) -> Any:
        """Sum over the parts of all ranks of a loss' divisor, float64 [], within the forward pass."""

    def totals(self, step: SummedStep, parts: Sequence[StepResult]) -> StepResult:
        """Averaged gradients, and moving statistics, counters and metrics of all rows together. Collective."""


class SumsOverRanks:
    """Sums by allreduce, of one part per rank, for any number of ranks: it may change between two steps."""

    def numbers(self, step: SummedStep) -> Sequence[Any]:
        return [tf.cast(hvd.rank_op(), tf.int64)]

    def num_parts(self) -> Any:
        return tf.cast(hvd.size_op(), tf.float64)

    def prepare(self, step: SummedStep, computations: Sequence[Callable[..., Any]]) -> None:
        """Does nothing: all ranks compute their parts at the same time."""

    def over_parts(self, divisor: Any) -> Any:
        return sum_over_ranks(divisor)

    def totals(self, step: SummedStep, parts: Sequence[StepResult]) -> StepResult:
        (part,) = parts  # of this rank
        optimizer, reduction = innermost(step.model.optimizer), step.reduction

        # Gradients, as far as weights have one.
        gradients = list(part.gradients)
        places = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if places:
            weights = [step.weights[index] for index in places]
            with step.weighed(part.share):
                weighted = optimizer.weighted([gradients[index] for index in places], weights)
            for index, gradient in zip(places, optimizer.reduce(weighted, weights), strict=True):
                gradients[index] = gradient

        # A rank without rows has computed a placeholder row, which counts 0 times.
        moving, counters, metrics, logs = part.summands(hvd.rank_op() == 0)
        summands = [
            [value / tf.cast(self.num_parts(), value.dtype) for value in moving],
            counters,
            metrics,
            [value / self.num_parts() for value in logs],
        ]
        flat = list(itertools.chain(*summands))
        sums = iter(reduced_by_dtype([flat], lambda rows: reduction.sum_of_parts(rows[0])))
        moving, counters, metrics, logs = (list(itertools.islice(sums, len(values))) for values in summands)
        return StepResult(gradients, moving, counters, metrics, logs)


def reduced_by_dtype(parts: Sequence[Sequence[Any]], reduce: Any) -> list[Any]:
    """Reduces lists of tensors to one: `reduce` gets all of a dtype as rows [parts, n], and returns a vector [n]."""
    first = parts[0]
    results: dict[int, Any] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in first):
        places = [index for index, tensor in enumerate(first) if tensor.dtype == dtype]
        vectors = []
        for part in parts:
            vectors.append(tf.concat([tf.reshape(part[index], [-1]) for index in places], 0))
        lengths = [tf.size(first[index]) for index in places]
        for index, total in zip(places, tf.split(reduce(tf.stack(vectors)), lengths), strict=True):
            shaped = tf.reshape(total, tf.shape(first[index]))
            results[index] = tf.ensure_shape(shaped, first[index].shape)
    return [results[index] for index in range(len(first))]


def seed_of(number: Any) -> Any:
    """Offset of the shared seeds for a part of a batch, which gives it random numbers of its own."""
    return number * SEED_STEP % 2**31
