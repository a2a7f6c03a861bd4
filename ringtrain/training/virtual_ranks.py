"""Steps whose bits do not depend on the number of ranks, by virtual ranks (Or et al. 2020, arXiv 2009.09523).

A step's batch is always divided into the micro-batches of V virtual ranks, of which a rank computes a run of
neighbours: gradients, moving statistics from those before the step, metrics, and random numbers of its own for each.
All of these are added in one binary tree over the V, of which every rank computes the parts that it holds; the ranks
then exchange their sums, each adds a share of the columns to the end of the tree, and gathers the others. Allreduce
would add in an order of its own, which depends on the number of ranks, the transport, and the place in the message.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from ringtrain.data.parts import Parts
from ringtrain.errors import ConfigError, OutOfSync
from ringtrain.hvd.keras_patches import reduction_of
from ringtrain.hvd.reduction import scaled
from ringtrain.hvd.step_timing import PHASES
from ringtrain.training.summed_step import LossIsKnown, SummedStep
from ringtrain.training.sums import StepResult, reduced_by_dtype


class Node(NamedTuple):
    """A sum of neighbouring virtual ranks: from place * width on, `width` of them."""

    width: int
    place: int


def own_nodes(num: int, rank: int, size: int) -> list[Node]:
    """Largest parts of the tree over `num` virtual ranks that one rank can add up by itself, in order."""
    nodes = _leaves(num, rank, size)
    pairs = _pairs(nodes)
    while pairs:
        nodes = _joined(nodes, pairs)
        pairs = _pairs(nodes)
    return sorted(nodes, key=_begin)


def _leaves(num: int, rank: int, size: int) -> list[Node]:
    """Nodes of the virtual ranks that a rank computes."""
    return [Node(1, virtual) for virtual in Parts.of_rank(rank, size, num).numbers]


def _begin(node: Node) -> int:
    """First virtual rank of a node."""
    return node.width * node.place


def _pairs(nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Neighbours under the same node of the tree."""
    pairs = []
    for node in nodes:
        next_node = Node(node.width, node.place + 1)
        if node.place % 2 == 0 and next_node in nodes:
            pairs.append((node, next_node))
    return pairs


