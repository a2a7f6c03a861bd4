"""Keras 3 optimizers and gradient tapes whose gradients are reduced over all ranks.

Horovod 0.28.1 overrides methods that Keras 3 never calls: its wrapper silently trains a different model on each rank.
Averaging follows Sergeev & Del Balso 2018 (arXiv 1802.05799), Adasum Maleki et al. 2020 (arXiv 2006.02924).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ringtrain.hvd.backend import WITH_HOROVOD, Adasum, Average, ProcessSet, global_process_set, horovod
from ringtrain.hvd.collectives import refuse_xla, tensor_of, unique_in_graph
from ringtrain.hvd.compression import Compression
from ringtrain.hvd.distributed import distribute
from ringtrain.hvd.keras_patches import (
    compiled_optimizer,
    distributed,
    innermost,
    refuse_horovods_own,
    set_untracked,
    teach_keras,
)
from ringtrain.hvd.reduction import Reduction


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    deterministic: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer reduce its gradients over all ranks before it clips, decays and applies them.

    The optimizer is changed in place and returned. It keeps its state, schedule and class name, and a model compiled
    with it is saved with the plain optimizer. Call it before `compile`.

    Args:
        optimizer: Any Keras 3 optimizer. Around or inside a `LossScaleOptimizer` (also the one that `compile` adds
            under mixed_float16), an overflow on one rank skips the step on all ranks.
        name: Prefix of the operation names. None: "Distributed" and the class name.
        device_dense, device_sparse: Device on which dense and sparse gradients are reduced. "": TensorFlow decides.
        compression: One of `Compression`. `fp16` divides by the number of ranks (or by `gradient_predivide_factor`, if
            given) before the sum; `powersgd(rank)` is an addition of ringtrain.
        sparse_as_dense: Convert `IndexedSlices` to dense tensors before the reduction. False: gather them; GPUs add up
            the parts of a row, else Adam and others square them one by one, as Keras does.
        gradient_predivide_factor: With Average, divide by this factor before the sum, and by size / factor after it.
        op: Average, Sum or Adasum (over MPI, with a power of two of ranks).
        backward_passes_per_step: Micro-steps that each rank accumulates per update, which alone communicates. Sets
            Keras' `gradient_accumulation_steps`, which also works without this argument, and always averages.
        average_aggregated_gradients: Divide by the number of micro-steps, as one large batch does. False: sum them.
        num_groups: Horovod's deprecated name for an integer `groups`.
        groups: Number of groups in which dense gradients are reduced, or a list of lists of variables. Variables in no
            list are reduced one by one.
        process_set: Ranks that reduce with each other.
        scale_local_gradients: Divide gradients of local variables (see `register_local_var`) by the number of ranks.
        deterministic: Addition of ringtrain. Send all dense gradients as one vector, so that the order of additions is
            the same in every step and run. Also set HOROVOD_FUSION_THRESHOLD=0.

    Returns:
        `optimizer`, with the new method `register_local_var(variable)`, which excludes a variable from the reduction.

    Raises:
        TypeError: `optimizer` is not a Keras 3 optimizer.
        ValueError: Arguments contradict each other, or the optimizer is already distributed.
    """
    groups = num_groups if groups is None and num_groups else groups
    _refuse_other(optimizer)
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step: got {backward_passes_per_step}, expected at least 1")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("op=Adasum combines sums of micro-steps: leave average_aggregated_gradients=False")
    sums_passes = backward_passes_per_step > 1 and not average_aggregated_gradients
    reduction = Reduction(
        name=re.sub(r"[^A-Za-z0-9_]", "_", name or f"Distributed{type(innermost(optimizer)).__name__}"),
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        accumulated_scale=float(backward_passes_per_step) if sums_passes else 1.0,
        deterministic=deterministic,
    )
    if reduction.reducer and isinstance(innermost(optimizer), keras.optimizers.MultiOptimizer):
        raise ValueError(f"compression {compression} does not work with MultiOptimizer: use fp16")
    teach_keras()
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return distribute(optimizer, reduction, backward_passes_per_step)
    optimizer.inner_optimizer = distribute(optimizer.inner_optimizer, reduction, backward_passes_per_step)
    set_untracked(optimizer, register_local_var=optimizer.inner_optimizer.register_local_var)
    return optimizer


