"""What a training step does to variables besides its update, as far as its graph shows it.

With virtual ranks, a step is called once for each part of the rows, and the weights are updated after the last part:
what it does besides its one update would be done several times, and with weights that are not updated yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.errors import ConfigError
from ringtrain.hvd.collectives import tensor_of
from ringtrain.hvd.keras_patches import path_of, slots_of

ADVICE = "with virtual ranks it is called for each part of the rows, and weights are updated once, after all of them"
ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatter", "ResourceStridedSlice")
"""beginnings of the names of operations that change the variable of their first input"""
APPLIES = ("ResourceApply", "ResourceSparseApply")
"""of those that change the variables of all of their inputs"""
REDUCES = (
    "HorovodAllreduce",
    "HorovodGroupedAllreduce",
    "HorovodAllgather",
    "HorovodGroupedAllgather",
    "HorovodBroadcast",
)
"""of those whose outputs are the same on all ranks"""
PASSES = ("Identity", "While", "StatelessWhile")
"""operations whose output is the handle that the input in the same place is"""
FIRST_ARGUMENT = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile"), 0),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), 1),
}
"""place of the input that is the first argument of the functions that an operation calls"""


def named(model: keras.Model) -> str:
    """The step's name in messages."""
    return f"train.virtual_ranks: {type(model).__name__}.train_step"


def num_operations() -> int:
    """Number of the operations in the graph so far; 0 without a graph."""
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


def operations(graph: Any) -> list[str]:
    """Types of the operations of a graph, then of those of the functions that it calls."""
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes += function.node_def
    return [node.op for node in nodes]


def changed_by(data: Any, begin: int, variables: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns those of the variables whose new values follow from the data or from other variables.

    Without a graph, all of them. What ranks have reduced does not count: it is the same on all.

    Args:
        begin: Number of the graph's first operation that counts.
    """
    if tf.executing_eagerly() or not variables:
        return [*variables]
    graph: Any = tf.compat.v1.get_default_graph()
    changes = _Changes(graph)
    reached = {leaf.name for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)}
    """names of tensors"""
    changed = {id(variable.value.handle) for variable in others}
    for operation in graph.get_operations()[begin:]:
        inputs = list(operation.inputs)
        handles = [tensor.dtype == tf.resource for tensor in inputs]
        if operation.type.startswith(REDUCES):
            continue
        variables_read = (id(_outermost(graph, tensor)) for tensor in itertools.compress(inputs, handles))
        if any(tensor.name in reached for tensor in inputs) or not changed.isdisjoint(variables_read):
            reached.update(tensor.name for tensor in operation.outputs)
            for index in changes.of_inputs(operation.node_def, handles):
                changed.add(id(_outermost(graph, inputs[index])))
    return [variable for variable in variables if id(variable.value.handle) in changed]


class Effects:
    """Changes of variables by a built model's step.

    Args:
        allowed: Variables that the step may change.
    """

    def __init__(self, model: keras.Model, allowed: Sequence[Any]) -> None:
        self.model = model
        everything = [*model.variables, *model.metrics_variables, *slots_of(model)]
        self._names = {id(tensor_of(variable).handle): path_of(variable) for variable in everything}
        self._allowed = {id(variable.value.handle) for variable in allowed}

    def refuse(self, begin: int) -> None:
        """Raises ConfigError if operations of the graph from number `begin` on change another variable."""
        if tf.executing_eagerly():
            return
        graph: Any = tf.compat.v1.get_default_graph()
        changes = _Changes(graph)
        for operation in graph.get_operations()[begin:]:
            node = operation.node_def
            inputs = list(operation.inputs)
            handles = [tensor.dtype == tf.resource for tensor in inputs]
            for index in changes.of_inputs(node, handles):
                handle = id(_outermost(graph, inputs[index]))
                if handle not in self._allowed:
                    name = self._names.get(handle, "a variable that no layer or metric has")
                    what = f"{named(self.model)} changes {name} besides the update by its optimizer"
                    raise ConfigError(f"{what}: {ADVICE}")


class _Changes:
    """Variables that operations of a graph change, also by functions that they call."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._known: dict[str, set[int]] = {}

    def of_inputs(self, node: Any, handles: Sequence[bool]) -> Iterator[int]:
        """Places of the inputs of an operation whose variables it changes; `handles`: which inputs are variables."""
        places = [index for index, is_handle in enumerate(handles) if is_handle]
        if not places:
            return
        if node.op.startswith(ASSIGNS):
            yield places[0]
        elif node.op.startswith(APPLIES):
            yield from places
        for name in _called(node):
            changed = self.of_arguments(name)
            if node.op in FIRST_ARGUMENT:
                yield from (FIRST_ARGUMENT[node.op] + number for number in changed)
            elif changed:  # as a map over a dataset does, which has other inputs than the function
                yield from places

    def of_arguments(self, function: str) -> set[int]:
        """Numbers of the arguments of a function whose variables it changes."""
        if function in self._known:
            return self._known[function]
        changed = self._known[function] = set()  # a function may call itself
        defined = self.graph._get_function(function)
        if defined is None:  # of another graph
            return changed
        definition = defined.cached_definition
        arguments: dict[str, int] = {}
        """number of the argument that a name in the function stands for"""
        for number, argument in enumerate(definition.signature.input_arg):
            if argument.type == tf.resource.as_datatype_enum:
                arguments[argument.name] = number
        for node in definition.node_def:
            inputs = [_source(text) for text in node.input if not text.startswith("^")]
            if node.op in PASSES:
                for index, name in enumerate(inputs):
                    if name in arguments:
                        arguments[f"{node.name}:{index}"] = arguments[name]
            for index in self.of_inputs(node, [name in arguments for name in inputs]):
                changed.add(arguments[inputs[index]])
        return changed


def _source(text: str) -> str:
    """Name of an argument, or node and place of its output, from the input of a node in a function."""
    node, _, output = text.partition(":")
    if not output:
        return node
    return f"{node}:{output.rpartition(':')[2]}"


def _called(node: Any) -> list[str]:
    """Names of the functions that an operation calls."""
    names = []
    for value in node.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    return names


def _outermost(graph: Any, tensor: Any) -> Any:
    """The tensor outside of all graphs for which a tensor of a graph stands."""
    while graph is not None and not hasattr(tensor, "numpy"):
        if tensor.op.type in PASSES:
            tensor = tensor.op.inputs[tensor.value_index]
            continue
        captures = getattr(graph, "captures", ())
        captured = next((outside for outside, inside in captures if inside is tensor), None)
        if captured is None:
            return tensor
        tensor, graph = captured, graph.outer_graph
    return tensor
