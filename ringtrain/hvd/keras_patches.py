"""Private API of Keras: patches of four functions for distributed optimizers, `jit_gradients`, and queries.

Keras has no hooks in these places. Its functions are therefore replaced once per process. The replacements behave the
same unless the optimizer is distributed or, for the choice of XLA, there are several ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.saving import object_registration
from keras.src.trainers import trainer

from ringtrain.errors import RingtrainError
from ringtrain.hvd.backend import horovod
from ringtrain.hvd.process import elastic
from ringtrain.hvd.train_step import has_layer, is_own, wrap

WEIGHTS = ("_trainable_variables", "_updated_variables", "_self_")
"""how the names of an optimizer's attributes begin that hold what it updates: the last ones are TensorFlow's copies"""
SUPPORTS_JIT = trainer.model_supports_jit
"""Keras' own function, before it is replaced"""


@functools.cache
def teach_keras() -> None:
    """Replaces the four functions, once."""
    trainer.model_supports_jit = _reducing_without_jit(SUPPORTS_JIT)
    trainer.Trainer._resolve_auto_jit_compile = _no_jit_by_itself(trainer.Trainer._resolve_auto_jit_compile)
    optimizer_class = keras.optimizers.LossScaleOptimizer
    optimizer_class.check_finite = _finite_on_all_ranks(optimizer_class.check_finite)
    optimizer_class.apply = _reducing_first(optimizer_class.apply)


def ranks_reduce() -> bool:
    """Returns whether gradients are reduced over several ranks in this process, or may be later."""
    return horovod.is_initialized() and (horovod.size() > 1 or elastic())


def _reducing_without_jit(model_supports_jit: Any) -> Any:
    """Turns off XLA, which has no kernel for Horovod's allreduce; Keras warns about `compile(jit_compile=True)`."""

    def supports_jit(model: Any) -> bool:
        optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
        reduces = ranks_reduce() and any(map(distributed, optimizers))
        return not reduces and model_supports_jit(model)

    return supports_jit


def _no_jit_by_itself(resolve_auto: Any) -> Any:
    """Turns off automatic XLA: on GPUs `compile` enables it, not knowing whether a train_step reduces gradients."""

    def without_jit(self: Any) -> bool:
        return not ranks_reduce() and bool(resolve_auto(self))

    return without_jit