def _refuse_other(optimizer: Any) -> None:
    """Raises TypeError for what is not a Keras 3 optimizer, and ValueError for one that is distributed already."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer: got {type(optimizer).__module__}.{type(optimizer).__qualname__}, expected a Keras "
            "3 optimizer such as keras.optimizers.SGD(0.1); for tf.compat.v1 optimizers use Horovod's own wrapper"
        )
    refuse_horovods_own(optimizer)
    if distributed(optimizer):
        raise ValueError(f"DistributedOptimizer: {type(optimizer).__name__} is distributed already; wrap it once")


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """`DistributedOptimizer` that does not reduce the gradients of `local_layers`; other arguments are the same.

    Args:
        local_layers: Built Keras layer, or a sequence of them. Pass their variables to broadcast callbacks as
            `local_variables`; `check_in_sync` excludes them.

    Raises:
        ValueError: `local_layers` contains an object that is not a Keras layer.
    """
    optimizer = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in _layer_variables(local_layers):
        optimizer.register_local_var(variable)
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> keras.Model:
    """Loads a saved Keras model with its optimizer state and makes the optimizer distributed again.

    Args:
        filepath: Path, as for `keras.models.load_model`.
        custom_optimizers: Optimizer classes that are not registered with Keras.
        custom_objects: Further classes or functions by name.
        compression: As in `DistributedOptimizer`.
        legacy_opts: Must be False: Keras 3 has no legacy optimizers.
        options: Further arguments of `DistributedOptimizer`. The file contains the plain optimizer: repeat the
            arguments of the training script.

    Raises:
        ValueError: `legacy_opts` is True, or `DistributedOptimizer` rejects the arguments.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers; load the model without it")
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if compiled_optimizer(model) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
        model.jit_compile = False  # Keras decided before the optimizer was distributed
    return model


def DistributedGradientTape(gradtape: tf.GradientTape, *args: Any, **kwargs: Any) -> tf.GradientTape:
    """Horovod's tape, whose `gradient` is reduced over the ranks, with Keras variables allowed as sources.

    Arguments are those of `horovod.tensorflow.DistributedGradientTape`. Sparse gradients contain each row once and are
    equal on every rank, bit for bit.
    """
    if not WITH_HOROVOD:
        return horovod.DistributedGradientTape(gradtape)  # which says that it needs Horovod
    bound = inspect.signature(horovod.DistributedGradientTape).bind(gradtape, *args, **kwargs)
    bound.apply_defaults()
    groups = bound.arguments["groups"]
    if isinstance(groups, list):
        bound.arguments["groups"] = [[tensor_of(variable) for variable in group] for group in groups]
    tape = horovod.DistributedGradientTape(*bound.args, **bound.kwargs)
    if not bound.arguments["sparse_as_dense"]:
        _sum_sparse_in_one_order(tape, bound.arguments)
    _name_by_order(tape, bound.arguments["sparse_as_dense"])
    # Horovod's tape calls super(self.__class__, self), which recurses without end in a subclass.
    gradient, register, divide = tape.gradient, tape.register_local_source, tape.get_local_and_global_gradients

    def gradient_of(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_xla()
        flat = [tensor_of(source) for source in tf.nest.flatten(sources)]
        return tf.nest.pack_sequence_as(sources, gradient(target, flat, *args, **kwargs))

    def local_and_global_gradients(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        source_of = {id(tensor_of(source)): source for source in sources}
        parts = divide(target, [tensor_of(source) for source in sources], *args, **kwargs)
        return tuple([(source_of[id(tensor)], one) for tensor, one in part] for part in parts)

    tape.gradient = gradient_of
    tape.get_local_and_global_gradients = local_and_global_gradients
    tape.register_local_source = lambda source: register(tensor_of(source))
    return tape


def _name_by_order(tape: Any, sparse_as_dense: bool) -> None:
    """Names gradients in a graph by their order: Horovod's names follow those of layers, which may differ by rank."""
    reduce = tape._allreduce_grads

    def renamed(gradient: Any, name: str) -> Any:
        if gradient is None or (isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense):
            return gradient
        return tf.identity(tf.convert_to_tensor(gradient), name)

    def reduce_renamed(gradients: Any, *args: Any) -> Any:
        if not tf.executing_eagerly():
            prefix = unique_in_graph("DistributedGradientTape")
            gradients = [renamed(gradient, f"{prefix}_{index}") for index, gradient in enumerate(gradients)]
        return reduce(gradients, *args)

    tape._allreduce_grads = reduce_renamed


def _sum_sparse_in_one_order(tape: Any, options: Mapping[str, Any]) -> None:
    reduce_dense = tape._allreduce_grads
    taken = ("device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "process_set")
    reduction = Reduction(
        "DistributedGradientTape",
        **{name: options[name] for name in (*taken, "scale_local_gradients")},
        gradient_predivide_factor=1.0,  # which would cancel out
        groups=None,
        share=None,
        merge_rows=True,
    )

    def reduce(gradients: Any, sources: Any = None, *args: Any) -> list[Any]:
        dense, sparse = list(gradients), []
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                sparse.append(index)
                dense[index] = None
        results = dense
        if len(sparse) < len(dense):
            results = list(reduce_dense(dense, sources, *args))
        chosen = [gradients[index] for index in sparse]
        for index, result in zip(sparse, reduction._reduce(chosen, sparse, [False] * len(sparse)), strict=True):
            results[index] = result
        return results

    tape._allreduce_grads = reduce


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **kwargs: Any
) -> tf.GradientTape:
    """`DistributedGradientTape` that does not reduce the gradients of `local_layers`."""
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in _layer_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def _layer_variables(layers: Any) -> list[Any]:
    """Trainable variables of a Keras layer or a sequence of layers; empty for None. Raises ValueError otherwise."""
    layers = [layers] if isinstance(layers, keras.Layer) else (layers or [])
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise ValueError(f"local_layers: got {layer!r}, expected keras.Layer objects")
    return [variable for layer in layers for variable in layer.trainable_weights]
