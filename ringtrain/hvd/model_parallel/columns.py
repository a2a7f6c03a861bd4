"""Kernels of layers in parts on the devices of a rank, as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).

A divided layer has a layer of its own kind per device, with a part of its output columns. If the next layer alone uses
its output, that one has the parts of the input rows that belong to these columns, and the outputs are added up: between
the two, each device keeps what it computed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.convolutional.base_conv import BaseConv

from ringtrain.hvd.keras_patches import innermost, path_of, set_untracked

ELEMENTWISE = {
    getattr(keras.activations, name) for name in ("linear", "relu", "gelu", "silu", "elu", "selu", "sigmoid", "tanh")
}
"""activations that the parts apply; others see the whole output"""
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")
"""those that update each number of a weight by itself"""
PART = re.compile(r"_(columns|rows)\d+of\d+(?=[/_])")
"""in the path of a part's weights, and of their slots"""
SIZES = {keras.layers.Dense: "units", keras.layers.Embedding: "output_dim", BaseConv: "filters"}
"""layers that can be divided, and the argument that is their number of columns"""
WEIGHTS = {"kernel": "_kernel", "bias": "bias", "embeddings": "_embeddings"}
"""name of a weight, and the attribute of a layer that holds it"""


@dataclass(frozen=True)
class Division:
    """A layer in parts."""

    layer: keras.Layer
    parts: Sequence[keras.Layer]
    devices: Sequence[str]
    by_rows: bool
    """whether the parts have input rows of the kernel; else output columns"""
    activation: Callable[[Any], Any] | None
    """of the layer, if it must see the whole output; else the parts apply it"""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Forward pass of the divided layer."""
        # A layer in columns has left its outputs on their devices.
        part_inputs = [inputs] * len(self.parts)
        if self.by_rows:
            lengths = [part.kernel.shape[-2] for part in self.parts]
            part_inputs = getattr(inputs, "ringtrain_parts", None) or tf.split(inputs, lengths, axis=-1)
        outputs = []
        for part, device, part_input in zip(self.parts, self.devices, part_inputs, strict=True):
            outputs.append(on_device(part, device, part_input))
        with tf.device(self.devices[0]):
            if self.by_rows:
                output = tf.add_n(outputs)
            else:
                output = tf.concat(outputs, axis=-1)
            if self.activation is not None:
                return self.activation(output)
        if not self.by_rows:
            output.ringtrain_parts = outputs
        return output

    def whole(self) -> list[Any]:
        """Weights of the undivided layer."""
        weights = []
        for part in self.parts:
            weights += part.weights
        return whole_variables(weights)

    def save(self, store: Any) -> None:
        """Takes the place of the layer's `save_own_variables`."""
        for index, weight in enumerate(self.whole()):
            store[str(index)] = weight.numpy()

    def load(self, store: Any) -> None:
        """Takes the place of the layer's `load_own_variables`."""
        for index, weight in enumerate(self.whole()):
            weight.assign(np.asarray(store[str(index)]))


@dataclass(frozen=True)
class Whole:
    """Weights of parts, or their slots, as the variable of the undivided layer."""

    parts: Sequence[Any]
    path: str
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> str:
        return str(self.parts[0].dtype)

    def read_value(self) -> Any:
        """The whole value, in the host's memory."""
        with tf.device("CPU:0"):
            return tf.concat([part.value.read_value() for part in self.parts], self.axis)

    def numpy(self) -> Any:
        return self.read_value().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Sets each part to its share of an array of the whole shape."""
        begin = 0
        for part in self.parts:
            end = begin + part.shape[self.axis]
            part.assign(value[(slice(None),) * self.axis + (slice(begin, end),)])
            begin = end


def is_part(layer: keras.Layer) -> bool:
    """Returns whether a layer is a part of a divided one."""
    return PART.search(f"{layer.name}/") is not None


def whole_variables(variables: Sequence[Any]) -> list[Any]:
    """Variables as the undivided model has them: those of parts are joined, in the place of the first."""
    parts_of: dict[Any, list[Any]] = {}
    for variable in variables:
        key: Any = id(variable)
        if PART.search(path_of(variable)):
            key = PART.sub("", path_of(variable))
        parts_of.setdefault(key, []).append(variable)
    joined = []
    for key, parts in parts_of.items():
        if isinstance(key, str):
            joined.append(Whole(parts, key, _axis(parts[0])))
        else:
            joined.append(parts[0])
    return joined


def _axis(part: Any) -> int:
    """Axis along which the parts of a variable are joined."""
    rank = len(part.shape)
    kind = PART.search(part.path)
    if kind and kind[1] == "columns":
        return rank - 1
    return max(rank - 2, 0)


def nodes_of(model: keras.Model) -> list[Any]:
    """Calls of a functional model's layers, from inputs to outputs."""
    nodes = []
    for depth in sorted(model._nodes_by_depth, reverse=True):
        nodes += model._nodes_by_depth[depth]
    return nodes


def nbytes(shape: Sequence[int | None], dtype: str) -> int:
    """Bytes of a tensor; unknown lengths count as 1."""
    return math.prod(length or 1 for length in shape) * tf.as_dtype(dtype).size


def divide(model: keras.Model, devices: Sequence[str]) -> None:
    """Divides the layers of a functional model that can be divided, in place."""
    nodes = nodes_of(model)
    uses: Counter[int] = Counter()  # of each tensor
    for node in nodes:
        uses.update(id(tensor) for tensor in node.input_tensors)
    uses.update(id(tensor) for tensor in keras.tree.flatten(model.outputs))
    calls = Counter(id(node.operation) for node in nodes)
    divisions: dict[int, Division] = {}  # by the tensor that is their output
    for node in nodes:
        layer = node.operation
        argument = size_argument(layer)
        if not argument or calls[id(layer)] > 1 or getattr(layer, argument) < len(devices):
            continue
        (tensor,) = node.input_tensors
        # The columns of the layer before stay where they are, if this layer alone uses them as they are.
        before = divisions.get(id(tensor))
        if before and (before.by_rows or before.activation is not None):
            before = None
        if uses[id(tensor)] > 1 or argument == "output_dim":
            before = None
        (output,) = node.output_tensors
        divisions[id(output)] = _divided(layer, argument, tensor.shape, before, devices)


