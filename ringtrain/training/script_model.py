"""Compiled model of a script, made ready for several ranks: built, distributed, and afterwards as before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from ringtrain import data, hvd
from ringtrain.config import combinations
from ringtrain.config.sections import DEFAULTS
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.hvd import train_step
from ringtrain.hvd.distributed import undistribute
from ringtrain.hvd.keras_patches import (
    distributed,
    innermost,
    layers_of,
    set_untracked,
)
from ringtrain.training import devices
from ringtrain.training.rows import errors_named, explain_shapes
from ringtrain.training.run import Run
from ringtrain.training.uneven import NO_XLA
from ringtrain.training.unlike import unlike_one_process


def seed_by_rank(model: keras.Model, seed: int) -> None:
    """Gives ranks and towers other random numbers, or all would drop the same units; the first keeps those it has."""
    for index, state in enumerate(hvd.seeds(model)):
        copies = getattr(state.value, "values", None) or [state]
        for number, copy in enumerate(copies, hvd.rank() * len(copies)):
            if number:
                draw = np.random.default_rng([seed, number, index])
                copy.assign(draw.integers(0, 2**31, state.shape))
    if hvd.rank():
        # Not a small number: rank 0 may have that by the script's own call.
        tf.random.set_seed(int(np.random.default_rng([seed, hvd.rank()]).integers(2**31)))
    hvd.seed_globally_by_rank(seed)


def facts_of(model: keras.Model) -> set[str]:
    """Facts of a model for the table of what does not go together."""
    optimizers, layers, is_own = hvd.optimizers_of(model), layers_of(model), train_step.is_own(model)
    accumulates = any(optimizer.gradient_accumulation_steps for optimizer in optimizers)
    known = {
        combinations.STEPS_PER_EXECUTION: model.steps_per_execution > 1,
        combinations.DISTRIBUTED: any(map(distributed, optimizers)),
        combinations.SEVERAL_OPTIMIZERS: len(optimizers) > 1,
        combinations.EMA_OF_ALL: innermost(model.optimizer).use_ema and not model.optimizer.built,
        combinations.OWN_STEP: is_own,
        combinations.ACCUMULATING_STEP: is_own and accumulates,
        combinations.STATEFUL: any(isinstance(layer, keras.layers.RNN) and layer.stateful for layer in layers),
        combinations.SPECTRAL: any(isinstance(layer, keras.layers.SpectralNormalization) for layer in layers),
        combinations.SYNCHRONIZED: bool([*hvd.synchronized_layers(model)]),
    }
    return {fact for fact, is_so in known.items() if is_so}


def build(
    run: Run, model: keras.Model, train: data.NumberedRows | data.Stream, batch_size: int, facts: set[str]
) -> list[str]:
    """Builds and distributes a compiled model; returns its parts whose results are not those of one process."""
    config, shares_state = run.config, run.strategy.shares_state
    on_device = devices.device_of_sums(config.device)
    if config.model.sync_batch_norm and not hvd.synchronize_batch_norm(model, on_device):
        raise ConfigError("model.sync_batch_norm: the model has no BatchNormalization layers: leave it out")
    combinations.check(config, DEFAULTS, facts | facts_of(model))
    optimizers = hvd.optimizers_of(model)
    for optimizer in optimizers:
        if not distributed(optimizer):
            run.strategy.distribute(optimizer)
    train_step.be_traced_anew(model)
    run.strategy.create_variables(model, train, batch_size)
    num_rows = max(2, batch_size // hvd.size())
    if isinstance(train, data.Stream):
        batch = train.dataset.element_spec  # unknown sizes stay unknown, and no batch is read
    else:
        with errors_named("ringtrain.fit"):
            batch = train.rows(0, min(len(train), num_rows))
    # Keras' way to build does not fit a train_step whose data are not those of the model's call.
    is_built = type(model).call is not keras.Model.call and _builds_by_call(model, batch)
    if len(optimizers) > 1 or not is_built:
        try:
            _trace(model, batch)  # builds optimizers of a train_step
        except Exception as error:
            explain_shapes(model, error)
            raise
        model.built = True
    of_built = facts_of(model) - {combinations.DISTRIBUTED}  # by now, all optimizers are
    combinations.check(config, DEFAULTS, facts | of_built)
    run.strategy.share_rows(model, batch)
    if shares_state:
        return unlike_one_process(model, config.train.virtual_ranks > 0)
    seed_by_rank(model, config.seed)
    if run.strategy.num_copies == 1:
        return []
    return unlike_one_process(model)


def _trace(model: keras.Model, batch: Any) -> None:
    """Traces a step, so that functions which it calls keep as little of it as possible."""
    try:
        with train_step.inlined_functions():
            tf.function(model.train_step).get_concrete_function(batch)
    except Exception:  # inlined, the control flow of a function is Python's
        tf.function(model.train_step).get_concrete_function(batch)


def _builds_by_call(model: keras.Model, batch: Any) -> bool:
    """Builds model, metrics and optimizer as Keras does; False: it fails, and a `train_step` may do it instead."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    try:
        if model.run_eagerly and not any(isinstance(leaf, tf.TypeSpec) for leaf in leaves):
            _build_eagerly(model, batch)
        model._symbolic_build(data_batch=batch)  # what is left: perhaps the optimizer
    except Exception as error:
        if not train_step.is_own(model):
            explain_shapes(model, error)
            raise
        return False
    return True


