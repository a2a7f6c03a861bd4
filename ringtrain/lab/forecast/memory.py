"""ringtrain forecast --memory: bytes that a model needs on each device, from the graph of a step, which does not run.

ringtrain forecast --memory --ranks 8 -- --model.name resnet50 --data.name synthetic --train.batch-size 32
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtrain import config_io
from ringtrain.config import Config, with_values
from ringtrain.errors import ConfigError
from ringtrain.lab import ranks
from ringtrain.lab.tables import Table
from ringtrain.run import log_capture

if TYPE_CHECKING:
    import keras

SAME_MEMORY = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "ReadVariableOp"}
"""operations whose output is their input"""
IN_PLACE = {
    "Relu",
    "Relu6",
    "Tanh",
    "TanhGrad",
    "BiasAdd",
    "AddV2",
    "Add",
    "AddN",
    "Sub",
    "Mul",
    "RealDiv",
    "Neg",
}
"""operations that write their output into an input that nothing else needs"""


@dataclass(frozen=True)
class Need:
    """Bytes on a device."""

    way: str
    device: str
    weights: int
    slots: int
    gradients: int
    activations: int
    """outputs of the forward pass that the backward pass reads"""
    peak: int
    """weights, slots, and the most that a step needs at a time"""


def main(words: Sequence[str], num_ranks: int, num_devices: int, as_json: bool) -> int:
    """Prints what the model of the trainer's options needs."""
    if num_devices < 2:
        raise ConfigError(f"--devices: got {num_devices}, expected 2 or more")
    log_capture.watch()  # before TensorFlow is loaded, which logs messages
    found = forecast(config_io.read([*words]), num_ranks, num_devices)
    if as_json:
        print(json.dumps([dataclasses.asdict(need) for need in found], indent=1))
        return 0
    names = ("weights", "slots", "gradients", "activations", "peak")
    rows = []
    for need in found:
        sizes = [f"{getattr(need, name) / 1e6:,.1f}" for name in names]
        rows.append([need.way, need.device, *sizes])
    Table(["way", "device of a rank", *names], rows, "MB on each device of a rank").show()
    return 0


def forecast(config: Config, num_ranks: int, num_devices: int) -> list[Need]:
    """Memory of each way to train the model, by device of a rank."""
    from ringtrain import hvd
    from ringtrain.run import devices

    hvd.configure(config.hvd)
    hvd.init()
    devices.pin(0, 1, config.device, num_devices=num_devices)
    ring = needs(with_values(config, {"model.split": ""}), "ring")
    slots = math.ceil(ring[0].slots / num_ranks)
    sharded = dataclasses.replace(
        ring[0], way=f"sharded update, {num_ranks} ranks", slots=slots, peak=ring[0].peak - ring[0].slots + slots
    )
    found = [*ring, sharded]
    for split in (f"layers:{num_devices}", f"columns:{num_devices}"):
        try:
            found += needs(with_values(config, {"model.split": split}), split)
        except ConfigError as error:
            print(f"ringtrain: without {split}: {error}", file=sys.stderr)
    return found


