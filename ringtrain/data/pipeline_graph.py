"""Copies of tf.data pipelines with a state of their own, and their operations that differ between processes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

IGNORE_EXTERNAL_STATE = 1
MAX_BYTES = 2**26
"""Most bytes of arrays in memory for which a graph is made: it contains them."""
STATE_INPUTS = {
    "ShuffleDatasetV3": (4, "DummySeedGenerator"),
    "ShuffleAndRepeatDatasetV2": (5, "DummySeedGenerator"),
    "CacheDatasetV2": (2, "DummyMemoryCache"),
    "RandomDatasetV2": (2, "DummySeedGenerator"),
}
"""By operation: the input that holds its state, and the operation that creates a new state."""
STATEFUL = ("_ShuffleDataset", "_RandomDataset", "CacheDataset")
"""kinds of datasets whose next iteration depends on the ones before it"""
SEED_INPUTS = {"ShuffleDatasetV3": (2, 3), "ShuffleAndRepeatDatasetV2": (2, 3)}
DRAWS = re.compile(
    "Random(Uniform|StandardNormal|Gamma|Poisson|Shuffle|Crop)|Multinomial|TruncatedNormal|ParameterizedTruncated"
    "|SampleDistortedBoundingBox"
)
"""Operations with a state of their own, which their seed determines."""
CHANGES = re.compile("Assign|Rng(ReadAndSkip|Skip)|StatefulUniform|StatefulStandardNormal|StatefulTruncated")
"""Operations that change a variable, such as a seed of Keras."""
PYTHON = re.compile("(Eager)?PyFunc")
READS = re.compile("ReadVariableOp|LookupTable(Find|Size)V2|Assert|Print(V2)?|(Stateful)?PartitionedCall|If|Case|While")
"""Operations that TensorFlow counts as stateful, and that change nothing."""


@dataclass(frozen=True)
class RandomOperation:
    """A part of a pipeline that may give each process other batches.

    Attributes:
        text: A phrase that names it.
        always_differs: Whether no seed makes it the same in every process.
        goes_on: Whether it goes on in a later epoch as it has ended the one before, by a variable that no run saves.
    """

    text: str
    always_differs: bool
    goes_on: bool = False


def copy_of(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Dataset with the same batches, of which an iteration changes no shuffle, cache or variable of `dataset`.

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


def states_of(dataset: Any) -> list[Any]:
    """Parts of a pipeline with a state that reading changes, and which other pipelines may share."""
    found = [state for one in dataset._inputs() for state in states_of(one)]
    if type(dataset).__name__ in STATEFUL or _has_python(dataset):
        found.append(dataset)
    return found


def random_operations(dataset: tf.data.Dataset) -> tuple[list[RandomOperation], int]:
    """Parts of a pipeline that may differ between processes, and a checksum of the variables that it reads."""
    try:
        graph = _graph_of(dataset)
        return list(dict.fromkeys(_operations(graph))), _checksum_of_variables(graph)
    except Exception:  # as above
        return [], 0


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


def _operations(graph: Any) -> Iterator[RandomOperation]:
    nodes = {node.name: node for node in graph.node}
    functions = {function.signature.name: function for function in graph.library.function}
    for node in graph.node:
        if node.op in SEED_INPUTS and not any(_number(nodes, node.input[index]) for index in SEED_INPUTS[node.op]):
            yield RandomOperation("shuffle without a seed", True)
        kind = re.sub("Parallel|Dataset.*", "", node.op).lower()
        if node.attr["deterministic"].s == b"false":
            yield RandomOperation(f"{kind} with deterministic=False", True)
        is_parallel = node.op.startswith("Parallel") and _number(nodes, node.input[-1]) != 1
        for inner in _nodes_of(_functions_of(node), functions):
            name = _layer_or_operation(inner)
            if PYTHON.fullmatch(inner.op):
                yield RandomOperation(f"{kind} with a Python function", False)
            elif DRAWS.match(inner.op) and not (inner.attr["seed"].i or inner.attr["seed2"].i):
                yield RandomOperation(f"{kind} with {name} without a seed", True)
            elif is_parallel and (DRAWS.match(inner.op) or CHANGES.match(inner.op)):
                yield RandomOperation(f"{kind} with {name} and num_parallel_calls", True)
            elif DRAWS.match(inner.op) or CHANGES.match(inner.op):
                yield RandomOperation(f"{kind} with {name}", False, bool(CHANGES.match(inner.op)))


def _layer_or_operation(node: Any) -> str:
    """Name of the innermost layer that has made an operation, or else its kind."""
    return node.name.split("/")[-2] if "/" in node.name else node.op


def _functions_of(node: Any) -> list[str]:
    names = []
    for value in node.attr.values():
        names.append(value.func.name)
        names += [function.name for function in value.list.func]
    return [name for name in names if name]


def _nodes_of(names: Iterable[str], functions: Any) -> Iterator[Any]:
    """Operations of functions, and of those that these call."""
    for name in names:
        for node in functions[name].node_def if name in functions else ():
            yield node
            yield from _nodes_of(_functions_of(node), functions)


def _number(nodes: Any, name: str) -> int:
    """Value of a constant; -1: `name` is none, or TensorFlow chooses (AUTOTUNE)."""
    import tensorflow as tf

    node = nodes.get(name.partition(":")[0].removeprefix("^"))
    if node is not None and node.op == "Const":
        return int(tf.make_ndarray(node.attr["value"].tensor))
    return -1


def _checksum_of_variables(graph: Any) -> int:
    constants = {node.name: node for node in graph.node if node.op == "Const"}
    checksum = 0
    for node in graph.node:
        value = constants.get(node.input[1]) if node.op == "AssignVariableOp" else None
        if value is not None:
            checksum = zlib.crc32(value.attr["value"].tensor.SerializeToString(), checksum)
    return checksum
