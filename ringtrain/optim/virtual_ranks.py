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


def install(model: keras.Model, num: int, seed: int, input_shape: Sequence[int]) -> None:
    """Makes a compiled model train by virtual ranks, in place; before its first step. May raise ConfigError.

    From then on its moving statistics and seeds are equal on all ranks, and rank 0 keeps the metrics of a step.

    Args:
        num: Number of virtual ranks, a power of two; at least that of ranks.
        seed: From which virtual ranks derive random numbers of their own.
        input_shape: Of a row.
    """
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(
            f"train.virtual_ranks: {type(model).__name__} has a train_step of its own, which would not be called: leave"
            " it to Keras, or train without virtual ranks"
        )
    model._symbolic_build(data_batch=(tf.zeros([2, *input_shape]), tf.zeros([2], tf.int64)))  # makes the metrics
    step = Step(model, num, seed)
    object.__setattr__(model, "train_step", step.train_step)
    hvd.share_state(model)


class Step:
    """Training step of a model by virtual ranks."""

    def __init__(self, model: keras.Model, num: int, seed: int) -> None:
        self.model, self.num = model, num
        own = hvd.weights_of_one_rank(model)
        self.moving = [one for one in own if keras.backend.is_float_dtype(one.dtype)]
        self.counters = [one for one in own if keras.backend.is_int_dtype(one.dtype)]
        self.seeds = hvd.seeds_of_one_rank(model)
        draws = [np.random.default_rng([seed, index]) for index in range(len(self.seeds))]
        self.offsets = [draw.integers(0, 2**31, (num, *one.shape)) for one, draw in zip(self.seeds, draws, strict=True)]

    def train_step(self, batch: Any) -> Any:
        """A step of Keras with this rank's rows, those of its virtual ranks one after the other."""
        model, optimizer = self.model, self.model.optimizer
        inner = innermost(optimizer)
        own = of_rank(self.num, hvd.rank(), hvd.size())
        metrics = model.metrics_variables
        before = {id(one): tf.identity(one.value) for one in [*self.moving, *self.counters, *self.seeds, *metrics]}
        parts = [self._micro_batch(batch, number, len(own), virtual, before) for number, virtual in enumerate(own)]
        weights = [
            one for one, gradient in zip(model.trainable_weights, parts[0], strict=False) if gradient is not None
        ]
        parts = [[tensor for tensor in part if tensor is not None] for part in parts]
        PLACE.note("computed", parts)
        totals = PLACE.reducing(hvd.size(), parts, lambda: self._totals(parts, inner.reduction))
        PLACE.note("reduced", totals)
        changed = [*weights, *self.moving, *self.counters, *metrics]
        of = {id(one): total for one, total in zip(changed, totals, strict=True)}
        with inner.reduced_before():
            optimizer.apply_gradients([(of[id(one)] / self.num, one) for one in weights])
        for one in self.moving:
            one.assign(of[id(one)] / self.num)
        for one in self.counters:
            one.assign(of[id(one)])
        for one, offsets in zip(self.seeds, self.offsets, strict=True):
            one.assign(one.value - tf.constant(offsets[own[-1]], one.dtype))
        for one in metrics:
            one.assign(before[id(one)] + of[id(one)] if hvd.rank() == 0 else before[id(one)])
        return model.get_metrics_result()

    def _micro_batch(self, batch: Any, number: int, count: int, virtual: int, before: dict[int, Any]) -> list[Any]:
        """Gradients, then the moving statistics and metrics that a virtual rank's rows lead to."""
        model = self.model

        def rows_of(tensor: Any) -> Any:
            length = (tensor.shape[0] or tf.shape(tensor)[0]) // count
            return tensor[number * length : (number + 1) * length]

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(rows_of, batch))
        for one in [*self.moving, *self.counters]:
            one.assign(before[id(one)])
        for one, offsets in zip(self.seeds, self.offsets, strict=True):
            one.assign(before[id(one)] + tf.constant(offsets[virtual], one.dtype))
        for one in model.metrics_variables:
            one.assign(tf.zeros_like(one.value))
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_weights)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        gradients = [one if one is None else tf.convert_to_tensor(one) for one in gradients]  # also of rows
        moving, counters, metrics = (
            [tf.identity(one.value) for one in each] for each in (self.moving, self.counters, model.metrics_variables)
        )
        counters = [one if virtual == 0 else tf.zeros_like(one) for one in counters]  # the sum is that of rank 0
        return [*gradients, *moving, *counters, *metrics]

    def _totals(self, parts: list[list[Any]], reduction: Any) -> list[Any]:
        """Sums of the micro-batches of all ranks, of each tensor."""
        totals: list[Any] = [None] * len(parts[0])
        for dtype in dict.fromkeys(tensor.dtype for tensor in parts[0]):
            places = [place for place, tensor in enumerate(parts[0]) if tensor.dtype == dtype]
            flat = [tf.concat([tf.reshape(part[place], [-1]) for place in places], 0) for part in parts]
            total = sum_of_all(tf.stack(flat), self.num, reduction)
            shapes = [tf.shape(parts[0][place]) for place in places]
            cut = tf.split(total, [tf.reduce_prod(shape) for shape in shapes])
            for place, tensor, shape in zip(places, cut, shapes, strict=True):
                totals[place] = tf.ensure_shape(tf.reshape(tensor, shape), parts[0][place].shape)
        return totals
