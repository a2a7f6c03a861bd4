"""Steps whose bits do not depend on the number of ranks, by virtual ranks (Or et al. 2020, arXiv 2009.09523).

A step's batch is always divided into the micro-batches of V virtual ranks, of which a rank computes a run of
neighbours: gradients, moving statistics from those before the step, metrics, and random numbers of its own for each.
All of these are added in one binary tree over the V, of which every rank computes the parts that it holds; the ranks
then exchange their sums, each adds a share of the columns to the end of the tree, and gathers the others. Allreduce
would add in an order of its own, which depends on the number of ranks, the transport, and the place in the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringtrain import hvd
from ringtrain.errors import ConfigError, OutOfSync
from ringtrain.hvd.keras_patches import innermost
from ringtrain.hvd.step_timing import PLACE
from ringtrain.optim.step import Step, StepResult, reduced_by_dtype


class Node(NamedTuple):
    """A sum of neighbouring virtual ranks: from place * width on, `width` of them."""

    width: int
    place: int


def of_rank(num: int, rank: int, size: int) -> list[int]:
    """Virtual ranks that a rank trains, as `data.part_of` cuts their samples."""
    return [int(one) for one in np.array_split(np.arange(num), size)[rank]]


def own_nodes(num: int, rank: int, size: int) -> list[Node]:
    """Largest parts of the tree over `num` virtual ranks that one rank can add up by itself, in order."""
    nodes = [Node(1, virtual) for virtual in of_rank(num, rank, size)]
    while pairs := _pairs(nodes):
        nodes = _joined(nodes, pairs)
    return sorted(nodes, key=_begin)


def _begin(node: Node) -> int:
    """First virtual rank of a node."""
    return node.width * node.place


def _pairs(nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Neighbours under the same node of the tree."""
    firsts = (node for node in nodes if node.place % 2 == 0)
    pairs = ((node, Node(node.width, node.place + 1)) for node in firsts)
    return [pair for pair in pairs if pair[1] in nodes]


def _joined(nodes: Sequence[Node], pairs: Sequence[tuple[Node, Node]]) -> list[Node]:
    """The sums of the pairs, then the other nodes."""
    sums = [Node(2 * first.width, first.place // 2) for first, _ in pairs]
    return [*sums, *(node for node in nodes if all(node not in pair for pair in pairs))]


def added(rows: tf.Tensor, nodes: Sequence[Node]) -> tf.Tensor:
    """Adds up rows [nodes, n] as far as they are neighbours in the tree; returns the sums of `own_nodes`, in order."""
    # One addition of gathered rows per level: TensorFlow would replace (a + b) + (c + d) by a sum from the left.
    known = list(nodes)
    while pairs := _pairs(known):
        left, right = ([known.index(node) for node in side] for side in zip(*pairs, strict=True))
        rest = [number for number, node in enumerate(known) if all(node not in pair for pair in pairs)]
        sums = tf.gather(rows, left) + tf.gather(rows, right)
        rows = tf.concat([sums, tf.gather(rows, rest)], 0) if rest else sums
        known = _joined(known, pairs)
    order = sorted(range(len(known)), key=lambda number: _begin(known[number]))
    return rows if order == [*range(len(known))] else tf.gather(rows, order)


def sum_of_all(rows: tf.Tensor, num: int, reduction: Any) -> tf.Tensor:
    """Sum over all virtual ranks, [n], given the rows [own virtual ranks, n] of each rank. Collective."""
    rank, size = reduction.place()
    rows = added(rows, [Node(1, virtual) for virtual in of_rank(num, rank, size)])
    if size == 1:
        return rows[0]
    nodes = [node for other in range(size) for node in own_nodes(num, other, size)]
    columns = added(reduction.exchange_columns(rows), nodes)
    return reduction.gather_parts([columns[0]])[0][: tf.shape(rows)[1]]


def check_order(model: keras.Model, num: int) -> None:
    """Verifies, with known numbers, that the ranks add in the order of the tree. Collective; raises OutOfSync."""
    reduction = innermost(model.optimizer).reduction
    rows = np.random.default_rng(num).normal(size=(num, 61)).astype(np.float32)
    total = sum_of_all(tf.constant(rows[of_rank(num, *reduction.place())]), num, reduction).numpy()
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

    def numbers(self, step: Step) -> Sequence[int]:
        """Numbers of this rank's virtual ranks; see `optim.step.Sums`."""
        return of_rank(self.num, *step.reduction.place())

    def totals(self, step: Step, parts: Sequence[StepResult]) -> StepResult:
        """Means and sums over all virtual ranks; see `optim.step.Sums`. Collective."""
        reduction = step.reduction
        given = [place for place, gradient in enumerate(parts[0].gradients) if gradient is not None]
        rows = []
        for number, part in zip(self.numbers(step), parts, strict=True):
            row = [tf.convert_to_tensor(part.gradients[place]) for place in given]  # also of an embedding's rows
            row += part.moving
            row += [value * tf.cast(number == 0, value.dtype) for value in part.counters]
            row += part.metrics
            rows.append(row)

        def reduce() -> list[Any]:
            return reduced_by_dtype(rows, lambda parts: sum_of_all(parts, self.num, reduction))

        sums = iter(PLACE.reducing(reduction.place()[1], rows, reduce))
        gradients: list[Any] = [None] * len(step.weights)
        for place in given:
            gradients[place] = next(sums) / self.num
        PLACE.note("reduced", [gradients[place] for place in given])
        moving = [next(sums) / self.num for _ in step.moving]
        counters = [next(sums) for _ in step.counters]
        metrics = [next(sums) for _ in step.metrics]
        return StepResult(gradients, moving, counters, metrics)


def refuse_synchronized(model: keras.Model) -> None:
    """Raises ConfigError for batch normalization over real ranks."""
    for layer in hvd.synchronized_layers(model):
        raise ConfigError(
            f"train.virtual_ranks: layer {layer.name} (SyncBatchNormalization) would use the rows of real ranks: use"
            " BatchNormalization"
        )
