"""Sharded update, stage 1 of ZeRO: each rank keeps the slots of its part of the weights, and updates that part only.

Rajbhandari et al. 2019 (arXiv 1910.02054), Xu et al. 2020 (arXiv 2004.13336). Gradients are reduced by reducescatter,
and the updated parts are joined by allgather, a vector per group of variables. A slot is a variable of this rank's
part; `gather_slots` and `scatter_slots` convert to whole slots, for checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.hvd.backend import horovod
from ringtrain.hvd.collectives import gather_bytes, part_of, scatter_bytes
from ringtrain.hvd.distributed import Distributed, refuse_overwritten
from ringtrain.hvd.keras_patches import innermost
from ringtrain.hvd.process import elastic
from ringtrain.hvd.reducer import Compressor, name_of
from ringtrain.hvd.step_timing import PLACE

GROUP_BYTES = 16 * 2**20
"""Variables are joined up to this size, since small messages are slow, and joining takes memory."""


class Shards:
    """Parts of an optimizer's variables: a vector per group of variables, cut as Horovod's reducescatter does.

    Attributes:
        variables: Variables of the model.
        groups: Places of variables of one dtype that are sent together.
        ranges: Function of a rank: for each variable, the range of its flat values that belongs to the rank.
        segments: For each, a variable with this rank's part of its values, of shape (n, 1, ...) with as many dimensions
            and the same name, so that optimizers treat it alike; n may be 0.
    """

    def __init__(self, variables: Sequence[Any], rank: int, size: int) -> None:
        self.variables, self.rank, self.size = list(variables), rank, size
        self.ranges = functools.cache(self._ranges)
        self.groups: list[list[int]] = []
        latest: dict[str, list[int]] = {}  # group of each dtype
        latest_bytes: dict[str, int] = {}
        for index, variable in enumerate(self.variables):
            dtype, num_bytes = variable.dtype, _nbytes(variable)
            if dtype not in latest or latest_bytes[dtype] + num_bytes > GROUP_BYTES:
                latest[dtype] = []
                latest_bytes[dtype] = 0
                self.groups.append(latest[dtype])
            latest[dtype].append(index)
            latest_bytes[dtype] += num_bytes
        self.segments = [self._segment(index) for index in range(len(self.variables))]

    def _ranges(self, rank: int) -> list[tuple[int, int]]:
        ranges = [(0, 0)] * len(self.variables)
        for places in self.groups:
            lengths = [_length(self.variables[place]) for place in places]
            share, rest = divmod(sum(lengths), self.size)
            begin = rank * share + min(rank, rest)
            end = begin + share + (rank < rest)
            # The same edges, counted from the start of each variable.
            for place, length in zip(places, lengths, strict=True):
                ranges[place] = min(max(begin, 0), length), min(max(end, 0), length)
                begin, end = begin - length, end - length
        return ranges

    def _segment(self, index: int) -> keras.Variable:
        variable = self.variables[index]
        low, high = self.ranges(self.rank)[index]
        shape = (high - low, *(1,) * (len(variable.shape) - 1))
        segment = keras.Variable(initializer="zeros", shape=shape, dtype=variable.dtype, name=variable.name)
        segment._path = variable.path  # slots are named after it
        return segment

    def own(self, values: Mapping[int, Any]) -> dict[int, tf.Tensor]:
        """This rank's parts of whole tensors, by place."""
        parts = {}
        for index, value in values.items():
            low, high = self.ranges(self.rank)[index]
            part = tf.reshape(value, [-1])[low:high]
            parts[index] = tf.reshape(part, self.segments[index].shape)
        return parts

    def reduced(self, gradients: Mapping[int, Any], reduction: Any) -> dict[int, tf.Tensor]:
        """This rank's parts of gradients, by place, reduced over the ranks."""
        sent = []
        for places in self.groups:
            # Variables without a gradient are sent as zeros: the cut must be that of the slots.
            dtype = self.variables[places[0]].dtype
            tensors = []
            for index in places:
                gradient = gradients.get(index, tf.zeros(self.variables[index].shape, dtype))
                tensors.append(tf.cast(gradient, dtype))
            sent.append(_joined(tensors))
        parts: dict[int, tf.Tensor] = {}
        for places, flat in zip(self.groups, reduction.reduce_scatter(sent), strict=True):
            parts |= self._split(flat, places)
        return {index: parts[index] for index in gradients}

    def load(self, places: Sequence[int]) -> list[keras.Variable]:
        """Sets segments to the current values of their variables, which may have been loaded or broadcast."""
        for place, part in self.own({place: self.variables[place].value for place in places}).items():
            self.segments[place].assign(part)
        return [self.segments[place] for place in places]

    def join(self, places: Sequence[int], reduction: Any) -> None:
        """Sets the variables on all ranks to the values of all ranks' segments."""
        sent = [_joined([self.segments[index].value for index in group]) for group in self.groups]
        for group, flat in zip(self.groups, reduction.gather_parts(sent), strict=True):
            lengths = [_length(self.variables[index]) for index in group]
            whole = tf.ensure_shape(flat, [sum(lengths)])
            for index, part in zip(group, tf.split(whole, lengths), strict=True):
                if index in places:
                    self.variables[index].assign(tf.reshape(part, self.variables[index].shape))

    def _split(self, flat: tf.Tensor, places: Sequence[int]) -> dict[int, tf.Tensor]:
        lengths = [_length(self.segments[index]) for index in places]
        parts = tf.split(tf.ensure_shape(flat, [sum(lengths)]), lengths)
        shaped = {}
        for index, part in zip(places, parts, strict=True):
            shaped[index] = tf.reshape(part, self.segments[index].shape)
        return shaped