def columns_of(model: keras.Model) -> dict[str, tuple[int, list[str]]]:
    """Bytes of weights, and the layers that have some, by device of a model with divided layers; else {}."""
    divisions = [getattr(layer, "ringtrain_division", None) for layer in model.layers]
    first = next(filter(None, divisions), None)
    if first is None:
        return {}
    num_bytes = dict.fromkeys(first.devices, 0)
    names: dict[str, list[str]] = {device: [] for device in first.devices}
    for layer, division in zip(model.layers, divisions, strict=True):
        name, parts = layer.name, [(first.devices[0], layer)]
        if division:
            kind = "rows" if division.by_rows else "columns"
            name, parts = f"{layer.name} ({kind})", list(zip(division.devices, division.parts, strict=True))
        for device, part in parts:
            if part.weights:
                num_bytes[device] += sum(nbytes(weight.shape, weight.dtype) for weight in part.weights)
                names[device].append(name)
    return {device: (num_bytes[device], names[device]) for device in first.devices}


def refuse_optimizer(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that does not update the parts of a weight as the whole."""
    optimizer = innermost(optimizer)
    if optimizer.clipnorm:
        raise ValueError("split: clipnorm needs the norms of whole weights: use global_clipnorm or clipvalue")
    if type(optimizer).__name__ not in OPTIMIZERS:
        raise ValueError(
            f"split: {type(optimizer).__name__} may use norms or products of whole weights, which columns divide:"
            f" use one of {', '.join(OPTIMIZERS)}"
        )


def size_argument(layer: Any) -> str:
    """Argument with the number of columns of a layer that can be divided; empty for others."""
    argument = next((name for kind, name in SIZES.items() if isinstance(layer, kind)), "")
    if not argument or not type(layer).__module__.startswith("keras."):
        return ""
    weights = {weight.name for weight in layer.weights}
    regularizers = [getattr(layer, f"{name}_regularizer", None) for name in WEIGHTS]
    constraints = [getattr(layer, f"{name}_constraint", None) for name in WEIGHTS]
    additive = keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2
    whole_only = (
        not weights <= WEIGHTS.keys()
        or any(constraint is not None for constraint in constraints)
        or any(regularizer is not None and not isinstance(regularizer, additive) for regularizer in regularizers)
        or getattr(layer, "groups", 1) > 1
        or getattr(layer, "data_format", "channels_last") != "channels_last"
        or layer.quantization_mode
    )
    return "" if whole_only else argument


def _divided(
    layer: Any, argument: str, shape: Sequence[int | None], before: Division | None, devices: Sequence[str]
) -> Division:
    """Divides a layer: by the columns of the layer before, or by its own."""
    kind = "rows" if before else "columns"
    activation = getattr(layer, "activation", None)
    is_late = activation is not None and (before is not None or activation not in ELEMENTWISE)
    values = {weight.name: weight.numpy() for weight in layer.weights}

    # A layer of the same kind on each device.
    count, size = len(devices), getattr(layer, argument)
    parts: list[Any] = []
    begin = 0
    for index, device in enumerate(devices):
        config = {**layer.get_config(), "name": f"{layer.name}_{kind}{index}of{count}"}
        if "activity_regularizer" in config:
            config["activity_regularizer"] = None
        if "mask_zero" in config:
            config["mask_zero"] = False
        if is_late:
            config["activation"] = None
        if before:
            length = before.parts[index].weights[0].shape[-1]
            config["use_bias"] = layer.use_bias and index == 0
            end, input_shape = begin + length, (*shape[:-1], length)
        else:
            end, input_shape = size * (index + 1) // count, tuple(shape)
            config[argument] = end - begin
        with tf.device(device):
            part = type(layer).from_config(config)
            part.build(input_shape)
        part.trainable = layer.trainable
        parts.append(part)
        begin = end

    # They take the place of the layer's own weights.
    layer._tracker.unlock()
    for name in WEIGHTS.values():
        if isinstance(getattr(layer, name, None), keras.Variable):
            delattr(layer, name)
            set_untracked(layer, **{name: None})
    layer._layers.extend(parts)
    layer._tracker.lock()
    division = Division(layer, parts, devices, before is not None, activation if is_late else None)
    for weight in division.whole():
        weight.assign(values[weight.path.rpartition("/")[2]])
    set_untracked(
        layer,
        call=division.call,
        save_own_variables=division.save,
        load_own_variables=division.load,
        ringtrain_division=division,
    )
    return division


def on_device(layer: keras.Layer, device: str, inputs: Any) -> Any:
    """Output of a layer that runs on a device in both directions: gradients do not follow operations by themselves."""

    @tf.custom_gradient
    def run(tensor: Any) -> Any:
        with tf.device(device), tf.GradientTape() as tape:
            if tensor.dtype.is_floating:
                tape.watch(tensor)
            output = layer(tensor)

        def backward(flow: Any, variables: Sequence[Any] = ()) -> Any:
            with tf.device(device):
                of_tensor, *of_variables = tape.gradient(output, [tensor, *variables], output_gradients=flow)
            if variables:
                return of_tensor, of_variables
            return of_tensor

        return output, backward

    with tf.device(device):
        return run(tf.identity(inputs))
