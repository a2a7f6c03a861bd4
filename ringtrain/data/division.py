"""A plain tf.data pipeline of which each rank makes its own rows, instead of those of all ranks.

    rows -> map -> map -> batch -> prefetch                          of the script
    rows -> batch -> a rank's part -> unbatch -> map -> map -> batch     of a rank

`rows` is the script's own dataset, so that its shuffles continue from their state. The maps have no state, so that a
row's result depends on this row alone. Of any other pipeline, every rank makes whole batches and takes its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

from ringtrain.data.parts import Header, Parts

IGNORE_EXTERNAL_STATE = 1
NUM_AT_ONCE = 2
"""batches whose rows a rank makes at the same time"""
NUM_SHUFFLED = 16
"""rows that shuffles of a copy hold"""
MAX_BYTES = 2**26
"""Most bytes of arrays in memory for which a graph is made: it contains them."""
STATE_INPUTS = {
    "ShuffleDatasetV3": (4, "DummySeedGenerator"),
    "ShuffleAndRepeatDatasetV2": (5, "DummySeedGenerator"),
    "CacheDatasetV2": (2, "DummyMemoryCache"),
    "RandomDatasetV2": (2, "DummySeedGenerator"),
}
"""By operation: the input that holds its state, and the operation that creates a new state."""
PYTHON = re.compile("(Eager)?PyFunc")
READS = re.compile("ReadVariableOp|LookupTable(Find|Size)V2|Assert|Print(V2)?|(Stateful)?PartitionedCall|If|Case|While")
"""Operations that TensorFlow counts as stateful, and that change nothing."""
MAPS = ("_MapDataset", "_ParallelMapDataset")
BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
REPEAT = "_RepeatDataset"
UNCHANGED = ("_PrefetchDataset", "_OptionsDataset", "_AssertCardinalityDataset")
"""datasets with the elements of their inputs"""


@dataclass(frozen=True)
class Division:
    """A pipeline whose maps are divided over ranks."""

    whole: tf.data.Dataset  # the script's
    rows: tf.data.Dataset  # the part of it that every rank reads whole
    maps: Sequence[Any]  # datasets with the functions that follow, in order
    batch: Any  # the dataset that makes batches
    num_passes: int  # how often these are repeated; -1: without an end

    def of_rank(self, parts: Parts) -> tf.data.Dataset:
        """Elements (Header, rows of a rank's parts) for each batch of the whole pipeline."""
        size = int(self.batch._batch_size)
        batches = self.rows.batch(size, drop_remainder=bool(self.batch._drop_remainder))
        own = batches.map(lambda *batch: parts.cut(batch[0] if len(batch) == 1 else batch))

        def mapped(header: Header, part: Any) -> tf.data.Dataset:
            rows = tf.data.Dataset.from_tensor_slices(part)
            for earlier in self.maps:
                rows = _mapped(rows, earlier)
            rows = rows.batch(len(parts.places(size)))
            return tf.data.Dataset.zip(tf.data.Dataset.from_tensors(header), rows)

        plain = tf.autograph.experimental.do_not_convert(mapped)
        own = own.interleave(plain, NUM_AT_ONCE, num_parallel_calls=NUM_AT_ONCE, deterministic=True)
        return own.repeat(self.num_passes).with_options(self.whole.options())


def division_of(dataset: Any) -> tuple[Division | None, str]:
    """The division of a pipeline; None and what stands in the way, as a phrase, if there is none."""
    batch, num_passes = dataset, 1
    while type(batch).__name__ in (*UNCHANGED, REPEAT):
        if type(batch).__name__ == REPEAT:
            count = int(batch._count)
            num_passes = -1 if -1 in (count, num_passes) else num_passes * count
        (batch,) = batch._inputs()
    if type(batch).__name__ not in BATCHES:
        return None, "it does not end with batch()"
    maps: list[Any] = []
    state = ""
    (rows,) = batch._inputs()
    while type(rows).__name__ in (*UNCHANGED, *MAPS):
        if type(rows).__name__ in MAPS:
            state = state_of(rows._map_func.function)
            if state:
                break
            maps.insert(0, rows)
        (rows,) = rows._inputs()
    if not maps:
        return None, f"map() with {state}" if state else "no map() stands right before batch()"
    if not _are_of_one_shape(rows):
        return None, "its rows before map() may have several shapes"
    return Division(dataset, rows, maps, batch, num_passes), ""


def _are_of_one_shape(rows: Any) -> bool:
    """Returns whether all rows of a dataset are known to have one shape, so that they make batches."""
    specs = tf.nest.flatten(rows.element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs)


def _mapped(rows: tf.data.Dataset, earlier: Any) -> tf.data.Dataset:
    """Rows to which the function of an earlier map, as it is traced, is applied."""
    function, spec = earlier._map_func, rows.element_spec
    calls = getattr(earlier, "_num_parallel_calls", None)

    def applied(*row: Any) -> Any:
        value = row if isinstance(spec, tuple) else row[0]
        result = function.function(*structure.to_tensor_list(spec, value))
        return structure.from_compatible_tensor_list(function.output_structure, result)

    return rows.map(applied, num_parallel_calls=None if calls is None else int(calls))


# ---- copies of pipelines with a state of their own, and what their parts are -----------------------------------------


def copy_of(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Dataset with as many batches, an iteration of which changes no state of `dataset`; None: it cannot be copied."""
    if _bytes_of(dataset) > MAX_BYTES:
        return None
    try:
        variant = tf.data.experimental.to_variant(dataset)
        serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=IGNORE_EXTERNAL_STATE)
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
        for node in list(graph.node):
            if node.op in STATE_INPUTS:
                index, operation = STATE_INPUTS[node.op]
                name = f"state_of_{node.name}".replace("/", "_")
                graph.node.add(name=name, op=operation)
                node.input[index] = name
            if node.op.startswith("Shuffle"):  # small buffers are soon full
                name = f"buffer_of_{node.name}".replace("/", "_")
                buffer = graph.node.add(name=name, op="Const")
                buffer.attr["dtype"].type = tf.int64.as_datatype_enum
                buffer.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(NUM_SHUFFLED, tf.int64))
                node.input[1] = name
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        return tf.data.experimental.from_variant(variant, dataset.element_spec)
    except Exception:  # nothing that TensorFlow can put into a graph
        return None


def caches_in_file(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline has a `cache` in a file or a `snapshot`, which one process can write."""
    filename = getattr(dataset, "_filename", None)
    is_cache = type(dataset).__name__ == "CacheDataset" and filename is not None and bool(filename.numpy())
    return is_cache or type(dataset).__name__ == "_SnapshotDataset" or any(map(caches_in_file, dataset._inputs()))


def share_a_shuffle(*sources: Any) -> bool:
    """Returns whether an iteration of one of two pipelines may change the order of the other."""
    shuffles = [shuffles_of(source) for source in sources if isinstance(source, tf.data.Dataset)]
    if len(shuffles) < 2:
        return False
    first, second = shuffles
    return first is None or second is None or any(one is other for one in first for other in second)


def state_of(function: Any) -> str:
    """The operation, as a phrase, by which a function has a state or random results; "": none."""
    for node in _operations_of(function):
        definition = op_def_registry.get(node.op)
        if PYTHON.fullmatch(node.op):
            return "a Python function"
        if (definition is None or definition.is_stateful) and not READS.fullmatch(node.op):
            layer = node.name.split("/")[-2:-1]  # the innermost that has made it
            return layer[0] if layer else node.op
    return ""


def shuffles_of(dataset: Any) -> list[Any] | None:
    """Shuffles, and random numbers that change, each of which takes one order in an iteration; None: it is not known.

    A shuffle takes it when its iterator is made: for all but the last one, when elements are read. So an iterator of
    each of them takes it as well, without reading.
    """
    name, inputs = type(dataset).__name__, dataset._inputs()
    found: list[Any] = []
    for one in inputs:
        shuffles = shuffles_of(one)
        if shuffles is None:
            return None
        found += shuffles
    captured = [tensor for function in dataset._functions() for tensor in function.function.captured_inputs]
    if any(tensor.dtype.name == "variant" for tensor in captured):  # another dataset
        return None
    if found and (len(inputs) > 1 or name in ("CacheDataset", "_RepeatDataset")):  # a cache keeps the first order
        return None
    if name == "_ShuffleDataset" or (name == "_RandomDataset" and dataset._rerandomize):
        found.append(dataset)
    return found


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline calls a Python function, such as a generator, which may have a state."""
    operations = [node for function in dataset._functions() for node in _operations_of(function.function)]
    return any(PYTHON.fullmatch(node.op) for node in operations) or any(map(calls_python, dataset._inputs()))


def _operations_of(function: Any) -> Iterator[Any]:
    """Operations of a function, and of those that it calls."""
    graph = function.graph.as_graph_def()
    yield from graph.node
    for called in graph.library.function:
        yield from called.node_def


def _bytes_of(dataset: Any) -> int:
    """Bytes of the arrays that a dataset is made from, and that its functions use."""
    tensors = list(getattr(dataset, "_tensors", ()))
    for function in dataset._functions():
        tensors += function.function.captured_inputs
    sizes = [(tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors]
    return sum(sizes) + sum(map(_bytes_of, dataset._inputs()))
