"""A model in consecutive stages on the devices of a rank, with micro-batches (Huang et al. 2018, arXiv 1811.06965)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from ringtrain.hvd.collectives import tensor_of
from ringtrain.hvd.keras_patches import innermost, optimizers_of, set_untracked
from ringtrain.hvd.model_parallel.columns import columns_of, divide, nbytes, nodes_of, refuse_optimizer
from ringtrain.hvd.train_step import wrap

FUSED = tuple(getattr(keras.layers, name) for name in ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax"))
"""layers that TensorFlow computes together with the one before, with other last bits: they stay in its stage"""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model, on one device."""

    device: str
    model: keras.Model
    """from the stage's input, or the model's inputs, to the next stage's input, or the model's outputs"""

    @property
    def layers(self) -> list[keras.Layer]:
        """Its layers, without inputs."""
        return [layer for layer in self.model.layers if not isinstance(layer, keras.layers.InputLayer)]

    def __call__(self, tensors: Any, training: bool | None = None) -> Any:
        with tf.device(self.device):
            return self.model(tensors, training=training)

    def added_loss(self) -> Any:
        """Sum of the losses that its layers add, of weights and activations; None: of none."""
        losses: list[Any] = []
        for layer in self.layers:
            losses += layer.losses
        if not losses:
            return None
        return tf.add_n([tf.convert_to_tensor(loss) for loss in losses])

    def bytes_of(self) -> tuple[int, int]:
        """Bytes of its weights, and of one row of its layers' outputs."""
        weights = sum(nbytes(weight.shape, weight.dtype) for weight in self.model.weights)
        return weights, sum(_row_bytes(node) for node in nodes_of(self.model) if not node.is_input)


def split(
    model: keras.Model,
    layers: int = 1,
    micro_batches: int = 1,
    columns: int = 1,
) -> list[Stage]:
    """Splits a model over several devices, in place: into consecutive stages, or its layers into parts.

    The devices are the GPUs of this process, or its logical CPUs. The weights move to them; `fit`, `evaluate` and
    `predict` run there. A step cuts its batch into micro-batches, so that stages work at the same time, and makes one
    update with the mean of their gradients, as `gradient_accumulation_steps` does. Weights are those of the unsplit
    model with the same micro-batches, bit for bit. Batch normalization takes the statistics of a micro-batch.

        model = build()                         # under tf.device("CPU"), if no device can hold it
        hvd.split(model, layers=2, micro_batches=4)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")

    Args:
        model: Built functional or sequential model, not compiled yet.
        layers: Number of stages, which are cut where they have most nearly as many bytes: those of weights, gradients
            and two slots, and of the outputs of 32 rows.
        micro_batches: Number of parts of each batch; a batch must have at least as many rows.
        columns: Number of parts of each Dense, Conv and Embedding layer, in place of stages: output columns, or the
            input rows that belong to the columns of the layer before. Outputs are joined or added up, so weights are
            equal to those of the unsplit model but for rounding. `hvd.whole_variables(model.weights)` shows them as
            the unsplit model has them, as checkpoints and `model.save` do. Optimizers must update each value of a
            weight by itself, as SGD, Adam, AdamW, RMSprop and Lion do.

    Returns:
        The stages.

    Raises:
        ValueError: The model is subclassed, has a `train_step` of its own, or too few places at which one tensor is all
            that the next layers need; or there are fewer devices than stages.
    """
    functional = _functional_of(model)
    if columns > 1 and layers > 1:
        raise ValueError("split: got layers and columns: choose one")
    devices = own_devices(max(layers, columns))
    parts = stages_of(functional, layers, devices[:layers])
    for stage in parts:
        for variable in stage.model.variables:
            move(variable, stage.device)
    if columns > 1:
        divide(functional, devices)
    step = Step(model, parts, micro_batches)
    set_untracked(model, call=step.call, ringtrain_stages=parts)
    wrap(model, "micro-batches", lambda _: step.train_step)
    return parts


def _functional_of(model: keras.Model) -> Functional:
    """Functional model of a built functional or sequential model; raises ValueError if it cannot be split."""
    kind = type(model).__name__
    if not isinstance(model, keras.Sequential) and not hasattr(model, "_nodes_by_depth"):
        raise ValueError(f"split: {kind} is a class of its own: build a functional or sequential model")
    calls = keras.Sequential.call, Functional.call
    if type(model).train_step is not keras.Model.train_step or type(model).call not in calls:
        raise ValueError(f"split: {kind} has a train_step or call of its own, which cannot be taken apart")
    if hasattr(model, "ringtrain_stages"):
        raise ValueError(f"split: {model.name} is split already")
    if model.compiled and any(optimizer.built for optimizer in optimizers_of(model)):
        raise ValueError("split: the optimizer has slots already, which would not lie beside the weights: split before")
    functional = model._functional if isinstance(model, keras.Sequential) else model
    if functional is None:
        raise ValueError("split: the model is not built: give it an Input, or call build")
    return functional