def needs(config: Config, way: str) -> list[Need]:
    """Memory of a configured model by device."""
    import keras
    import tensorflow as tf

    keras.backend.clear_session(free_memory=True)
    training = ranks.Training.of(config)
    model = training.model(distributed=False)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    rows = config.train.batch_size
    batch = tf.nest.map_structure(
        lambda one: tf.TensorSpec([rows, *one.shape[1:]], one.dtype), training.batches().element_spec
    )
    graph = tf.function(lambda *data: model.train_step(data), autograph=False).get_concrete_function(*batch).graph
    first = (tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"))[0]
    return list(by_device(way, model, graph, f"{first.device_type}:0"))


def by_device(way: str, model: keras.Model, graph: Any, first: str) -> Iterator[Need]:
    """Memory of a model by device, from the graph of its training step."""
    weights, slots, gradients = Counter[str](), Counter[str](), Counter[str]()
    for variables, num_bytes in (
        (model.weights, weights),
        (model.optimizer.variables, slots),
        (model.trainable_variables, gradients),
    ):
        for variable in variables:
            num_bytes[device_of(variable.value, first)] += bytes_of(variable.value)
    most, kept = peaks(graph, first), peaks(graph, first, read_by_backward(graph))
    for device in sorted(weights | most):
        # Operations may run in another order, such that all gradients are there before an activation is free.
        step = max(most[device], kept[device] + gradients[device])
        peak = weights[device] + slots[device] + step
        yield Need(way, device, weights[device], slots[device], gradients[device], kept[device], peak)


def device_of(one: Any, first: str) -> str:
    """Device of an operation or variable, such as GPU:0."""
    found = re.search(r"(CPU|GPU):\d+$", one.device)
    return found[0] if found else first


def bytes_of(tensor: Any) -> int:
    """Bytes of a tensor; 0 if its shape is unknown, or it is a reference."""
    known = tensor.shape.rank is not None and tensor.shape.is_fully_defined()
    if known and tensor.dtype.is_numpy_compatible:
        return tensor.shape.num_elements() * tensor.dtype.size
    return 0


def holders(graph: Any) -> dict[int, Any]:
    """The tensor whose memory each tensor of a graph is in, by the tensor's id."""
    found: dict[int, Any] = {}
    for operation in graph.get_operations():
        for index, tensor in enumerate(operation.outputs):
            given = operation.inputs[index] if operation.type in SAME_MEMORY else tensor
            found[id(tensor)] = found.get(id(given), given)
    return found


def read_by_backward(graph: Any) -> set[int]:
    """Ids of the tensors that the backward pass reads from the forward pass."""
    holder, backward = holders(graph), set[str]()
    read: dict[int, Any] = {}
    for one in graph.get_operations():  # what a tape makes, and what follows from that
        if "gradient_tape" in one.name or any(tensor.op.name in backward for tensor in one.inputs):
            backward.add(one.name)
            read |= {id(holder[id(tensor)]): holder[id(tensor)] for tensor in one.inputs}
    return {key for key, tensor in read.items() if tensor.op.name not in backward}


def peaks(graph: Any, first: str, only: Container[int] | None = None) -> Counter[str]:
    """The most bytes by device that a step's tensors have at a time, if operations run in the order of the graph.

    only: ids of the tensors that count.
    """
    operations, holder = graph.get_operations(), holders(graph)
    last = {}
    for place, one in enumerate(operations):
        for tensor in one.inputs:
            last[id(holder[id(tensor)])] = place
    for tensor in graph.outputs:
        last[id(holder[id(tensor)])] = len(operations)
    ending: dict[int, list[int]] = {}
    for key, place in last.items():
        ending.setdefault(place, []).append(key)
    held: dict[int, tuple[int, str]] = {}
    now, most = Counter[str](), Counter[str]()
    for place, one in enumerate(operations):
        device = device_of(one, first)
        for tensor in one.outputs if one.type != "Const" else ():
            key, num_bytes = id(tensor), bytes_of(tensor)
            if holder[key] is not tensor or key not in last or (only is not None and key not in only):
                continue
            if only:
                taken = None
            else:
                taken = _taken_over(one, num_bytes, place, last, held, holder)
            if taken:
                held[key] = held.pop(taken)
            else:
                held[key] = num_bytes, device
                now[device] += num_bytes
        most |= now
        for key in ending.get(place, ()):
            if key in held:
                num_bytes, device = held.pop(key)
                now[device] -= num_bytes
    return most


def _taken_over(
    operation: Any,
    num_bytes: int,
    place: int,
    last: Mapping[int, int],
    held: Mapping[int, tuple[int, str]],
    holder: Mapping[int, Any],
) -> int | None:
    """Key of an input in whose memory an operation writes its output."""
    if operation.type not in IN_PLACE:
        return None
    for tensor in operation.inputs:
        key = id(holder[id(tensor)])
        if key in held and last[key] == place and held[key][0] == num_bytes:
            return key
    return None