@dataclass(frozen=True)
class Part:
    """What a slot of a sharded optimizer is a part of."""

    shards: Shards
    index: int

    @property
    def variable(self) -> Any:
        """Variable of the model, whose shape the whole slot has."""
        return self.shards.variables[self.index]

    def range(self, rank: int) -> slice:
        low, high = self.shards.ranges(rank)[self.index]
        return slice(low, high)


class Sharded(Distributed):
    """Mixin for a single optimizer that updates this rank's part of the weights.

    Keras applies gradients to the model's variables; clipping, decay, slots and updates are about segments of them.
    """

    _shards: Shards
    can_be_undone = False
    adds_up_rows = True

    @property
    def update_name(self) -> str:
        return "sharded=True"

    def build(self, variables: Any) -> None:
        if self.built:
            return
        refuse_overwritten(variables)
        self.__dict__["_shards"] = Shards(variables, *self.reduction.place())
        super().build(self._shards.segments)
        known = {self._var_key(variable): index for index, variable in enumerate(variables)}
        self._trainable_variables_indices.update(known)
        self.__dict__["_trainable_variables"] = list(variables)

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        places = [index for index, segment in enumerate(self._shards.segments) if segment is reference_variable]
        part = Part(self._shards, places[0])
        if name == "gradient_accumulator":  # reduced by the update only: whole until then
            return super().add_variable_from_reference(part.variable, name, initializer)
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        slot.part_of = part
        return slot

    def register_local_var(self, var: Any) -> None:
        raise ValueError("register_local_var: a sharded update reduces all gradients: leave out sharded=True")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        super().apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        self._reached.append("hook")
        gradients = dict(zip(self._places(self._updated_variables), grads, strict=True))
        if self._reduced_before:
            parts = list(self._shards.own(gradients).values())
        else:
            PLACE.note_each("computed", self._updated_variables, grads)
            parts = list(self._shards.reduced(gradients, self.reduction).values())
            PLACE.note("reduced", parts)
        if self.gradient_norm is None and not self.global_clipnorm:
            return super(Distributed, self)._clip_gradients(parts)

        # The norm of whole gradients, of which each rank has a part.
        squares = []
        for part in parts:
            wide = part if part.dtype == tf.float64 else tf.cast(part, tf.float32)
            squares.append(tf.cast(tf.reduce_sum(tf.square(wide)), tf.float64))
        norm = tf.sqrt(self.reduction.sum_of_parts(tf.add_n(squares)))
        if self.gradient_norm is not None:
            self.gradient_norm.note(lambda: tf.cast(norm, tf.float32))
        if not self.global_clipnorm:
            return super(Distributed, self)._clip_gradients(parts)
        factor = self.global_clipnorm / tf.maximum(norm, self.global_clipnorm)
        return [part * tf.cast(factor, part.dtype) for part in parts]

    def _apply_weight_decay(self, variables: Any) -> None:
        super()._apply_weight_decay(self._shards.load(self._places(variables)))

    def _use_weight_decay(self, variable: Any) -> Any:
        whole = self._shards.variables[self._get_variable_index(variable)]
        if not isinstance(variable, keras.Variable):
            whole = whole.value
        return super()._use_weight_decay(whole)

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        places = self._places(trainable_variables)
        super()._backend_update_step(grads, [self._shards.segments[index] for index in places], learning_rate)
        self._shards.join(places, self.reduction)

    def save_own_variables(self, store: Any) -> None:
        """Leaves the slots out of a saved model: this rank has a part of them only."""

    def _places(self, variables: Any) -> list[int]:
        return [self._get_variable_index(variable) for variable in variables]


