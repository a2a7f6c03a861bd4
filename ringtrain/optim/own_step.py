"""What a model's own `train_step` does to variables, as far as its graph shows it.

With virtual ranks, a step is called once for each part of the rows, and the weights are updated after the last part:
what it does besides its one update would be done several times, and with weights that are not updated yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain import hvd
from ringtrain.errors import ConfigError

ADVICE = "with virtual ranks it is called for each part of the rows, and weights are updated once, after all of them"
CHANGES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatter", "ResourceApply")
"""beginnings of the names of operations that change a variable"""


def named(model: keras.Model) -> str:
    """The step's name in messages."""
    return f"train.virtual_ranks: {type(model).__name__}.train_step"


def num_operations() -> int:
    """Number of the operations in the graph so far; 0 without a graph."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def refuse_effects(model: keras.Model, begin: int, allowed: Sequence[Any]) -> None:
    """Raises ConfigError if operations of the graph from number `begin` on change a variable that is not allowed."""
    if tf.executing_eagerly():
        return
    graph: Any = tf.compat.v1.get_default_graph()
    handles = {id(variable.value.handle) for variable in allowed}
    names = {id(variable.value.handle): variable.path for variable in _all_variables(model)}
    for operation in graph.get_operations()[begin:]:
        for tensor in _changed_by(graph, operation):
            handle = id(_outermost(graph, tensor))
            if handle not in handles:
                name = names.get(handle, "a variable")
                raise ConfigError(f"{named(model)} changes {name} besides the update by its optimizer: {ADVICE}")


def _all_variables(model: keras.Model) -> list[Any]:
    slots = [variable for optimizer in hvd.optimizers_of(model) for variable in optimizer.variables]
    return [*model.variables, *model.metrics_variables, *slots]


def _outermost(graph: Any, tensor: Any) -> Any:
    """The tensor outside of all graphs for which a tensor of a graph stands."""
    while graph is not None and not hasattr(tensor, "numpy"):
        found = next((outside for outside, inside in getattr(graph, "captures", ()) if inside is tensor), None)
        if found is None:
            return tensor
        tensor, graph = found, graph.outer_graph
    return tensor


def _changed_by(graph: Any, operation: Any) -> Iterator[Any]:
    """Handles of variables that an operation changes, or a function that it calls."""
    handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
    if operation.type.startswith(CHANGES):
        yield handles[0]
        return
    for attribute in ("f", "then_branch", "else_branch", "body"):
        called = operation.node_def.attr.get(attribute) if handles else None
        name = called.func.name if called is not None and called.HasField("func") else ""
        if name and any(node.op.startswith(CHANGES) for node in graph._get_function(name).cached_definition.node_def):
            yield from handles
