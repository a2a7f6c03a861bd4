"""Reduction of gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ringtrain.hvd.backend import Adasum, Average, Compression, Min, ProcessSet, Sum, check_adasum, horovod
from ringtrain.hvd.collectives import refuse_xla, tensor_of, unique_in_graph
from ringtrain.hvd.placement import CPU
from ringtrain.hvd.powersgd import LowRank, PowerSGD
from ringtrain.hvd.process import elastic

OP_WORDS = {Average: "averaged", Sum: "summed", Adasum: "combined by Adasum"}


@dataclass(eq=False)
class Reduction:
    """Function that reduces the gradients of one optimizer, with the arguments of `DistributedOptimizer`."""

    name: str
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: Any
    groups: int | list[Any] | None
    process_set: ProcessSet
    scale_local_gradients: bool
    accumulated_scale: float = 1.0  # of the result: Keras averages over micro-steps, `backward_passes_per_step` sums
    deterministic: bool = False
    merge_rows: bool = False  # add up the rows of a sparse gradient, as for a tape
    reducer: LowRank | None = field(init=False, default=None)  # replaces the allreduce of dense gradients
    share: Any = None  # multiplies this rank's gradients, in `_Reducing.weighted`
    _graphs: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.op not in OP_WORDS:
            raise ValueError(f"op: got {self.op!r}, expected hvd.Average, hvd.Sum or hvd.Adasum")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor divides an average in two steps: use it with op=hvd.Average")
        if self.groups is not None and not isinstance(self.groups, list) and self.groups <= 0:
            raise ValueError(f"groups: got {self.groups!r}, expected a positive number or a list of lists of variables")
        if self.op == Adasum and self.groups is not None:
            raise ValueError("op=hvd.Adasum combines tensor by tensor: leave groups and num_groups out")
        if self.deterministic and self.groups is not None:
            raise ValueError("deterministic=True reduces all gradients as one: leave groups and num_groups out")
        if isinstance(self.compression, PowerSGD):
            self.compression.check(self)
            self.reducer = LowRank(self.compression)
        if self.op == Adasum:
            check_adasum(self.process_set)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[bool]) -> list[Any]:
        """Reduces gradients (tensors or `IndexedSlices`, not None) except `local` ones; shapes and dtypes stay."""
        if not tf.executing_eagerly():
            return self._reduce(gradients, variables, local)
        # In a graph, Horovod negotiates and fuses all tensors together; eager tensors are sent one after the other.
        specs = [_spec(gradient) for gradient in gradients]
        key = (tuple(id(tensor_of(variable)) for variable in variables), tuple(local), tuple(specs))
        if key not in self._graphs:
            graph = tf.function(lambda *tensors: self(tensors, variables, local), autograph=False)
            # Traced by itself: where a script makes functions of TensorFlow run eagerly, a call would come back here.
            self._graphs[key] = graph.get_concrete_function(*specs)
        return self._graphs[key](*gradients)

    @property
    def merges_rows(self) -> bool:
        """Whether each row of a sparse gradient reaches the update once, as the sum of its parts."""
        # Keras makes sparse gradients dense in its update, and on a GPU adds up the parts of a row in any order.
        return self.merge_rows or (not self._alone() and bool(tf.config.list_logical_devices("GPU")))

    def in_fixed_order(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Merges the rows of slices to be added to a variable: several threads would add them in any order."""
        if self._alone() or self.merges_rows:
            return slices
        rows, places = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
        return tf.IndexedSlices(values, rows, slices.dense_shape)

    def trial(self, optimizer: Any) -> NDArray[Any]:
        """Reduces vectors of length size, each 1 at its rank and else 0, by an optimizer."""
        num_ranks = self.process_set.size()
        (reduced,) = optimizer.reduce([tf.one_hot(self.process_set.rank(), num_ranks)], [probe(num_ranks)])
        result: NDArray[Any] = reduced.numpy()
        return result

    def true_on_all_ranks(self, flag: Any) -> tf.Tensor:
        """Returns the logical and of a scalar boolean tensor over the ranks."""
        if self._alone():
            return flag
        name = f"HorovodAllreduce_{unique_in_graph(self.name)}_finite"
        with tf.device(CPU):
            lowest = horovod.allreduce(
                tf.cast(flag, tf.int32), op=Min, name=name, ignore_name_scope=True, process_set=self.process_set
            )
        return tf.cast(lowest, tf.bool)

    # ---- vectors of which each rank has a part -----------------------------------------------------------------------

    def place(self) -> tuple[int, int]:
        """This rank's number in its process set, and the number of ranks in it."""
        return self.process_set.rank(), self.process_set.size()

    def gather_parts(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the vectors whose parts the ranks have, joined in the ranks' order."""
        if self._alone():
            return parts
        prefix = f"HorovodAllgather_{unique_in_graph(self.name)}"
        options = {"ignore_name_scope": True, "process_set": self.process_set}
        with tf.device(self.device_dense):
            wholes = []
            for index, part in enumerate(parts):
                wholes.append(horovod.allgather(widened(part), name=f"{prefix}_{index}", **options))
        return [tf.cast(whole, part.dtype) for whole, part in zip(wholes, parts, strict=True)]

    def exchange_columns(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns this rank's columns of all ranks' rows, in rank order; zeros are added so that all have as many."""
        refuse_xla()
        size, (num_rows, length) = self.process_set.size(), tf.unstack(tf.shape(rows))
        padded = tf.pad(rows, [[0, 0], [0, -length % size]])
        columns = tf.transpose(tf.reshape(padded, [num_rows, size, -1]), [1, 0, 2])  # [size, rows, columns]
        options = {"ignore_name_scope": True, "process_set": self.process_set}
        with tf.device(self.device_dense):
            flat = tf.reshape(widened(columns), [size * num_rows, -1])
            name = f"HorovodAlltoall_{unique_in_graph(self.name)}"
            received, _ = horovod.alltoall(flat, splits=tf.fill([size], num_rows), name=name, **options)
        return tf.cast(received, rows.dtype)

    def sum_of_parts(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a scalar over the ranks."""
        if self._alone():
            return value
        name = f"HorovodAllreduce_{unique_in_graph(self.name)}_norm"
        with tf.device(CPU):
            return horovod.allreduce(value, op=Sum, name=name, ignore_name_scope=True, process_set=self.process_set)

    def _alone(self) -> bool:
        # Also outside of the process set, where Horovod does not change gradients.
        return not elastic() and (self.process_set.size() == 1 or not self.process_set.included())

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[bool]) -> list[Any]:
        if not self._alone():
            refuse_xla()
        prefix = unique_in_graph(self.name)
        reduced = list(gradients)
        dense = []
        for index, gradient in enumerate(gradients):
            if local[index]:
                if self.scale_local_gradients:
                    reduced[index] = scaled(gradient, 1.0 / self.num_ranks())
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                reduced[index] = self._reduce_sparse(gradient, f"HorovodAllgather_{prefix}_{index}")
            elif self._alone():
                reduced[index] = tf.convert_to_tensor(gradient)
            else:
                dense.append(index)
        name = f"HorovodAllreduce_{prefix}"
        tensors = [tf.convert_to_tensor(gradients[index]) for index in dense]
        of_dense = [variables[index] for index in dense]
        if self.reducer:
            results = self.reducer.reduce(self, tensors, of_dense, name)
        else:
            results = self.allreduce(tensors, of_dense, name)
        for index, result in zip(dense, results, strict=True):
            reduced[index] = result
        return [scaled(gradient, self.accumulated_scale) for gradient in reduced]

    def allreduce(self, tensors: list[tf.Tensor], variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        """Reduces tensors by Horovod, in the groups that are sent together."""
        return self._in_groups(tensors, self._split(tensors, variables), name)

    def means(self, tensors: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Reduces tensors that are no gradients, one by one or, if the order of additions is fixed, as one vector."""
        indices = range(len(tensors))
        if self._as_one():
            groups = by_dtype(indices, tensors)
        else:
            groups = [[index] for index in indices]
        return self._in_groups(tensors, groups, name)

    def _in_groups(self, tensors: list[tf.Tensor], groups: Sequence[list[int]], name: str) -> list[tf.Tensor]:
        results = list(tensors)
        for number, members in enumerate(groups):
            sums = self._reduce_dense([tensors[index] for index in members], f"{name}_{number}")
            for index, result in zip(members, sums, strict=True):
                results[index] = result
        return results

    def _reduce_sparse(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        # Equivalent to Horovod's allreduce, which names the gathers after their tensors: those names differ between
        # ranks. gradient_predivide_factor would cancel out. Without merge_rows, the ranks' parts of a row stay apart:
        # Adam and others square them one by one, as those of one process unless it has each row once.
        if self._alone() and not self.merge_rows:
            return gradient
        merges_rows = self.merges_rows or _are_unique(gradient.indices)
        with tf.device(self.device_sparse):
            rows, values = gradient.indices, widened(gradient.values)
            if merges_rows:
                rows, places = tf.unique(rows)
                values = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
            if not self._alone():
                if self.op == Adasum:
                    raise NotImplementedError("Adasum knows no sparse gradients: set sparse_as_dense=True")
                if self.op == Average:
                    values = values / tf.cast(self.num_ranks(), values.dtype)
                options = {"ignore_name_scope": True, "process_set": self.process_set}
                with tf.device(CPU):
                    counts = horovod.allgather(tf.size(rows)[None], name=f"{name}_counts", **options)
                values = horovod.allgather(values, name=f"{name}_values", **options)
                rows = horovod.allgather(rows, name=f"{name}_indices", **options)
                if merges_rows:
                    values, rows = _summed_by_row(values, rows, counts)
        return tf.IndexedSlices(tf.cast(values, gradient.dtype), rows, gradient.dense_shape)

    def _reduce_dense(self, gradients: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        tensors = [widened(gradient) for gradient in gradients]
        factor = self.gradient_predivide_factor
        options = {
            "device_dense": self.device_dense,
            "compression": Compression.none if self.reducer else self.compression,
            "op": self.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "process_set": self.process_set,
            "ignore_name_scope": True,
            "name": name,
        }
        after: Any = 1.0
        if any(self._sent_in_16_bits(tensor) for tensor in tensors):
            # Horovod would add before it divides, and float16 overflows above 65504: divide here, and multiply after.
            divisor: Any = self.num_ranks() if factor == 1.0 else factor
            tensors = [scaled(tensor, 1.0 / divisor) for tensor in tensors]
            options |= {"prescale_factor": 1.0, "postscale_factor": 1.0}
            after = divisor
            if self.op == Average:
                options["op"] = Sum
                after = divisor / self.num_ranks()
        if self._as_one():
            results = joined(tensors, lambda flat: horovod.allreduce(flat, **options))
        elif self.groups is None:
            results = [horovod.allreduce(tensor, **options) for tensor in tensors]
        else:
            results = horovod.grouped_allreduce(tensors, **options)
        results = [scaled(result, after) for result in results]
        return [tf.cast(result, gradient.dtype) for result, gradient in zip(results, gradients, strict=True)]

    def _sent_in_16_bits(self, tensor: tf.Tensor) -> bool:
        compressed = self.compression is getattr(Compression, "fp16", None) and tensor.dtype.is_floating
        return tensor.dtype == tf.float16 or compressed

    def _split(self, tensors: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
        """Indices of dense gradients, in groups that are reduced together."""
        indices = range(len(tensors))
        if self._as_one():
            return by_dtype(indices, tensors)
        if self.groups is None:
            return [[index] for index in indices]
        if not isinstance(self.groups, list):
            length = -(-len(tensors) // self.groups) or 1
            return [list(indices[start : start + length]) for start in range(0, len(tensors), length)]
        rest = {id(tensor_of(variables[index])): index for index in indices}
        groups = []
        for group in self.groups:
            keys = [id(tensor_of(variable)) for variable in group]
            members = [rest.pop(key) for key in keys if key in rest]
            if members:
                groups.append(members)
        return groups + [[index] for index in rest.values()]  # each variable in no group is sent alone

    def _as_one(self) -> bool:
        return self.deterministic and self.op != Adasum

    def num_ranks(self) -> Any:
        """Number of ranks that reduce: an int, or float64 [] in an elastic run, where it changes."""
        if elastic():
            return tf.cast(horovod.size_op(process_set_id=self.process_set.process_set_id), tf.float64)
        return self.process_set.size()


def probe(length: int) -> keras.Variable:
    """Variable whose gradient a trial reduces."""
    return keras.Variable(np.zeros(length), dtype="float32", name="probe")


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor; in float32, if it is bfloat16."""
    # Horovod's allreduce does not support bfloat16; float32 represents all its values.
    if tensor.dtype == tf.bfloat16:
        return tf.cast(tensor, tf.float32)
    return tensor


def by_dtype(indices: Sequence[int], tensors: Sequence[Any]) -> list[list[int]]:
    """Indices of tensors in groups of one dtype."""
    dtypes = dict.fromkeys(tensors[index].dtype for index in indices)
    return [[index for index in indices if tensors[index].dtype == dtype] for dtype in dtypes]


def joined(tensors: list[tf.Tensor], reduce: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
    """Reduces tensors of one dtype as one vector, for a fixed order of additions."""
    # The order depends on an element's position in the message, and Horovod fuses tensors by when they are ready.
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    parts = tf.split(reduce(flat), [tf.size(tensor) for tensor in tensors])
    return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]


def _spec(gradient: Any) -> tf.TypeSpec:
    """Specification of an eager gradient; a sparse one has another number of rows in each step."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.TensorSpec.from_tensor(gradient)
    dtype_of_shape = None if gradient.dense_shape is None else gradient.dense_shape.dtype
    return tf.IndexedSlicesSpec(gradient.shape, gradient.dtype, gradient.indices.dtype, dtype_of_shape, [None])


def _are_unique(rows: tf.Tensor) -> bool:
    """Returns whether a graph makes these rows different from each other, as for a dense layer's sparse inputs."""
    while not isinstance(rows, tf.__internal__.EagerTensor) and rows.op.inputs:
        if rows.op.type in ("Unique", "UniqueV2"):
            return rows.value_index == 0
        if rows.op.type not in ("Identity", "Reshape", "Cast"):
            return False
        rows = rows.op.inputs[0]
    return False


def _summed_by_row(values: tf.Tensor, indices: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums values with the same index in rank order, bit for bit equal everywhere; `counts`: indices of each rank."""
    # An update that scatters several values into one row would add them in any order, on several threads.
    rows, places = tf.unique(indices)

    def add(rank: tf.Tensor, begin: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        end = begin + counts[rank]
        return rank + 1, end, tf.tensor_scatter_nd_add(total, places[begin:end, None], values[begin:end])

    total = tf.zeros(tf.concat([tf.shape(rows), tf.shape(values)[1:]], 0), values.dtype)
    total.set_shape([None, *values.shape[1:]])
    _, _, total = tf.while_loop(lambda rank, *_: rank < tf.size(counts), add, (0, 0, total))
    return total, rows


def weighed(gradient: Any, share: Any) -> Any:
    """A gradient, multiplied by a share of the batch."""
    # Not by `*`, which TensorFlow combines with other factors, in another order in the graph of another strategy.
    return scaled(gradient, share, tf.math.multiply_no_nan)


def scaled(gradient: Any, factor: Any, multiply: Callable[[Any, Any], Any] = tf.multiply) -> Any:
    """A dense or sparse gradient, multiplied by a factor."""
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor, multiply), gradient.indices, gradient.dense_shape)
    return multiply(gradient, tf.cast(factor, gradient.dtype))