def sharded_slots(optimizer: Any) -> list[Any]:
    """Variables of an optimizer that hold a rank's part of a slot."""
    return [variable for variable in innermost(optimizer).variables if part_of(variable)]


def slot_bytes(optimizers: Sequence[Any]) -> tuple[int, int]:
    """Bytes of the optimizers' variables on this rank, and of those that are not sharded and all whole slots."""
    num_bytes = whole_bytes = 0
    for optimizer in optimizers:
        for variable in optimizer.variables:
            part = part_of(variable)
            num_bytes += _nbytes(variable)
            whole_bytes += _nbytes(part.variable if part else variable)
    return num_bytes, whole_bytes


def _slots(optimizers: Sequence[Any]) -> list[Any]:
    slots = []
    for optimizer in optimizers:
        slots += sharded_slots(optimizer)
    return slots


def gather_slots(optimizers: Sequence[Any]) -> dict[int, NDArray[Any]]:
    """Whole slots of sharded optimizers, on rank 0. A collective, unless no optimizer is sharded.

    Returns:
        Arrays of the variables' shapes by the slot's id; {} on other ranks.
    """
    slots = _slots(optimizers)
    if not slots:
        return {}
    # Each rank sends as many bytes as the one that has most.
    sent = np.zeros(_row_length(slots), np.uint8)
    joined = np.concatenate([_bytes(slot.numpy()) for slot in slots])
    sent[: joined.size] = joined
    rows = gather_bytes(sent, name="ringtrain_slots")
    if rows is None:
        return {}
    whole = {id(slot): np.empty(_part(slot).variable.shape, _dtype(slot)) for slot in slots}
    for rank, row in enumerate(rows):
        begin = 0
        for slot in slots:
            part = whole[id(slot)].reshape(-1)[_part(slot).range(rank)]
            part[:] = row[begin : begin + part.nbytes].view(part.dtype)
            begin += part.nbytes
    return whole


def scatter_slots(optimizers: Sequence[Any], whole: Mapping[int, NDArray[Any]]) -> None:
    """Sets every rank's part of whole slots that rank 0 has: the reverse of `gather_slots`. A collective."""
    slots = _slots(optimizers)
    if not slots:
        return
    length = _row_length(slots)
    rows = None
    if horovod.rank() == 0:
        flat = [np.ascontiguousarray(whole[id(slot)], _dtype(slot)).reshape(-1) for slot in slots]
        rows = []
        for rank in range(horovod.size()):
            row = np.zeros(length, np.uint8)
            joined = np.concatenate(
                [_bytes(array[_part(slot).range(rank)]) for slot, array in zip(slots, flat, strict=True)]
            )
            row[: joined.size] = joined
            rows.append(row)
    row = scatter_bytes(rows, length, name="ringtrain_slots")
    begin = 0
    for slot in slots:
        end = begin + _nbytes(slot)
        slot.assign(row[begin:end].view(_dtype(slot)).reshape(slot.shape))
        begin = end


