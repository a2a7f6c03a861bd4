"""Copies of tf.data pipelines with a state of their own, and parts of pipelines that have a state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

IGNORE_EXTERNAL_STATE = 1
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


def copy_of(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Dataset with as many batches, of which an iteration changes no shuffle, cache or variable of `dataset`.

    Its shuffles have small buffers, which are soon full.

    Returns:
        None: it cannot be copied, e.g. because it is made from arrays of more than MAX_BYTES.
    """
    import tensorflow as tf

    try:
        graph = _graph_of(dataset)
        for node in list(graph.node):
            if node.op in STATE_INPUTS:
                index, operation = STATE_INPUTS[node.op]
                name = f"state_of_{node.name}".replace("/", "_")
                graph.node.add(name=name, op=operation)
                node.input[index] = name
            if node.op.startswith("Shuffle"):
                name = f"buffer_of_{node.name}".replace("/", "_")
                buffer = graph.node.add(name=name, op="Const")
                buffer.attr["dtype"].type = tf.int64.as_datatype_enum
                buffer.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(NUM_SHUFFLED, tf.int64))
                node.input[1] = name
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        return tf.data.experimental.from_variant(variant, dataset.element_spec)
    except Exception:  # too large, or nothing that TensorFlow can put into a graph
        return None


def caches_in_file(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline has a `cache` in a file, which one process can write."""
    filename = getattr(dataset, "_filename", None)
    if type(dataset).__name__ == "CacheDataset" and filename is not None and bool(filename.numpy()):
        return True
    return any(map(caches_in_file, dataset._inputs()))


def state_of(function: Any) -> str:
    """The operation, as a phrase, by which a function has a state or random results; "": none."""
    from tensorflow.python.framework import op_def_registry

    for node in _operations_of(function):
        definition = op_def_registry.get(node.op)
        if PYTHON.fullmatch(node.op):
            return "a Python function"
        if (definition is None or definition.is_stateful) and not READS.fullmatch(node.op):
            return _layer_or_operation(node)
    return ""


def shuffles_of(dataset: Any) -> list[Any] | None:
    """Shuffles of a pipeline, and random numbers that change, each of which takes one order in an iteration of it.

    A shuffle takes it when its iterator is made: for all but the last one, when elements are read. So an iterator of
    each of them takes it as well, without reading.

    Returns:
        None: It cannot be known, e.g. of a `cache` after a shuffle, which keeps the first order.
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
    if found and (len(inputs) > 1 or name in ("CacheDataset", "_RepeatDataset")):
        return None
    if name == "_ShuffleDataset" or (name == "_RandomDataset" and dataset._rerandomize):
        found.append(dataset)
    return found


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline calls a Python function, such as a generator, which may have a state."""
    return _has_python(dataset) or any(map(calls_python, dataset._inputs()))


def _has_python(dataset: tf.data.Dataset) -> bool:
    operations = (node for function in dataset._functions() for node in _operations_of(function.function))
    return any(PYTHON.fullmatch(node.op) for node in operations)


def _operations_of(function: Any) -> Iterator[Any]:
    """Operations of a function, and of those that it calls."""
    graph = function.graph.as_graph_def()
    yield from graph.node
    for called in graph.library.function:
        yield from called.node_def


def _graph_of(dataset: tf.data.Dataset) -> Any:
    import tensorflow as tf

    if _bytes_of(dataset) > MAX_BYTES:
        raise ValueError("too large")
    variant = tf.data.experimental.to_variant(dataset)
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=IGNORE_EXTERNAL_STATE)
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def _bytes_of(dataset: Any) -> int:
    """Bytes of the arrays that a dataset is made from, and that its functions use."""
    tensors = list(getattr(dataset, "_tensors", ()))
    for function in dataset._functions():
        tensors += function.function.captured_inputs
    sizes = [(tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors]
    return sum(sizes) + sum(map(_bytes_of, dataset._inputs()))


def _layer_or_operation(node: Any) -> str:
    """Name of the innermost layer that has made an operation, or else its kind."""
    return node.name.split("/")[-2] if "/" in node.name else node.op