def own_devices(number: int) -> list[str]:
    """Names of this process' first logical devices."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    kind = devices[0].device_type
    if len(devices) < number:
        raise ValueError(f"split: needs {number} devices, this process has {len(devices)} of kind {kind}")
    return [f"{kind}:{index}" for index in range(number)]


def stages_of(model: keras.Model, number: int, devices: Sequence[str]) -> list[Stage]:
    """Stages of a functional model, of similar size."""
    nodes = nodes_of(model)
    cuts = places_to_cut(nodes, model.outputs)
    if len(cuts) < number - 1:
        names = ", ".join(nodes[index].operation.name for index in cuts)
        raise ValueError(f"split: {number} stages, but the model can be cut at {len(cuts)} places: {names}")
    chosen = balanced([cost_of(node) for node in nodes], [*cuts], number)
    # A stage ends where the next one begins.
    edges = [model._inputs_struct, *(cuts[index] for index in chosen), model._outputs_struct]
    models = map(keras.Model, edges[:-1], edges[1:])
    return [Stage(device, part) for device, part in zip(devices, models, strict=True)]


def places_to_cut(nodes: Sequence[Any], outputs: Sequence[Any]) -> dict[int, Any]:
    """Numbers of nodes in front of which one tensor holds all that the following nodes need, and that tensor."""
    cuts = {}
    results = {id(tensor) for tensor in keras.tree.flatten(outputs)}
    for index in range(1, len(nodes)):
        before, after = nodes[:index], nodes[index:]
        if any(node.is_input for node in after) or isinstance(nodes[index].operation, FUSED):
            continue
        if {id(node.operation) for node in before} & {id(node.operation) for node in after}:
            continue
        tensors: dict[int, Any] = {}
        inputs: set[int] = set()
        for node in before:
            tensors |= {id(tensor): tensor for tensor in node.output_tensors}
            if node.is_input:
                inputs |= {id(tensor) for tensor in node.output_tensors}
        needed: set[int] = set()
        for node in after:
            needed |= {id(tensor) for tensor in node.input_tensors if id(tensor) in tensors}
        if len(needed) == 1 and not needed & inputs and not results & tensors.keys():
            cuts[index] = tensors[needed.pop()]
    return cuts


def cost_of(node: Any) -> int:
    """Bytes that training needs for a node: weight, gradient and two slots, and the outputs of 32 rows."""
    weights = getattr(node.operation, "weights", ())
    return 4 * sum(nbytes(weight.shape, weight.dtype) for weight in weights) + 32 * _row_bytes(node)


def _row_bytes(node: Any) -> int:
    """Bytes of one row of a node's outputs."""
    return sum(nbytes(tensor.shape[1:], tensor.dtype) for tensor in node.output_tensors)


def balanced(costs: Sequence[int], cuts: Sequence[int], number: int) -> list[int]:
    """The number - 1 cuts that are nearest to equal sums of costs between them."""
    until = [0, *itertools.accumulate(costs)]
    chosen: list[int] = []
    for stage in range(1, number):
        ideal = until[-1] * stage / number
        # Cuts after the last one that is chosen, but for those that the following stages need.
        left = [cut for cut in cuts if cut > max(chosen, default=0)]
        left = left[: len(left) - (number - 1 - stage)]
        chosen.append(min(left, key=lambda cut: abs(until[cut] - ideal)))
    return chosen


def move(variable: keras.Variable, device: str) -> None:
    """Puts a weight, which no graph may have used, on another device."""
    old = variable._value
    with tf.device(device):
        variable._value = tf.Variable(old.value(), trainable=old.trainable, dtype=old.dtype, name=variable.name)


def cut_rows(tensors: Any, begin: Any, end: Any) -> Any:
    """Rows of each tensor of a structure; None stays None."""
    if tensors is None:
        return None
    return keras.tree.map_structure(lambda tensor: tensor[begin:end], tensors)


def _marker(tensor: Any) -> Any:
    """A value that exists when the tensor does. As a control input the tensor itself would not be fused with others."""
    with tf.device(tensor.device):
        return tf.reshape(tensor, [-1])[:1]


@dataclass
class MicroBatch:
    """A micro-batch: by stage its tape, input, and the tensors that have gradients."""

    x: Any
    y: Any
    sample_weight: Any
    share: Any
    """of the rows of the batch"""
    tapes: list[Any] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    targets: list[list[Any]] = field(default_factory=list)
    outputs: Any = None
    loss: Any = None
    gradients: list[list[Any]] = field(default_factory=list)
    """of the stages' inputs, from the last stage on"""