def refuse_sharding(optimizer: Any, reduction: Any) -> None:
    """Raises ValueError for an optimizer whose update cannot be sharded; the message says why."""
    name, inner = type(optimizer).__name__, innermost(optimizer)
    reasons = {
        "elastic: a rank that is lost would take its slots along": elastic(),
        "MultiOptimizer: its parts cannot be sharded": isinstance(inner, keras.optimizers.MultiOptimizer),
        f"{name} is built already: wrap it before it has slots (compile, fit, load_model)": inner.built,
        f"{name} has clipnorm, the norm of whole variables: use global_clipnorm or clipvalue": inner.clipnorm,
        f"{name} has use_ema: it is not supported": inner.use_ema,
        "process_set: give the global one": reduction.process_set.process_set_id,
        "compression_start_step: leave it out": reduction.compression_start_step,
        f"compression {name_of(reduction.compression)}: leave it out": isinstance(reduction.compression, Compressor),
        "groups: all gradients are reduced as one vector: leave it out": reduction.groups is not None,
        "op: expected hvd.Average or hvd.Sum": reduction.op not in (horovod.Average, horovod.Sum),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason:
        raise ValueError(f"sharded=True: {reason}")
    if not is_elementwise(inner):
        raise ValueError(
            f"sharded=True: {name} does not update each weight by itself (it uses norms, means or products of a whole"
            " variable): use an elementwise optimizer such as SGD, Adam, AdamW, RMSprop or Lion"
        )


def is_elementwise(optimizer: Any) -> bool:
    """Whether the parts of a matrix are updated as the whole matrix is, by copies of the optimizer."""
    config = {**optimizer.get_config(), "learning_rate": 0.1, "gradient_accumulation_steps": None}
    config["global_clipnorm"] = None  # works on the norm of all variables, which is summed over the ranks
    random = np.random.default_rng(0)
    scale = np.repeat([1.0, 10.0], 12).reshape(6, 4)
    start, *gradients = (scale * random.normal(size=(6, 4)) for _ in range(4))

    def trained(rows: slice, shape: tuple[int, ...]) -> NDArray[Any]:
        twin = type(optimizer).from_config(config)
        variable = keras.Variable(start[rows].reshape(shape), dtype="float32", name="kernel")
        twin.build([variable])
        for gradient in gradients:
            twin.apply_gradients([(tf.constant(gradient[rows].reshape(shape), tf.float32), variable)])
        result: NDArray[Any] = variable.numpy().reshape(-1)
        return result

    parts = [trained(rows, (12, 1)) for rows in (slice(0, 3), slice(3, 6))]
    return bool(np.allclose(np.concatenate(parts), trained(slice(0, 6), (6, 4)), rtol=1e-4, atol=1e-5))


def _joined(tensors: Sequence[Any]) -> tf.Tensor:
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    return tf.concat(flat, 0)


def _bytes(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _part(slot: Any) -> Part:
    part: Part = slot.part_of
    return part


def _row_length(slots: Sequence[Any]) -> int:
    """Bytes of the largest part that a rank has of all slots."""
    longest = 0
    for rank in range(horovod.size()):
        num_bytes = 0
        for slot in slots:
            part = _part(slot).range(rank)
            num_bytes += (part.stop - part.start) * _dtype(slot).itemsize
        longest = max(longest, num_bytes)
    return longest


def _dtype(variable: Any) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _length(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))


def _nbytes(variable: Any) -> int:
    return _length(variable) * _dtype(variable).itemsize
