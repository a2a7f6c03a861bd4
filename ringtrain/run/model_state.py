"""State of a model as arrays: the part that all ranks share, and that of each rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.errors import CheckpointError
from ringtrain.run import checkpoint

Arrays = dict[str, NDArray[Any]]
Slots = dict[int, NDArray[Any]]
"""Whole slots of a sharded optimizer, by the id of this rank's part: see `hvd.gather_slots`."""
Spec = list[dict[str, tuple[str, tuple[int, ...]]]]
"""Dtype and shape of the arrays of each dictionary in a list."""


def require_same_model(source: checkpoint.Checkpoint, model: keras.Model, weights_only: bool = False) -> None:
    local = shapes_of(model.weights if weights_only else shared_variables(model))
    saved = source.manifest["variables"][: len(local) if weights_only else None]
    for (name, *own), (other_name, *other) in zip(local, saved, strict=False):
        if own != other:
            raise CheckpointError(
                f"{source.folder}: of another model: {other_name} has shape {other[0]} and type {other[1]}, {name} here"
                f" has {own[0]} and {own[1]}"
            )
    if len(local) != len(saved):
        raise CheckpointError(f"{source.folder}: of another model: {len(saved)} variables, expected {len(local)}")


def shapes_of(variables: Sequence[Any]) -> list[list[Any]]:
    """Returns [name, shape, dtype] of each Keras variable, to identify a model; of a sharded slot the whole shape."""
    variables = hvd.whole_variables(variables)
    rows: list[list[Any]] = []
    for variable in variables:
        part = hvd.part_of(variable)
        whole = part.variable if part else variable
        rows.append([variable.path, list(whole.shape), str(variable.dtype)])
    return rows


def shared_variables(model: keras.Model) -> list[Any]:
    """Weights and optimizer; parts on several devices as the variables of the undivided model."""
    slots = (variable for one in hvd.optimizers_of(model) for variable in one.variables)
    return hvd.whole_variables([*model.weights, *slots])


def plan_of_slots(model: keras.Model) -> dict[str, str]:
    """Row of the plan on the optimizer's slots, if each rank has a part of them."""
    own, whole = hvd.slot_bytes(hvd.optimizers_of(model))
    return {"slots": f"sharded: {own:,} bytes per rank, {whole:,} unsharded"} if own < whole else {}


def own_variables(model: keras.Model) -> list[Any]:
    """Returns seeds, weights that depend on a rank's data, what optimizers keep of each rank, and the global seed."""
    kept = [variable for one in hvd.optimizers_of(model) for variable in hvd.variables_of_one_rank(one)]
    return [*hvd.seeds(model), *hvd.weights_of_one_rank(model), *kept, *_global_seed(model)]


def seed_places(model: keras.Model) -> list[int]:
    """Returns indices in `own_variables` of all seeds."""
    num_seeds, num_own = len(hvd.seeds(model)), len(own_variables(model))
    return [*range(num_seeds), *range(num_own - len(_global_seed(model)), num_own)]


def seeds_for(model: keras.Model, own: list[Arrays], num_copies: int, seed: int, global_step: int) -> list[Arrays]:
    """Returns the seeds of another number of ranks: those that were saved, then others that none has drawn from."""
    variables, states = own_variables(model), []
    for number in range(num_copies):
        state = {}
        for index in seed_places(model):
            place, variable = f"{index:05d}", variables[index]
            if number < len(own) and place in own[number]:
                state[place] = own[number][place]
                continue
            draw = np.random.default_rng([seed, number, index, global_step])
            # The next state of Keras' global generator is below this number.
            state[place] = draw.integers(0, 933_199, variable.shape).astype(variable.dtype)
        states.append(state)
    return states


def _global_seed(model: keras.Model) -> list[Any]:
    return hvd.global_seed() if hvd.num_copies(model) == 1 else []


def digests(model: keras.Model) -> list[list[bytes]]:
    """Returns checksums of the variables that may differ, for each copy of the model in this process."""

    def digest(variable: Any) -> bytes:
        return hashlib.sha256(np.asarray(variable.numpy()).reshape(-1).view(np.uint8).data).digest()[:8]

    variables, copies = own_variables(model), range(hvd.num_copies(model))
    return [[digest(hvd.copies_of(variable)[copy]) for variable in variables] for copy in copies]


def places_to_save(model: keras.Model, digests: Sequence[Sequence[bytes]]) -> list[int]:
    """Returns indices in `own_variables` of variables that differ between ranks, and of all seeds."""
    seeds = seed_places(model)
    return [place for place, one in enumerate(zip(*digests, strict=True)) if place in seeds or len(set(one)) > 1]


