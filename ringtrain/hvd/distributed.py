"""Subclass that makes a Keras optimizer reduce its gradients.

It reduces in `_clip_gradients`, which Keras calls once per update, after gradients are accumulated and before they are
clipped, decayed and applied. Inside a `LossScaleOptimizer`, gradients are reduced earlier: see keras_patches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.errors import OutOfSync
from ringtrain.hvd.collectives import allreduce
from ringtrain.hvd.keras_patches import distributed, innermost, make_plain, reduction_of, saved_as_its_base, set_class
from ringtrain.hvd.powersgd import LowRank
from ringtrain.hvd.reduction import Reduction, weighed
from ringtrain.hvd.step_timing import PHASES


def distribute(optimizer: Any, reduction: Reduction, backward_passes: int) -> Any:
    """Makes an optimizer reduce, in place; `backward_passes` 1 keeps its `gradient_accumulation_steps`."""
    base = type(optimizer)
    mixin = _DistributedMulti if isinstance(optimizer, keras.optimizers.MultiOptimizer) else Distributed
    if backward_passes > 1:
        _accumulate(optimizer, backward_passes)
    attributes = {
        "reduction": reduction,
        "_local_keys": set(),
        "_reduced_before": [],
    }
    subclass = saved_as_its_base(mixin, base, attributes)
    set_class(optimizer, subclass)
    if optimizer.built:
        optimizer.add_state()
    return optimizer


def undistribute(optimizer: Any) -> None:
    """Makes an optimizer Keras' own again."""
    inner = innermost(optimizer)
    if not isinstance(inner, _Reducing):
        return
    reduction = inner.reduction
    for single in [inner, *getattr(inner, "_inner_optimizers", ())]:
        if getattr(single, "reduction", None) is not reduction:
            continue  # the script has made this part of a MultiOptimizer distributed
        for name in single.of_object:
            vars(single).pop(name, None)
        make_plain(single, _Reducing)
    vars(optimizer).pop("register_local_var", None)


def variables_of_one_rank(optimizer: Any) -> list[Any]:
    """Variables of an optimizer that may differ between ranks: accumulated gradients that are not reduced yet, errors.

    Errors are what a compression has not sent.
    """
    inner = innermost(optimizer)
    kept: list[Any] = []
    for single in getattr(inner, "optimizers", [inner]):
        kept += getattr(single, "_accumulated_gradients", None) or []
        if isinstance(single, _Reducing) and single.reducer:
            kept += single.reducer.of_one_rank()
    return kept


def average_accumulated(optimizer: Any) -> None:
    """Averages over the ranks the accumulated gradients, which are those of their rows until an update. Collective."""
    inner = innermost(optimizer)
    for single in getattr(inner, "optimizers", [inner]):
        for index, variable in enumerate(getattr(single, "_accumulated_gradients", None) or []):
            variable.assign(allreduce(variable.value, name=f"ringtrain_accumulated_{index}"))


def weigh_gradients(optimizer: Any, share: tf.Variable | None) -> None:
    """Makes a distributed optimizer multiply this rank's gradients by a variable, float64 []; None: by 1."""
    # Its samples times the ranks, divided by all samples: the ranks' average is then the gradient of the whole batch.
    reduction_of(optimizer).share = share


def _accumulate(optimizer: Any, backward_passes: int) -> None:
    steps = optimizer.gradient_accumulation_steps
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError("backward_passes_per_step: give MultiOptimizer's parts gradient_accumulation_steps instead")
    if steps not in (None, backward_passes):
        raise ValueError(f"backward_passes_per_step={backward_passes}, gradient_accumulation_steps={steps}: give one")
    if steps is None and optimizer.built:
        raise ValueError("backward_passes_per_step: the optimizer is built already; wrap it before compile and fit")
    optimizer.gradient_accumulation_steps = backward_passes


