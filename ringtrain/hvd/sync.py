"""Broadcast of a model's state, and verification that the ranks agree."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.errors import OutOfSync
from ringtrain.hvd.backend import ProcessSet, global_process_set, horovod
from ringtrain.hvd.batch_norm import is_shared, seeds, weights_of_one_rank
from ringtrain.hvd.collectives import allgather_object, broadcast_variables, copies_of, num_copies
from ringtrain.hvd.distributed import variables_of_one_rank
from ringtrain.hvd.keras_patches import (
    compiled_optimizer,
    has_weights,
    innermost,
    optimizers_of,
    path_of,
    reduction_of,
    refuse_horovods_own,
    slots_of,
)
from ringtrain.hvd.placement import CPU
from ringtrain.hvd.step_timing import during
from ringtrain.hvd.train_step import is_own


def broadcast_model(
    model: keras.Model,
    root_rank: int = 0,
    local_variables: Sequence[Any] = (),
    process_set: ProcessSet = global_process_set,
    optimizer: Any = None,
    device: str = CPU,
) -> None:
    """Broadcasts the weights and optimizer state of `root_rank` to all ranks.

    Keras' seed generators are not broadcast and differ between ranks, unless the model's step shares them
    (`share_state`). Each rank keeps its part of slots that are divided. An optimizer that is not built yet is built.

    Args:
        model: Built model, with the same architecture on every rank.
        root_rank: Rank that sends.
        local_variables: Variables to exclude.
        process_set: Ranks that take part.
        optimizer: Optimizer of the model. None: the one it was compiled with, if any.
        device: Device of the broadcast.

    Raises:
        ValueError: The model is not built, or its optimizer was wrapped by Horovod's `DistributedOptimizer`.
    """
    if not has_weights(model):
        raise ValueError(f"broadcast_model: {model.name} has no weights yet; call model.build(input_shape) first")
    if optimizer is None:
        optimizer = compiled_optimizer(model)
    if optimizer is not None:
        refuse_horovods_own(optimizer)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    local = {id(variable) for variable in local_variables}
    seeds_to_share: list[Any] = []
    if is_shared(model):
        seeds_to_share = seeds(model)
    slots = slots_of(model, optimizer)
    variables = [*model.weights, *slots, *seeds_to_share]
    broadcast_variables([v for v in variables if id(v) not in local], root_rank, process_set, device=device)


def check_in_sync(model: keras.Model, optimizer: Any = None) -> str:
    """Verifies that weights and optimizer slots are equal, bit for bit, on all ranks. A collective.

    Each rank sends eight bytes per copy of the model in its process, and more only to name a difference. Excluded are
    seed generators, metrics, local weights (`weights_of_one_rank`, such as the moving statistics of batch
    normalization), accumulated gradients that are not reduced yet, variables registered as local with their slots, the
    slots of which each rank has a part, and what `variables_of_one_rank` names.

    Args:
        model: Built model.
        optimizer: Optimizer of the model. None: the one it was compiled with, if any.

    Returns:
        Checksum, 16 hexadecimal digits: the same on every rank, and in every run with the same weights.

    Raises:
        OutOfSync: On every rank. Names the ranks that differ and the first variable that differs.
        ValueError: The optimizer was wrapped by Horovod's `DistributedOptimizer`.
    """
    if optimizer is None:
        optimizer = compiled_optimizer(model)
    refuse_horovods_own(optimizer)
    process_set = _process_set(optimizer)
    copies = [tuple(zip(*_checksums(model, optimizer, copy), strict=True)) for copy in range(num_copies(model))]
    digests = [hashlib.sha256(np.array(checksums, np.uint32).tobytes()).digest()[:8] for _, checksums in copies]
    if not process_set.included():
        return digests[0].hex()  # nothing to compare with
    with during("reduce"), tf.device(CPU):
        flat = tf.constant(np.frombuffer(b"".join(digests), np.int64))
        gathered = horovod.allgather(flat, name="ringtrain_check_in_sync", process_set=process_set).numpy().tolist()
    if len(set(gathered)) > 1:
        of_ranks = allgather_object(copies, name="ringtrain_out_of_sync", process_set=process_set)
        text = _difference(process_set, gathered, list(itertools.chain(*of_ranks)))
        if is_own(model):
            text += f": does {type(model).__name__}.train_step assign variables by the numbers of each rank's rows?"
        raise OutOfSync(text)
    return digests[0].hex()


def _process_set(optimizer: Any) -> ProcessSet:
    """Ranks that an optimizer trains with."""
    reduction = reduction_of(optimizer)
    if reduction is None:
        return global_process_set
    return reduction.process_set


def _checksums(model: keras.Model, optimizer: Any, copy: int) -> Iterator[tuple[str, int]]:
    local = list(weights_of_one_rank(model))
    for held in optimizers_of(model, optimizer):
        local += _local_variables(model, held)
    excluded = {id(variable) for variable in local}
    for variable in (*model.weights, *slots_of(model, optimizer)):
        if id(variable) not in excluded:
            yield path_of(variable), _checksum(copies_of(variable)[copy].numpy())


def _checksum(value: Any) -> int:
    array = np.ascontiguousarray(value)
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(f"{array.dtype}{array.shape}".encode()))


def _local_variables(model: keras.Model, optimizer: Any) -> Iterator[Any]:
    """Yields what differs between ranks by design, and local variables with their slots."""
    optimizer = innermost(optimizer)
    yield from variables_of_one_rank(optimizer)
    parts = getattr(optimizer, "optimizers", [optimizer])
    if not getattr(optimizer, "_local_keys", None):
        return
    yield from (variable for variable in model.trainable_variables if optimizer.is_local(variable))
    for single in parts:
        indices = [index for index, v in enumerate(single._trainable_variables) if optimizer.is_local(v)]
        for slots in vars(single).values():
            if isinstance(slots, list) and len(slots) == len(single._trainable_variables):
                yield from (slots[index] for index in indices)


def _difference(process_set: ProcessSet, digests: Sequence[int], details: Sequence[Any]) -> str:
    ranks = process_set.ranks or range(len(digests))
    agreed = Counter(digests).most_common(1)[0][0]  # on a tie, that of the lowest rank
    names, reference = details[digests.index(agreed)]
    lines = []
    for rank, digest, (own_names, checksums) in zip(ranks, digests, details, strict=True):
        if digest == agreed:
            continue
        if len(checksums) != len(reference):
            lines.append(f"rank {rank} has {len(checksums)} variables instead of {len(reference)}")
            continue
        differing = [name for name, ours, theirs in zip(own_names, checksums, reference, strict=True) if ours != theirs]
        lines.append(f"rank {rank} differs in {len(differing)} of {len(names)} variables, first in {differing[0]}")
    agreeing = [str(rank) for rank, digest in zip(ranks, digests, strict=True) if digest == agreed]
    return f"ranks out of step: {'; '.join(lines)}; compared with rank{'s'[: len(agreeing) > 1]} {', '.join(agreeing)}"
