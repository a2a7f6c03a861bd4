"""State of a model on all ranks, as a checkpoint has it.

All ranks share weights and optimizer, which are rank 0's. Each rank has states of random seeds, moving statistics of
batch normalization, accumulated gradients that are not reduced yet, and sums of metrics within an epoch. Only rank 0
receives them, in pieces.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.checkpoint import checkpoint
from ringtrain.errors import CheckpointError
from ringtrain.hvd import train_step
from ringtrain.hvd.keras_patches import layers_of, path_of, slots_of

Arrays = dict[str, NDArray[Any]]


def facts_of(model: keras.Model) -> dict[str, Any]:
    """Facts for the manifest, which a resume reads."""
    return {
        "num_ranks": hvd.size() * hvd.num_copies(model),
        "shared_state": hvd.is_shared(model),
        "frozen": frozen_layers(model),
        "variables": shapes_of(shared_variables(model)),
    }


def require_same_model(source: checkpoint.Checkpoint, model: keras.Model) -> None:
    """Raises CheckpointError unless a checkpoint has the variables of a model."""
    saved, local = source.manifest["variables"], shapes_of(shared_variables(model))
    for (name, *kind), (other_name, *saved_kind) in zip(local, saved, strict=False):
        if kind != saved_kind:
            raise CheckpointError(
                f"{source.folder}: of another model: {other_name} has shape {saved_kind[0]} and type {saved_kind[1]},"
                f" {name} here has {kind[0]} and {kind[1]}"
            )
    if len(local) != len(saved):
        raise CheckpointError(f"{source.folder}: of another model: {len(saved)} variables, expected {len(local)}")


def shapes_of(variables: Sequence[Any]) -> list[list[Any]]:
    """Returns [name, shape, dtype] of each Keras variable, to identify a model."""
    rows: list[list[Any]] = []
    for variable in hvd.whole_variables(variables):
        rows.append([path_of(variable), list(variable.shape), keras.backend.standardize_dtype(variable.dtype)])
    return rows


def frozen_layers(model: keras.Model) -> list[int]:
    """Places in `layers_of` of the layers that are not trained."""
    return [place for place, layer in enumerate(layers_of(model)) if not layer.trainable]


def freeze(model: keras.Model, frozen: Sequence[int]) -> None:
    """Freezes the layers at these places of `layers_of`, and thaws all others."""
    for place, layer in enumerate(layers_of(model)):  # outer layers first, which set those in them
        is_trainable = place not in frozen
        if layer.trainable != is_trainable:
            layer.trainable = is_trainable


def freeze_in_training(model: keras.Model, frozen: Sequence[int]) -> None:
    """Does the same in a run: a step that is traced later still trains the layers of `compile`, as in Keras."""
    compiled = frozen_layers(model)
    if [*frozen] == compiled:
        return
    freeze(model, frozen)
    if model.run_eagerly:
        return

    def as_compiled(step: train_step.TrainStep) -> train_step.TrainStep:
        def traced(data: Any) -> Any:
            now = frozen_layers(model)
            freeze(model, compiled)
            try:
                return step(data)
            finally:
                freeze(model, now)

        return traced

    train_step.wrap(model, "trainable", as_compiled)


def shared_variables(model: keras.Model) -> list[Any]:
    """Weights and optimizer; parts on several devices as the variables of the undivided model."""
    return hvd.whole_variables([*model.weights, *slots_of(model)])


def own_variables(model: keras.Model) -> list[Any]:
    """Returns seeds, weights that depend on a rank's data, what optimizers keep of each rank, and the global seed."""
    return [*hvd.seeds(model), *hvd.weights_of_one_rank(model), *_kept_by_optimizers(model), *_global_seed(model)]


def gathered(model: keras.Model, is_in_epoch: bool) -> dict[str, dict[str, Any]]:
    """Returns on rank 0 the state of all ranks, by the name of its file; {} on the others. Collective.

    is_in_epoch: Whether metrics have sums, of which each rank has its own.
    """
    with hvd.during("reduce"):
        of_ranks = hvd.allgather_object(_digests(model), name="ringtrain_own_state")
    digests = [digests_of_copy for copies in of_ranks for digests_of_copy in copies]
    of_rank = _own_state(model, _places_to_save(model, digests), is_in_epoch)
    with hvd.during("reduce"):
        rows: Any = hvd.gather_bytes(_to_bytes(of_rank), name="ringtrain_own_state")
    if hvd.rank():
        return {}
    states = []
    for row in rows:
        states += _from_bytes(row, len(of_rank))
    return {"state": _shared_state(model, states), "ranks": _joined(states)}