def _build_eagerly(model: keras.Model, batch: Any) -> None:
    """Builds model, metrics and loss with rows: code that is compiled with `run_eagerly` may need their values."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_tensor, batch))
    options = {"training": False} if model._call_has_training_arg else {}
    kept = [*hvd.seeds(model), *hvd.layers_own_variables(model)]  # which a call may change, unlike a trace
    before = [keras.ops.convert_to_numpy(variable) for variable in kept]
    outputs = model(x, **options)
    model.compute_metrics(x, y, outputs, sample_weight=weights)
    model.reset_metrics()
    model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=False)
    for variable, value in zip(kept, before, strict=True):
        variable.assign(value)


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def compile_by_xla(run: Run, model: keras.Model, train: data.NumberedRows | data.Stream) -> dict[str, str]:
    """Compiles the gradients with XLA, if the option or the script asks for it; returns a row of the plan."""
    is_option = run.config.train.jit
    if not is_option and model.jit_compile:
        return {"xla": "whole steps are compiled"}
    is_asked = model._compile_config is not None and model._compile_config.config.get("jit_compile") is True
    if not is_option and not is_asked:
        return {}
    # An option that has no effect is an error. What a script says to Keras is a wish.
    try:
        _compile_gradients(run, model, train)
    except RingtrainError as error:
        problem = str(error).removeprefix("jit: ")
        if is_option:
            raise ConfigError(f"train.jit: {problem}") from error
        return {"xla": f"off: {problem.removesuffix(': leave it out')}"}
    return {"xla": "forward and backward pass are compiled; results differ in the last bits"}


def _compile_gradients(run: Run, model: keras.Model, train: data.NumberedRows | data.Stream) -> None:
    """Compiles forward and backward pass; raises RingtrainError if they cannot be."""
    if not run.strategy.may_compile:
        raise RingtrainError("only strategies ring and mpi-ring compile them: leave it out")
    if run.strategy.shares_state:
        raise RingtrainError("virtual ranks and elastic jobs divide the step otherwise: leave it out")
    if isinstance(train, data.Stream):
        batch = train.dataset.element_spec
    else:
        batch = train.rows(0, 1)
    x, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
    if weights is not None or (not train_step.is_own(model) and _counts_unequally(model, x)):
        raise RingtrainError(NO_XLA)
    hvd.jit_gradients(model)


def _counts_unequally(model: keras.Model, x: Any) -> bool:
    """Returns whether outputs of a model have masks, or axes whose length differs from batch to batch."""
    outputs: list[Any] = []

    def forward(x: Any) -> None:
        options = {"training": True} if model._call_has_training_arg else {}
        for output in keras.tree.flatten(model(x, **options)):
            outputs.append(getattr(output, "_keras_mask", None) is not None or None in output.shape[1:])

    tf.function(forward, autograph=False).get_concrete_function(x)
    return any(outputs)


TRAINED = "ringtrain_trained"
"""attribute of a model: what it was compiled with when it was last trained, and by id which layers were trainable"""


@contextlib.contextmanager
def _trainable_as_compiled(model: keras.Model) -> Iterator[None]:
    """Context in which layers are trainable as in the first fit after `compile`: Keras does not see later changes."""
    layers, compiled = layers_of(model), getattr(model, "_compile_config", None)
    now = {id(layer): layer.trainable for layer in layers}
    when, then = vars(model).get(TRAINED, (None, {}))
    if compiled is None or compiled is not when or model.run_eagerly or then.keys() - now.keys():
        set_untracked(model, **{TRAINED: (compiled, now)})
        yield
        for layer in layers_of(model):  # also those that building the model has made
            now.setdefault(id(layer), layer.trainable)
        return
    first = [then.get(id(layer), layer.trainable) for layer in layers]
    _set_trainable(layers, first)
    try:
        yield
    finally:  # what callbacks have changed stays
        pairs = zip(layers, first, strict=True)
        _set_trainable(
            layers, [now[id(layer)] if layer.trainable == before else layer.trainable for layer, before in pairs]
        )


def _set_trainable(layers: Sequence[keras.Layer], values: Sequence[bool]) -> None:
    for layer, value in zip(layers, values, strict=True):  # outer layers first, which set those in them
        if layer.trainable != value:
            layer.trainable = value


@contextlib.contextmanager
def unchanged_afterwards(model: keras.Model, may_be_compiled: bool = False) -> Iterator[None]:
    """Context after which model, optimizers and layers are as before it, but for what is trained; see docs/fit.md."""
    seeds_ranks = hvd.size() > 1
    optimizers = hvd.optimizers_of(model)
    of_script = [one for one in optimizers if distributed(one)]
    synchronized = list(hvd.synchronized_layers(model))
    applies = [vars(optimizer).get("apply") for optimizer in optimizers]
    if model.jit_compile:
        model.make_test_function()  # which XLA compiles, as it reduces nothing
    jit_compile = model.jit_compile
    model.jit_compile = jit_compile and may_be_compiled  # XLA has no kernel for Horovod's allreduce
    seed = context.global_seed()
    numbers = [state.numpy() for state in hvd.global_seed(create=seeds_ranks)]
    try:
        with train_step.unchanged_afterwards(model), _trainable_as_compiled(model):
            yield
        if seeds_ranks:  # the script's next random numbers are equal on all ranks again: rank 0's
            hvd.broadcast_variables(hvd.global_seed(create=True), root_rank=0)
            numbers = [state.numpy() for state in hvd.global_seed()]
        if hvd.size() > 1 and not of_script:
            for optimizer in hvd.optimizers_of(model):
                hvd.average_accumulated(optimizer)
    finally:
        for optimizer, apply in zip(optimizers, applies, strict=True):
            vars(optimizer).pop("apply", None)
            if apply is not None:
                set_untracked(optimizer, apply=apply)
        for optimizer in hvd.optimizers_of(model):
            if all(optimizer is not one for one in of_script):
                undistribute(optimizer)
        for layer in hvd.synchronized_layers(model):
            if all(layer is not one for one in synchronized):
                hvd.unsynchronize(layer)
        model.jit_compile, model.train_function = jit_compile, None
        vars(model).pop("ringtrain_shares_state", None)
        if seeds_ranks:  # the ranks' own seeds would shuffle the script's next dataset otherwise on each rank
            tf.random.set_seed(seed)
            for state, value in zip(hvd.global_seed(), numbers, strict=False):
                state.assign(value)