def _joined(nodes: Sequence[Node], pairs: Sequence[tuple[Node, Node]]) -> list[Node]:
    """The sums of the pairs, then the other nodes."""
    sums = [Node(2 * first.width, first.place // 2) for first, _ in pairs]
    return [*sums, *_unpaired(nodes, pairs)]


def _unpaired(nodes: Sequence[Node], pairs: Sequence[tuple[Node, Node]]) -> list[Node]:
    paired = set(itertools.chain(*pairs))
    return [node for node in nodes if node not in paired]


def added(rows: tf.Tensor, nodes: Sequence[Node]) -> tf.Tensor:
    """Adds up rows [nodes, n] as far as they are neighbours in the tree; returns the sums of `own_nodes`, in order."""
    # One addition of gathered rows per level: TensorFlow would replace (a + b) + (c + d) by a sum from the left.
    known = list(nodes)
    pairs = _pairs(known)
    while pairs:
        left = [known.index(node) for node, _ in pairs]
        right = [known.index(node) for _, node in pairs]
        rest = [known.index(node) for node in _unpaired(known, pairs)]
        sums = tf.gather(rows, left) + tf.gather(rows, right)
        if rest:
            sums = tf.concat([sums, tf.gather(rows, rest)], 0)
        rows = sums
        known = _joined(known, pairs)
        pairs = _pairs(known)
    order = [known.index(node) for node in sorted(known, key=_begin)]
    if order == list(range(len(known))):
        return rows
    return tf.gather(rows, order)


def sum_of_all(rows: tf.Tensor, num: int, reduction: Any) -> tf.Tensor:
    """Sum over all virtual ranks, [n], given the rows [own virtual ranks, n] of each rank. Collective."""
    rank, size = reduction.place()
    rows = added(rows, _leaves(num, rank, size))
    if size == 1:
        return rows[0]
    nodes: list[Node] = []
    for other in range(size):
        nodes += own_nodes(num, other, size)
    columns = added(reduction.exchange_columns(rows), nodes)
    return reduction.gather_parts([columns[0]])[0][: tf.shape(rows)[1]]


def check_order(model: keras.Model, num: int) -> None:
    """Verifies, with known numbers, that the ranks add in the order of the tree. Collective; raises OutOfSync."""
    reduction = reduction_of(model.optimizer)
    rows = np.random.default_rng(num).normal(size=(num, 61)).astype(np.float32)
    rank, size = reduction.place()
    virtual_ranks = Parts.of_rank(rank, size, num).numbers
    total = sum_of_all(tf.constant(rows[virtual_ranks.start : virtual_ranks.stop]), num, reduction).numpy()
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    if total.tobytes() != rows[0].tobytes():
        raise OutOfSync(
            f"the sum over {num} virtual ranks differs from one process' by up to {np.abs(total - rows[0]).max()}"
        )


class SumsOverVirtualRanks:
    """Sums over `num` virtual ranks, a power of two, in the order of the tree; at least as many as ranks."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._divisors: list[Any] = []
        """of the losses of a part, in the order in which they are computed"""
        self._totals: Iterator[Any] | None = None
        """of the divisors, once they are known; again and again, as each part has the same losses"""

    def num_parts(self) -> int:
        return self.num

    def over_parts(self, divisor: Any) -> Any:
        if self._totals is not None:
            return next(self._totals)
        self._divisors.append(divisor)
        return divisor

    def prepare(self, step: SummedStep, computations: Sequence[Callable[..., Any]]) -> None:
        # The parts are computed one after the other. If a loss is divided by what masks or weights leave of a batch,
        # each part is therefore computed twice, the first time without effects, and as far as divisors need it.
        self._totals = None
        rows = []
        for compute in computations:
            divisors = self._divisors_of(step.model, compute)
            if not divisors:
                return
            rows.append(tf.stack(divisors))
        total = sum_of_all(tf.stack(rows), self.num, step.reduction)
        self._totals = itertools.cycle(tf.unstack(total, num=rows[0].shape[0]))

    def _divisors_of(self, model: keras.Model, compute: Callable[..., Any]) -> list[Any]:
        """Divisors of the losses of a part, float64 [] each."""

        def divisors() -> list[Any]:
            self._divisors = []
            # Regularizers read their weights from the scope.
            weights = [(weight, weight.value) for weight in model.trainable_variables if weight.regularizer]
            with keras.StatelessScope(weights), contextlib.suppress(LossIsKnown):
                compute(until_loss=True)
            return self._divisors

        if tf.executing_eagerly():
            return divisors()
        # In a graph of its own, of which nothing is left if there are no divisors.
        traced = tf.function(divisors, autograph=False).get_concrete_function()
        if not self._divisors:
            return []
        return list(traced())

    def numbers(self, step: SummedStep) -> Sequence[int]:
        rank, size = step.reduction.place()
        return Parts.of_rank(rank, size, self.num).numbers

    def totals(self, step: SummedStep, parts: Sequence[StepResult]) -> StepResult:
        reduction = step.reduction
        places = [index for index, gradient in enumerate(parts[0].gradients) if gradient is not None]
        rows = []
        for number, part in zip(self.numbers(step), parts, strict=True):
            row = [tf.convert_to_tensor(part.gradients[index]) for index in places]  # also of an embedding's rows
            row = [scaled(gradient, part.share) for gradient in row]
            for values in part.summands(is_first=number == 0):
                row += values
            rows.append(row)
        sums = iter(reduced_by_dtype(rows, lambda parts: sum_of_all(parts, self.num, reduction)))
        gradients = list(parts[0].gradients)
        for index in places:
            gradients[index] = next(sums) / self.num
        PHASES.note("reduced", [gradients[index] for index in places])
        moving = [next(sums) / self.num for _ in step.moving]
        counters = [next(sums) for _ in step.counters]
        metrics = [next(sums) for _ in step.metrics]
        logs = [next(sums) / self.num for _ in parts[0].logs]
        return StepResult(gradients, moving, counters, metrics, logs)


@contextlib.contextmanager
def sums_as_written() -> Iterator[None]:
    """Context in which TensorFlow does not rewrite sums and products of a graph by what else the graph holds."""
    # A rank with one virtual rank would otherwise compute other last bits than one with several.
    name = "arithmetic_optimization"
    before = tf.config.optimizer.get_experimental_options().get(name, True)
    tf.config.optimizer.set_experimental_options({name: False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


class _Unseeded:
    """In place of Keras' global seed generator: numbers of it would be others on another number of ranks."""

    def next(self, ordered: bool = True) -> Any:
        raise ConfigError(
            "train.virtual_ranks: the model draws numbers of keras.random without a seed of their own: pass"
            " seed=a keras.random.SeedGenerator that is an attribute of the layer"
        )


def refuse_unlike(model: keras.Model, batch: Any) -> None:
    """Raises ConfigError for a model whose steps would depend on the number of ranks; `batch`: or its specs."""
    kept = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, _Unseeded())
    try:
        tf.function(model.train_step, autograph=False).get_concrete_function(batch)
    finally:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, kept)
