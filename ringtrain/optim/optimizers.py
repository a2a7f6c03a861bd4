"""Optimizers of ringtrain's own, and how the configured one is built with its schedule; names: config/sections.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from ringtrain.config.by_name import find
from ringtrain.config.derived import Numbers
from ringtrain.config.sections import OPTIMIZERS, Config
from ringtrain.optim.schedules import Schedule, schedule_of


@keras.saving.register_keras_serializable(package="ringtrain")
class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """A `Schedule` as a Keras schedule; `numbers`: its fields."""

    def __init__(self, **numbers: Any) -> None:
        self.schedule = Schedule(**{**numbers, "milestone_steps": tuple(numbers.get("milestone_steps", ()))})

    def __call__(self, step: Any) -> Any:
        # float32 cannot count beyond 2 ** 24.
        return ops.cast(self.schedule.rate(ops.cast(step, "float64"), ops), keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.schedule), "milestone_steps": list(self.schedule.milestone_steps)}


class _Momentum(keras.optimizers.Optimizer):
    """Base class of SGD and LARS: a velocity per variable, and weight decay as part of the gradient."""

    # Keras subtracts its `weight_decay` from the weights directly, so super().__init__ must not receive this one.
    def __init__(self, learning_rate: Any, momentum: float, weight_decay: float, **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        self.momentum = momentum
        self.decay = weight_decay

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")
        # update_step gets TensorFlow's variables, which do not have Keras' names.
        self.decayed = [is_decayed(variable) and self._use_weight_decay(variable) for variable in variables]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "momentum": self.momentum, "weight_decay": self.decay}


@keras.saving.register_keras_serializable(package="ringtrain")
class SGD(_Momentum):
    """Stochastic gradient descent as in Goyal et al. 2017 (arXiv 1706.02677), equations 8 and 9, with momentum m.

        v <- m * v + gradient + weight_decay * w
        w <- w - learning_rate * v                                       or, with Nesterov momentum,
        w <- w - learning_rate * (m * v + gradient + weight_decay * w)

    Keras' own SGD keeps the learning rate inside v (equation 10), where each change of the rate needs a momentum
    correction (section 3, remark 2), and subtracts weight decay from the weights, outside the momentum. At a constant
    rate and without decay both are the same. Biases and batch norm have no decay: see `is_decayed`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, weight_decay, **options)
        self.nesterov = nesterov

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        velocity = self.velocities[index]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)  # gradients of embeddings are sparse
        if self.decay and self.decayed[index]:
            gradient = gradient + self.decay * variable
        if not self.nesterov:  # one kernel that gives the same bits in half of the time
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle,
                accum=velocity.value.handle,
                lr=rate,
                grad=gradient,
                momentum=tf.constant(self.momentum, variable.dtype),
            )
            return
        self.assign(velocity, self.momentum * velocity + gradient)
        self.assign_sub(variable, rate * (self.momentum * velocity + gradient))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "nesterov": self.nesterov}


@keras.saving.register_keras_serializable(package="ringtrain")
class LARS(_Momentum):
    """Layer-wise adaptive rate scaling, You et al. 2017 (arXiv 1708.03888), algorithm 1, for very large batches.

    For the weights w of a layer and their gradient g, with momentum m:

        local <- trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v     <- m * v + learning_rate * local * (g + weight_decay * w)
        w     <- w - v

    Biases and batch norm (see `is_decayed`) have local = 1 and no decay. Weights that are all 0 have local = 1. Good
    learning rates are about 10 to 100 times those of SGD.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, momentum, weight_decay, **options)
        self.trust_coefficient = trust_coefficient

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        velocity = self.velocities[index]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)  # gradients of embeddings are sparse
        if self.decayed[index]:
            weight_norm, gradient_norm = tf.norm(variable), tf.norm(gradient)
            below = gradient_norm + self.decay * weight_norm
            usable = ops.logical_and(weight_norm > 0, below > 0)
            local = self.trust_coefficient * weight_norm / ops.where(usable, below, 1.0)
            rate = rate * ops.where(usable, local, 1.0)
            gradient = gradient + self.decay * variable
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "trust_coefficient": self.trust_coefficient}


def is_decayed(variable: Any) -> bool:
    """Returns whether weight decay (and LARS' adaptation) applies: not to vectors, scalars and biases."""
    # The name is compared because the biases of a recurrent layer are two in one matrix.
    return len(variable.shape) > 1 and variable.name != "bias"


def build(config: Config, numbers: Numbers, model: keras.Model) -> keras.optimizers.Optimizer:
    """Creates the configured optimizer, not yet distributed. Biases and normalization have no weight decay."""
    options = config.optimizer
    schedule = schedule_of(config, numbers)
    # A constant rate is a number: callbacks can set it, and a saved model does not need ringtrain.
    rate: Any = schedule.learning_rate
    if not schedule.is_constant:
        rate = LearningRate(**dataclasses.asdict(schedule))
    accumulation_steps = None
    if options.accumulation_steps > 1:
        accumulation_steps = options.accumulation_steps
    kind = OPTIMIZERS[options.name]
    optimizer: keras.optimizers.Optimizer = find("optimizer.name", kind.path, {})(
        **{name: getattr(options, name) for name in ("weight_decay", *kind.options)},
        learning_rate=rate,
        global_clipnorm=options.clip_norm or None,
        gradient_accumulation_steps=accumulation_steps,
    )
    optimizer.exclude_from_weight_decay([weight for weight in model.trainable_variables if not is_decayed(weight)])
    return optimizer


def with_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the optimizer with a learning rate: that in a LossScaleOptimizer, the first of a MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return next(iter(getattr(inner, "optimizers", ())), inner)


def first_and_largest_rate(optimizer: keras.optimizers.Optimizer) -> tuple[float, float]:
    """Learning rate of the first step, and if that is 0, as in a warm-up, the largest of steps 1, 2, ..., 2 ** 20."""
    rate = with_rate(optimizer)._learning_rate
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    if callable(rate) and not is_schedule and not isinstance(rate, keras.Variable):
        rate = rate()  # as Keras calls it, without the step

    def at(step: int) -> float:
        value = rate(step) if is_schedule else rate
        return float(f"{float(ops.convert_to_numpy(value)):.7g}")  # the digits of float32

    first = at(0)
    if first or not is_schedule:
        return first, first
    return first, max(at(2**exponent) for exponent in range(21))  # the same for any number of epochs


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of an optimizer's last step; `optimizer.learning_rate` is that of the next one."""
    optimizer = with_rate(optimizer)
    schedule = optimizer._learning_rate
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return float(schedule(max(0, int(optimizer._iterations.numpy()) - 1)))
    return float(np.asarray(optimizer.learning_rate))