def restore(model: keras.Model, newest: checkpoint.Checkpoint | None, seed: int) -> tuple[NDArray[Any], ...]:
    """Gives all ranks rank 0's weights and optimizer, and each rank its own state; returns its sums of metrics.

    newest: On rank 0, the checkpoint to load first, if there is one. Collective.
    """

    def load() -> list[NDArray[np.uint8]]:
        """Loads the shared state; returns the local state of each rank: of its copies of the model, then metrics."""
        if newest is None:
            return []
        if not model.optimizer.built:  # a second build of a LossScaleOptimizer would add its variables once more
            model.optimizer.build(model.trainable_variables)
        require_same_model(newest, model)
        assign(shared_variables(model), newest.arrays("state"))
        return [_to_bytes(states) for states in _local_states(newest, model, seed)]

    rows = hvd.run_together(load)
    length = hvd.broadcast_object(rows[0].size if rows else 0, 0, name="ringtrain_length_of_state")
    hvd.broadcast_model(model, root_rank=0)
    if not length:
        return ()
    row = hvd.scatter_bytes(rows or None, length, name="ringtrain_own_state")
    *own_states, metrics = _from_bytes(row, hvd.num_copies(model) + 1)
    hvd.global_seed(create=True)
    for copy, state in enumerate(own_states):
        assign(own_variables(model), state, copy)
    return tuple(metrics.values())


def _own_state(model: keras.Model, places: Sequence[int], is_in_epoch: bool) -> list[Arrays]:
    """Returns the local variables at these indices, per copy of the model in this process; metrics of the first."""
    variables = own_variables(model)
    wanted = {index: variables[index] for index in places}
    states = [arrays_of(wanted, copy) for copy in range(hvd.num_copies(model))]
    if not is_in_epoch:
        return states
    seen = arrays_of(dict(enumerate(model.metrics_variables)))
    counts = hvd.rank() == 0 or not hvd.is_shared(model)  # else rank 0 saves those of all
    for copy, state in enumerate(states):
        for name, array in seen.items():
            state[f"metrics-{name}"] = array if copy == 0 and counts else 0 * array
    return states


def _local_states(newest: checkpoint.Checkpoint, model: keras.Model, seed: int) -> list[list[Arrays]]:
    """Local state of each rank in a checkpoint: of its copies of the model, then its metrics."""
    size, copies = hvd.size(), hvd.num_copies(model)
    of_ranks = _by_rank(newest.arrays("ranks"), newest.manifest["num_ranks"])
    was_shared = newest.manifest["shared_state"]
    if hvd.is_shared(model):  # each rank has the sums of all; of the rest, only the seeds have the same indices
        metrics = [_metrics_state(of_ranks, 0, 0)] * size
        seeds = [f"{index:05d}" for index in range(len(hvd.seeds(model)))]
        of_ranks = [{key: of_ranks[0][key] for key in seeds if key in of_ranks[0]}] * size
    else:
        metrics = [_metrics_state(of_ranks, rank, size, copies) for rank in range(size)]
        if was_shared:  # all ranks have the same seeds
            of_ranks = of_ranks[:1]
        if was_shared or len(of_ranks) != size * copies:
            of_ranks = _seeds_for(model, of_ranks, size * copies, seed, newest.global_step)
    by_rank = []
    for rank in range(size):
        states = of_ranks[rank * copies : (rank + 1) * copies]
        sums = {str(index): array for index, array in enumerate(metrics[rank])}
        by_rank.append([*states, sums])
    return by_rank


def _kept_by_optimizers(model: keras.Model) -> list[Any]:
    kept: list[Any] = []
    for optimizer in hvd.optimizers_of(model):
        kept += hvd.variables_of_one_rank(optimizer)
    return kept


def _seed_places(model: keras.Model) -> list[int]:
    """Returns indices in `own_variables` of all seeds."""
    num_seeds, num_own = len(hvd.seeds(model)), len(own_variables(model))
    return [*range(num_seeds), *range(num_own - len(_global_seed(model)), num_own)]


def _seeds_for(
    model: keras.Model, of_ranks: list[Arrays], num_copies: int, seed: int, global_step: int
) -> list[Arrays]:
    """Returns the seeds of another number of ranks: those that were saved, then others that none has drawn from."""
    variables, states = own_variables(model), []
    for number in range(num_copies):
        state = {}
        for index in _seed_places(model):
            key, variable = f"{index:05d}", variables[index]
            if number < len(of_ranks) and key in of_ranks[number]:
                state[key] = of_ranks[number][key]
                continue
            draw = np.random.default_rng([seed, number, index, global_step])
            # The next state of Keras' global generator is below this number.
            state[key] = draw.integers(0, 933_199, variable.shape).astype(variable.dtype)
        states.append(state)
    return states


def _global_seed(model: keras.Model) -> list[Any]:
    if hvd.num_copies(model) > 1:
        return []
    return hvd.global_seed()


def _digests(model: keras.Model) -> list[list[bytes]]:
    """Returns checksums of the variables that may differ, for each copy of the model in this process."""

    def digest(variable: Any) -> bytes:
        return hashlib.sha256(np.asarray(variable.numpy()).reshape(-1).view(np.uint8).data).digest()[:8]

    variables = own_variables(model)
    of_copies = []
    for copy in range(hvd.num_copies(model)):
        of_copies.append([digest(hvd.copies_of(variable)[copy]) for variable in variables])
    return of_copies