def _finite_on_all_ranks(check_finite: Any) -> Any:
    """Skips a step with overflowing gradients on all ranks: else the other ranks would wait in their allreduce."""

    @functools.wraps(check_finite)
    def finite_everywhere(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        if distributed(self):
            return innermost(self).agree_on_finite(finite)
        return finite

    return finite_everywhere


def _reducing_first(apply: Any) -> Any:
    """Reduces gradients before `apply`, whose branch waits until all gradients are checked for overflow."""
    # Each gradient is thus sent as soon as it is computed, and the check also finds a sum that overflows. With gradient
    # accumulation only the update communicates, so its gradients are reduced in the branch.

    def apply_reduced(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = innermost(self)
        if not distributed(self) or inner.accumulates() or inner._reduced_before:
            apply(self, grads, trainable_variables)
            return
        inner.refuse_loss_scale()
        grads, variables = list(grads), list(trainable_variables or inner._trainable_variables)
        grads = inner.reduce_given(inner.weighted(grads, variables), variables)
        with inner.reduced_before():
            apply(self, grads, variables)

    return apply_reduced


def distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer, or the one inside a `LossScaleOptimizer`, reduces gradients over the ranks."""
    return reduction_of(optimizer) is not None


def refuse_horovods_own(optimizer: Any) -> None:
    """Raises ValueError for an optimizer made by Horovod's `DistributedOptimizer`."""
    if hasattr(innermost(optimizer), "_allreduce_grads"):
        raise ValueError(
            f"{type(optimizer).__name__} was wrapped by Horovod's own DistributedOptimizer, which averages nothing "
            "under Keras 3: import ringtrain.hvd as hvd, and wrap it with hvd.DistributedOptimizer"
        )


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer that updates variables: the one given, or the one inside a `LossScaleOptimizer`."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def reduction_of(optimizer: Any) -> Any:
    """Returns the reduction of a distributed optimizer, also inside a `LossScaleOptimizer`; None: of another one."""
    return getattr(innermost(optimizer), "reduction", None)


def compiled_optimizer(model: keras.Model) -> Any:
    """Returns the optimizer with which a model was compiled; None before `compile`, which creates the attribute."""
    return getattr(model, "optimizer", None)


def compiled_losses(model: keras.Model) -> list[Any]:
    """Returns the compiled losses with their names; none if the model's step has not used them."""
    if model._compile_loss is None:
        return []
    return list(model._compile_loss._flat_losses or [])


def optimizers_of(model: keras.Model, optimizer: Any = None) -> list[Any]:
    """Returns the optimizer with which a model was compiled, and those in its attributes, such as those of a GAN.

    `optimizer` takes the place of the compiled one.
    """
    compiled = compiled_optimizer(model)
    if optimizer is None:
        optimizer = compiled
    held: list[Any] = [optimizer]
    for value in vars(model).values():
        if isinstance(value, dict):
            held += value.values()
        elif isinstance(value, list | tuple):
            held += value
        else:
            held.append(value)
    if optimizer is not compiled:
        held = [value for value in held if value is not compiled]
    optimizers = [value for value in held if isinstance(value, keras.optimizers.Optimizer)]
    return list({id(value): value for value in optimizers}.values())


def slots_of(model: keras.Model, optimizer: Any = None) -> list[Any]:
    """Returns the variables of all `optimizers_of` a model, also those that Keras does not track."""
    found: dict[int, Any] = {}
    weights = {id(variable) for variable in model.variables}
    for held in optimizers_of(model, optimizer):
        found |= {id(variable): variable for variable in held.variables}
        # Variables of TensorFlow, or of an optimizer within another one, as Nadam's are in a `LossScaleOptimizer`.
        found |= {id(variable): variable for variable in _variables_in(held, set()) if id(variable) not in weights}
    return list(found.values())


def _variables_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the variables that an optimizer keeps in attributes, containers and optimizers within it, but weights."""
    if isinstance(value, tf.Variable | keras.Variable):
        yield value
        return
    parts: Any = ()
    if isinstance(value, keras.optimizers.Optimizer):
        parts = [part for name, part in vars(value).items() if not name.startswith(WEIGHTS)]
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    if id(value) in seen:
        return
    seen.add(id(value))
    for part in parts:
        yield from _variables_in(part, seen)


def has_schedule(optimizer: Any) -> bool:
    """Returns whether the learning rate of an optimizer is a `LearningRateSchedule`."""
    return isinstance(innermost(optimizer)._learning_rate, keras.optimizers.schedules.LearningRateSchedule)


def velocities(optimizer: Any) -> list[Any]:
    """Variables of an SGD or RMSprop that contain its momentum."""
    slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [velocity for velocity in slots if velocity is not None]


def path_of(variable: Any) -> str:
    """Path of a variable of Keras, or name of one of TensorFlow."""
    if hasattr(variable, "path"):
        return str(variable.path)
    return str(variable.name)


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """All layers of a model, including those of models nested in it."""
    return list(model._flatten_layers())


def metrics_of(model: keras.Model) -> list[Any]:
    """Metrics of a model besides those of its loss; those of `compile` one by one."""
    compiled, of_loss = model._compile_metrics, model._compile_loss
    excluded = [model._loss_tracker, compiled]
    if of_loss:
        excluded += of_loss.metrics
    ids = {id(metric) for metric in excluded}
    metrics = [metric for metric in model.metrics if id(metric) not in ids]
    if compiled:
        metrics += compiled.metrics
    return metrics


def metrics_of_script(model: keras.Model) -> list[str]:
    """Names of metrics that are no class of Keras; the states of all of Keras' are sums over rows."""
    return [metric.name for metric in metrics_of(model) if not type(metric).__module__.startswith("keras.")]


def has_weights(model: keras.Model) -> bool:
    """Returns whether a model has all its weights: it is built, or all its layers are, as in a GAN without `call`."""
    if model.built:
        return True
    layers = [layer for layer in layers_of(model) if layer is not model]
    return bool(model.weights) and all(layer.built for layer in layers)


def non_trainable_variables_made_by(layer: keras.Layer) -> list[Any]:
    """Variables that a layer has created as non-trainable; not those that `trainable = False` freezes."""
    return list(layer._non_trainable_variables)


def saved_as_its_base(mixin: type, base: type, attributes: Mapping[str, Any]) -> type:
    """Returns a subclass of `mixin` and `base` with base's name, module and registration, saved as a plain `base`."""
    public = api_export.get_name_from_symbol(base)  # such as keras.optimizers.Adam
    module = public.rpartition(".")[0] if public else base.__module__
    names = {"__module__": module, "__qualname__": base.__qualname__}
    subclass = type(base.__name__, (mixin, base), {**names, **attributes})
    registered = object_registration.get_registered_name(base)
    if registered != base.__name__:
        object_registration.GLOBAL_CUSTOM_NAMES[subclass] = registered
    return subclass


def set_untracked(owner: Any, **values: Any) -> None:
    """Sets attributes of a model, layer, metric or optimizer that Keras neither tracks nor saves."""
    vars(owner).update(values)


@contextlib.contextmanager
def replaced(objects: Sequence[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Context in which objects have other attributes, behind Keras' tracking of attributes."""
    before = []
    for changed, values in objects:
        attributes = vars(changed)
        before.append({name: attributes[name] for name in values if name in attributes})
    try:
        for changed, values in objects:
            vars(changed).update(values)
        yield
    finally:
        for (changed, values), kept in zip(objects, before, strict=True):
            for name in values:
                vars(changed).pop(name, None)
            vars(changed).update(kept)


@contextlib.contextmanager
def assigned_weights(weights: Sequence[Any], note: Callable[[Any], None]) -> Iterator[None]:
    """Context that notes the weights of a model which its code assigns; optimizers assign TensorFlow's variables."""

    def noting(weight: Any) -> Any:
        assign = weight.assign

        def assign_noted(value: Any) -> Any:
            note(weight)
            return assign(value)

        return assign_noted

    with replaced([(weight, {"assign": noting(weight)}) for weight in weights]):
        yield


def set_class(owner: Any, kind: type) -> None:
    """Gives an object another class, which Keras and TensorFlow would else track as an attribute."""
    object.__setattr__(owner, "__class__", kind)


def make_plain(changed: Any, mixin: type) -> None:
    """Gives an object whose class is from `saved_as_its_base` the class that it had before."""
    kind = type(changed)
    set_class(changed, next(one for one in kind.__mro__ if not issubclass(one, mixin)))


def jit_gradients(model: keras.Model) -> None:
    """Makes a model's train_step compute outputs, loss and gradients in one function compiled by XLA.

    Reduction, clipping, update and metrics stay outside of that function, and evaluation is unchanged. XLA orders sums
    differently, so results equal those without XLA up to rounding.

    Args:
        model: Model, before or after `compile(jit_compile=False)`.

    Raises:
        RingtrainError: The model overrides train_step, a layer does not support XLA, or Keras does not (macOS, or op
            determinism).
    """
    if is_own(model):
        raise RingtrainError(
            f"jit: {type(model).__name__} has a train_step of its own, which cannot be taken apart around the"
            " allreduce: leave train_step to Keras, or train without jit"
        )
    if has_layer(model, "micro-batches"):
        raise RingtrainError("jit: the model is split, and its stages are not compiled: leave out one of them")
    layer = next((layer for layer in layers_of(model) if not layer.supports_jit), None)
    if layer is not None:
        raise RingtrainError(
            f"jit: Keras says that layer {layer.name} ({type(layer).__name__}) does not support XLA: train without jit"
        )
    if not SUPPORTS_JIT(model):
        raise RingtrainError("jit: Keras does not support XLA here (macOS, or op determinism is on): train without jit")

    @tf.function(jit_compile=True, reduce_retracing=True, autograph=False)
    def forward_and_backward(x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            if model._call_has_training_arg:
                outputs = model(x, training=True)
            else:
                outputs = model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        return outputs, loss, tape.gradient(scaled, model.trainable_weights)

    def train_step(data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs, loss, gradients = forward_and_backward(x, y, sample_weight)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return model.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    wrap(model, "jit", lambda _: train_step)