def refuse_overwritten(variables: Any) -> None:
    """Raises ValueError for variables that ranks cannot average."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"{variable.path} is overwritten by its gradient (float8), which ranks cannot average: use a dtype "
                "policy of float32, mixed_bfloat16 or mixed_float16"
            )


class _Reducing(keras.optimizers.Optimizer):
    """Base of all updates; the attributes without a value are set on the subclass."""

    reduction: Reduction
    _local_keys: set[Any]
    _reduced_before: list[bool]
    added: Sequence[Any] = ()
    """variables that the plain optimizer has not"""
    of_object: tuple[str, ...] = ("_reached", "_updated_variables", "added")
    """attributes that are set on the optimizer itself"""

    @property
    def reducer(self) -> LowRank | None:
        return getattr(self.reduction, "reducer", None)

    @property
    def adds_up_rows(self) -> bool:
        """Whether each row of a sparse gradient reaches the update once, as the sum of its parts."""
        return self.reduction.merges_rows or self.reduction.sparse_as_dense

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a Keras or TensorFlow variable from the reduction."""
        self._local_keys.add(self._var_key(var))

    def is_local(self, variable: Any) -> bool:
        return self._var_key(variable) in self._local_keys

    def accumulates(self) -> bool:
        """Returns whether the optimizer accumulates gradients, so that not every `apply` reduces."""
        return any(part.gradient_accumulation_steps for part in getattr(self, "optimizers", [self]))

    def weighted(self, grads: Any, variables: Any) -> Any:
        """Multiplies a rank's gradients by its share of the batch, before Keras adds up those of micro-steps."""
        share = getattr(self.reduction, "share", None)
        if share is None or self._reduced_before:
            return grads
        if variables is None:
            variables = self._trainable_variables
        weighted = []
        for gradient, variable in zip(grads, variables, strict=True):
            if gradient is not None and not self.is_local(variable):
                gradient = weighed(gradient, share)
            weighted.append(gradient)
        return weighted

    def add_state(self) -> None:
        """Adds the variables that the reduction keeps from step to step to a built optimizer."""
        if self.reducer and not self.added:
            # Not self.added = ...: Keras would track and save what the plain optimizer has not.
            self.__dict__["added"] = self.reducer.build(self._trainable_variables)

    def reduce(self, grads: Any, variables: Any) -> list[Any]:
        """Reduces the gradients of an update over the ranks; none of them may be None."""
        local = [self.is_local(variable) for variable in variables]
        reduced = self.reduction(grads, variables, local)
        PHASES.note("reduced", reduced)
        return reduced

    def reduce_given(self, grads: Any, variables: Any) -> list[Any]:
        """Reduces the gradients of an update that are not None."""
        grads = list(grads)
        given = [index for index, grad in enumerate(grads) if grad is not None]
        reduced = self.reduce([grads[index] for index in given], [variables[index] for index in given])
        for index, grad in zip(given, reduced, strict=True):
            grads[index] = grad
        return grads

    @contextlib.contextmanager
    def reduced_before(self) -> Iterator[None]:
        """Context in which updates treat their gradients as already reduced."""
        self._reduced_before.append(True)
        try:
            yield
        finally:
            self._reduced_before.pop()

    def refuse_loss_scale(self) -> None:
        """Raises ValueError if a step cannot be skipped or scaled."""
        if self.reducer:
            what = self.reduction.compression
            raise ValueError(f"{what} does not work with a LossScaleOptimizer (mixed_float16): use mixed_bfloat16")

    def agree_on_finite(self, finite: Any) -> Any:
        """Returns whether the gradients of all ranks are finite, given the flag of this rank."""
        self.refuse_loss_scale()
        if self._reduced_before and not self._local_keys:
            return finite  # reduced gradients are equal on all ranks
        return self.reduction.true_on_all_ranks(finite)


class Distributed(_Reducing):
    """Mixin for a single optimizer."""

    def build(self, variables: Any) -> None:
        refuse_overwritten(variables)
        super().build(variables)
        self.add_state()

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.__dict__["_reached"] = []
        apply = super().apply  # by position: a subclass may name its arguments otherwise
        is_own = getattr(apply, "__func__", None) is not keras.optimizers.Optimizer.apply
        grads = self.weighted(grads, trainable_variables)
        if is_own and not (self._reduced_before or self.reducer):
            # What a subclass does with gradients, such as taking their signs, it does with the reduced ones.
            variables = list(trainable_variables or self._trainable_variables)
            grads = self.reduce_given(grads, variables)
            with self.reduced_before():
                apply(grads, variables)
        else:
            apply(grads, trainable_variables)
        self._require_reduced("apply", grads)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        self.__dict__["_reached"] = []
        result = super().apply_gradients(pairs, *args, **kwargs)
        self._require_reduced("apply_gradients", [grad for grad, _ in pairs])
        return result

    def _require_reduced(self, method: str, grads: Any) -> None:
        # Otherwise an optimizer that overrides more than its update would train a different model on each rank.
        if any(grad is not None for grad in grads) and not self._reached:
            raise OutOfSync(
                f"{type(self).__name__}.{method} did not call Keras' Optimizer._clip_gradients, where ranks reduce "
                f"their gradients: implement update_step and leave {method} to Keras, or call super().{method}"
            )

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self.__dict__["_updated_variables"] = list(trainable_variables)
        if self.gradient_accumulation_steps:
            self._reached.append("hook")  # most micro-steps only accumulate
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        self._reached.append("hook")
        if not self._reduced_before:
            grads = self.reduce(grads, self._updated_variables)
        return super()._clip_gradients(grads)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        update = super().update_step
        is_sgd = getattr(update, "__func__", None) is keras.optimizers.SGD.update_step
        if not is_sgd or not self.momentum or isinstance(gradient, tf.IndexedSlices):
            update(gradient, variable, learning_rate)
            return
        # One kernel, with the bits of Keras in the graph of every strategy: TensorFlow cannot combine its factors.
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
            momentum=keras.ops.cast(self.momentum, variable.dtype),  # as Keras does, by way of float32
            use_nesterov=self.nesterov,
        )

    def assign_add(self, variable: Any, value: Any) -> None:
        super().assign_add(variable, self._in_fixed_order(value))

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, self._in_fixed_order(value))

    def _in_fixed_order(self, value: Any) -> Any:
        if not isinstance(value, tf.IndexedSlices) or not isinstance(self.reduction, Reduction):
            return value
        return self.reduction.in_fixed_order(value)

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars  # Keras would sum over a tf.distribute strategy's copies here, after clipping


class _DistributedMulti(_Reducing):
    """Mixin for `MultiOptimizer`, whose inner optimizers are made distributed."""

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        self.add_state()

    def add_state(self) -> None:
        for optimizer in self._inner_optimizers:
            if not distributed(optimizer):
                distribute(optimizer, self.reduction, 1)
            type(optimizer)._local_keys = self._local_keys
            type(optimizer)._reduced_before = self._reduced_before