def _places_to_save(model: keras.Model, digests: Sequence[Sequence[bytes]]) -> list[int]:
    """Returns indices in `own_variables` of variables that differ between ranks, and of all seeds."""
    seeds = _seed_places(model)
    places = []
    for index, of_ranks in enumerate(zip(*digests, strict=True)):
        if index in seeds or len(set(of_ranks)) > 1:
            places.append(index)
    return places


def _shared_state(model: keras.Model, of_ranks: list[Arrays]) -> dict[str, Any]:
    """Returns rank 0's weights and optimizer; what differs between ranks as its mean, for a resume with other ranks."""
    state = {}
    for index, variable in enumerate(shared_variables(model)):
        state[f"{index:05d}"] = _held(variable)
    places = {id(variable): f"{index:05d}" for index, variable in enumerate(own_variables(model))}
    statistics = hvd.moving_statistics(model)
    averaged = {id(variable) for variable in (*statistics, *_kept_by_optimizers(model))}
    for index, variable in enumerate(shared_variables(model)):
        key = places.get(id(variable), "")
        if id(variable) not in averaged:
            if key in of_ranks[0]:  # this may be another rank
                state[f"{index:05d}"] = of_ranks[0][key]
            continue
        arrays = [_loaded(variable, of_rank[key]) for of_rank in of_ranks if key in of_rank]
        if arrays:  # else they are equal
            mean = np.mean([array.astype(np.float64) for array in arrays], axis=0)
            state[f"{index:05d}"] = storable(mean.astype(arrays[0].dtype))
    return state


def _metrics_state(of_ranks: list[Arrays], rank: int, size: int, copies: int = 1) -> list[NDArray[Any]]:
    """Returns the metric sums that a rank resumes with; if the number of ranks changed, rank 0 gets the sum of all."""
    sums_of_ranks = []
    for arrays in of_ranks:
        names = sorted(name for name in arrays if name.startswith("metrics-"))
        sums_of_ranks.append([arrays[name] for name in names])
    same = len(of_ranks) == size * copies
    if same:
        sums_of_ranks = sums_of_ranks[rank * copies : (rank + 1) * copies]
    counts = same or rank == 0
    return [np.asarray(np.sum(sums, axis=0) * counts) for sums in zip(*sums_of_ranks, strict=True)]


def arrays_of(variables: Mapping[int, Any], copy: int = 0) -> Arrays:
    arrays = {}
    for index, variable in variables.items():
        arrays[f"{index:05d}"] = storable(hvd.copies_of(variable)[copy].numpy())
    return arrays


def _joined(states: Sequence[Arrays]) -> Arrays:
    """One dictionary of several ranks' arrays, or copies', by number and name."""
    return {f"{number}/{name}": array for number, state in enumerate(states) for name, array in state.items()}


def _to_bytes(states: Sequence[Arrays]) -> NDArray[np.uint8]:
    """States as bytes, whose number follows from names, shapes and dtypes."""
    file = io.BytesIO()
    np.savez(file, **_joined(states))  # type: ignore[arg-type]
    return np.frombuffer(file.getbuffer(), np.uint8)


def _from_bytes(row: NDArray[np.uint8], num_states: int) -> list[Arrays]:
    """Inverts `to_bytes`."""
    with np.load(io.BytesIO(row.data), allow_pickle=False) as file:
        return _by_rank(dict(file), num_states)


def _by_rank(arrays: Mapping[str, NDArray[Any]], num_ranks: int) -> list[Arrays]:
    """Inverts `joined`."""
    of_ranks: list[Arrays] = [{} for _ in range(num_ranks)]
    for name, array in arrays.items():
        rank, _, key = name.partition("/")
        of_ranks[int(rank)][key] = array
    return of_ranks


def assign(variables: list[Any], arrays: Mapping[str, NDArray[Any]], copy: int | None = None) -> None:
    """Sets the variables that have an array, in all copies of the model or in one."""
    for index, variable in enumerate(variables):
        array = arrays.get(f"{index:05d}")
        if array is None:
            continue  # equal on all ranks, and therefore only in the shared state
        array = _loaded(variable, array)
        if copy is not None:
            variable = hvd.copies_of(variable)[copy]
        variable.assign(array)


def _loaded(variable: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Inverts `storable`."""
    if keras.backend.standardize_dtype(variable.dtype) != "bfloat16":
        return array
    return array.view(keras.ops.convert_to_numpy(variable).dtype)


def _held(variable: Any) -> Any:
    """Returns the current value. A variable that changes while its tensor is referenced gets new memory."""
    if not isinstance(variable, hvd.Whole):
        variable = hvd.copies_of(variable)[0]
    tensor = variable.read_value()
    if "CPU" in tensor.device:
        return tensor
    return storable(tensor)  # saves GPU memory


def storable(value: Any) -> NDArray[Any]:
    array = np.array(value)  # a copy: training continues while it is written
    if array.dtype.name == "bfloat16":  # which NumPy's file format does not have
        return array.view(np.uint16)
    return array