@dataclass(frozen=True)
class Step:
    """Forward pass and training step of a model in stages."""

    model: keras.Model
    stages: Sequence[Stage]
    num_parts: int

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Forward pass of the model."""
        for stage in self.stages:
            inputs = stage(inputs, training)
        return inputs

    def train_step(self, data: Any) -> Any:
        """A step of Keras: gradients of the micro-batches, and one update."""
        model = self.model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred, loss, gradients = self.gradients(x, y, sample_weight)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def gradients(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, list[Any]]:
        """Outputs, loss, and gradients of the trainable weights."""
        self._prepare_optimizer()
        num_rows = tf.shape(keras.tree.flatten(x)[0])[0]
        if self.num_parts > 1:
            tf.debugging.assert_greater_equal(num_rows, self.num_parts, "a batch has fewer rows than micro-batches")
        parts = [self._part(index, (x, y, sample_weight), num_rows) for index in range(self.num_parts)]
        total: dict[int, Any] = {}
        after: list[list[Any]] = [[] for _ in self.stages]
        # A device would else run micro-batches in any order, and the next stage wait.
        for part in parts:
            for number, stage in enumerate(self.stages):
                with tf.device(stage.device), tf.control_dependencies(after[number]):
                    after[number] = self._forward(part, number)
        for part in parts:
            for number, stage in reversed([*enumerate(self.stages)]):
                with tf.device(stage.device), tf.control_dependencies(after[number]):
                    after[number] = self._backward(part, number, total)
        y_pred = parts[0].outputs
        if self.num_parts > 1:
            outputs = [part.outputs for part in parts]
            y_pred = keras.tree.map_structure(lambda *tensors: tf.concat(tensors, 0), *outputs)
        loss = tf.add_n([part.loss for part in parts])
        return y_pred, loss, [total[id(variable)] for variable in self.model.trainable_variables]

    def _part(self, index: int, data: Sequence[Any], num_rows: Any) -> MicroBatch:
        begin = num_rows * index // self.num_parts
        end = num_rows * (index + 1) // self.num_parts
        share: Any = 1.0
        if self.num_parts > 1:
            share = tf.cast(end - begin, tf.float64) / tf.cast(num_rows, tf.float64)
        x, y, sample_weight = (cut_rows(tensors, begin, end) for tensors in data)
        return MicroBatch(x, y, sample_weight, share)

    def _forward(self, part: MicroBatch, number: int) -> list[Any]:
        """Forward pass of a micro-batch through a stage; returns tensors that exist when it has ended."""
        scale: Callable[[Any], Any] = self.model.optimizer.scale_loss
        stage = self.stages[number]
        tensors = part.targets[-1][0] if number else part.x
        # A tape per stage: a single one would run the whole backward pass on the first device.
        with tf.GradientTape() as tape:
            if number:
                tensors = tf.identity(tensors)
                if tensors.dtype.is_floating:
                    tape.watch(tensors)
            part.entries.append(tensors)
            tensors = stage(tensors, training=True)
            if stage is self.stages[-1]:
                loss = self.model._compute_loss(
                    x=part.x, y=part.y, y_pred=tensors, sample_weight=part.sample_weight, training=True
                )
                part.outputs = tensors
                part.loss = loss * tf.cast(part.share, loss.dtype)
                part.targets.append([scale(part.loss)])
            else:
                part.targets.append([tensors])
                added = stage.added_loss()
                if added is not None:
                    part.targets[-1].append(scale(added * tf.cast(part.share, added.dtype)))
        part.tapes.append(tape)
        return [_marker(tensor) for tensor in part.targets[-1]]

    def _backward(self, part: MicroBatch, number: int, total: dict[int, Any]) -> list[Any]:
        """Backward pass of a micro-batch through a stage; adds its gradients to those of earlier ones, by weight."""
        variables = self.stages[number].model.trainable_variables
        sources = [variable.value for variable in variables]
        if number:
            sources.append(part.entries[number])
        # The next stage has the gradient of the output; that of an added loss is 1.
        targets = part.targets[number]
        flows = list(part.gradients[-1]) if part.gradients else []
        flows += [tf.ones_like(target) for target in targets[len(flows) :]]
        gradients = part.tapes[number].gradient(targets, sources, output_gradients=flows)
        sums = []
        for variable, gradient in zip(variables, gradients, strict=False):
            key = id(variable)
            if gradient is not None and self.num_parts > 1:
                gradient = tf.convert_to_tensor(gradient)  # of an embedding's rows
                if total.get(key) is not None:
                    gradient = total[key] + gradient
            total[key] = gradient
            if gradient is not None:
                sums.append(gradient)
        part.gradients.append(gradients[len(variables) :])
        ended = [_marker(gradient) for gradient in part.gradients[-1] if gradient is not None]
        return [*ended, *sums]

    def _prepare_optimizer(self) -> None:
        """Puts slots and update arithmetic on the devices of their weights."""
        for optimizer in optimizers_of(self.model):
            inner = innermost(optimizer)
            if hasattr(inner, "ringtrain_update_step"):
                continue
            with tf.init_scope():
                if columns_of(self.model):
                    refuse_optimizer(optimizer)
                if not optimizer.built:
                    optimizer.build(self.model.trainable_variables)
            update_step = inner.update_step
            set_untracked(inner, ringtrain_update_step=update_step, update_step=_beside_weights(update_step))


def _beside_weights(update_step: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's update of one weight, on the device of the weight."""

    def update(gradient: Any, variable: Any, rate: Any) -> None:
        with tf.device(tensor_of(variable).device):
            update_step(gradient, variable, rate)

    return update