def shared_state(
    model: keras.Model, own: list[Arrays], slots: Slots, not_averaged: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns rank 0's weights and optimizer, with the mean over the ranks of what differs between them.

    Other numbers of ranks resume with the mean. `slots`: result of `hvd.gather_slots`.
    """
    state = {}
    for index, variable in enumerate(shared_variables(model)):
        state[f"{index:05d}"] = slots[id(variable)] if hvd.part_of(variable) else _held(variable)
    places = {id(variable): f"{index:05d}" for index, variable in enumerate(own_variables(model))}
    kept = [one for optimizer in hvd.optimizers_of(model) for one in hvd.variables_of_one_rank(optimizer)]
    averaged = {id(variable) for variable in (*hvd.moving_statistics(model, not_averaged), *kept)}
    for index, variable in enumerate(shared_variables(model)):
        if id(variable) in averaged:
            arrays = [_loaded(variable, rank[places[id(variable)]]) for rank in own if places[id(variable)] in rank]
            if arrays:  # else they are equal
                mean = np.mean([array.astype(np.float64) for array in arrays], axis=0)
                state[f"{index:05d}"] = storable(mean.astype(arrays[0].dtype))
    return state


def metrics_state(own: list[Arrays], rank: int, size: int, copies: int = 1) -> list[NDArray[Any]]:
    """Returns the metric sums that a rank resumes with; if the number of ranks changed, rank 0 gets the sum of all."""
    by_rank = [[array for name, array in sorted(arrays.items()) if name.startswith("metrics-")] for arrays in own]
    same = len(own) == size * copies
    mine = by_rank[rank * copies : (rank + 1) * copies] if same else by_rank
    return [np.asarray(np.sum(arrays, axis=0) * (same or rank == 0)) for arrays in zip(*mine, strict=True)]


def arrays_of(variables: Mapping[int, Any], copy: int = 0) -> Arrays:
    return {f"{index:05d}": storable(hvd.copies_of(one)[copy].numpy()) for index, one in variables.items()}


def packed(states: Sequence[Arrays]) -> NDArray[np.uint8]:
    """Concatenates the bytes of all arrays."""
    parts = [array.reshape(-1).view(np.uint8) for state in states for array in state.values()]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def spec(states: Sequence[Arrays]) -> Spec:
    return [{name: (array.dtype.str, array.shape) for name, array in state.items()} for state in states]


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


def unpacked(flat: NDArray[np.uint8], spec: Spec) -> list[Arrays]:
    """Inverts `packed`."""
    states, begin = [], 0
    for one in spec:
        states.append(Arrays())
        for name, (dtype, shape) in one.items():
            end = begin + num_bytes(dtype, shape)
            states[-1][name] = flat[begin:end].view(dtype).reshape(shape)
            begin = end
    return states


def by_rank(arrays: Mapping[str, NDArray[Any]], num_ranks: int) -> list[Arrays]:
    own: list[Arrays] = [{} for _ in range(num_ranks)]
    for name, array in arrays.items():
        rank, _, place = name.partition("/")
        own[int(rank)][place] = array
    return own


def assign(variables: list[Any], arrays: Mapping[str, NDArray[Any]], copy: int | None = None) -> Slots:
    """Sets the variables that have an array, in all copies of the model or in one; returns whole sharded slots."""
    slots: Slots = {}
    for index, variable in enumerate(variables):
        array = arrays.get(f"{index:05d}")
        if array is None:
            continue  # equal on all ranks, and therefore only in the shared state
        if hvd.part_of(variable):
            slots[id(variable)] = _loaded(variable, array)
            continue
        array = _loaded(variable, array)
        (variable if copy is None else hvd.copies_of(variable)[copy]).assign(array)
    return slots


def _loaded(variable: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Inverts `storable`."""
    return array.view(keras.ops.convert_to_numpy(variable).dtype) if str(variable.dtype) == "bfloat16" else array


def _held(variable: Any) -> Any:
    """Returns the current value. A variable that changes while its tensor is referenced gets new memory."""
    tensor = (variable if isinstance(variable, hvd.Whole) else hvd.copies_of(variable)[0]).read_value()
    return tensor if "CPU" in tensor.device else storable(tensor)  # saves GPU memory


def storable(value: Any) -> NDArray[Any]:
    array = np.array(value)  # a copy: training continues while it is written
    # NumPy's file format has no bfloat16.
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array
