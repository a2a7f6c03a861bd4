"""Outputs of `ringtrain.predict`: those of all ranks' calls, joined as by Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import data


def gathered(outputs: Sequence[Any], is_stopped: bool, is_shard: bool) -> Any:
    """Outputs of all ranks' calls, joined as by Keras. Collective.

    Args:
        outputs: Of each call of this rank.
        is_stopped: Whether a callback has ended this rank's calls.
        is_shard: Whether the ranks' calls follow each other, instead of alternating.
    """
    import tensorflow as tf

    from ringtrain import hvd

    calls = []
    for nest in outputs:
        calls.append([np.asarray(leaf) for leaf in tf.nest.flatten(nest, expand_composites=True)])
    spec = tf.nest.map_structure(_spec_of, outputs[0]) if outputs else None

    # The kinds of all arrays, then their bytes.
    kinds = []
    sent = [np.zeros(0, np.uint8)]
    for call in calls:
        parts = [_bytes_of(leaf) for leaf in call]
        sent += parts
        kinds.append([_kind_of(leaf, part) for leaf, part in zip(call, parts, strict=True)])
    of_ranks = hvd.allgather_object((spec, kinds, is_stopped), name="ringtrain_kinds_of_outputs")
    buffers = hvd.allgather_bytes(np.concatenate(sent), "ringtrain_outputs")

    ends: list[tuple[int, int]] = []
    received: dict[tuple[int, int], list[NDArray[Any]]] = {}
    for rank, ((_, kinds, is_stopped), buffer) in enumerate(zip(of_ranks, buffers, strict=True)):
        begin = 0
        for number, kinds_of_call in enumerate(kinds):
            order = (rank, number) if is_shard else (number, rank)
            received[order] = []
            for dtype, shape, num_bytes in kinds_of_call:
                received[order].append(_array_of(buffer[begin : begin + num_bytes], dtype, shape))
                begin += num_bytes
        if is_stopped and kinds:
            ends.append(order)
    # Up to the first call in which a callback has ended a rank's calls.
    in_order = [received[order] for order in sorted(received) if not ends or order <= min(ends)]
    return _joined(next(spec for spec, *_ in of_ranks if spec is not None), in_order)


def _kind_of(array: NDArray[Any], part: NDArray[np.uint8]) -> tuple[str, tuple[int, ...], int]:
    """Type and shape of an array, and the number of its bytes that are sent."""
    import tensorflow as tf

    return tf.as_dtype(array.dtype).name, array.shape, part.size


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    import tensorflow as tf

    if array.dtype.kind == "O":  # texts
        return np.frombuffer(tf.io.serialize_tensor(array).numpy(), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array_of(part: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    import tensorflow as tf

    if dtype == "string":
        return np.asarray(tf.io.parse_tensor(part.tobytes(), tf.string))
    return part.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)


def _spec_of(value: Any) -> Any:
    """Type of an output, of any shape."""
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(None, value.dtype, value.ragged_rank, value.row_splits.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(None, value.dtype)
    return tf.TensorSpec(None, tf.as_dtype(value.dtype))


def _joined(spec: Any, calls: Sequence[Sequence[NDArray[Any]]]) -> Any:
    """Outputs of calls, joined along their rows.

    Args:
        spec: Nest of the types of a call's outputs.
        calls: Arrays of each call; a ragged or sparse tensor has several.
    """
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer

    joined, begin = [], 0
    for leaf in tf.nest.flatten(spec):
        end = begin + len(tf.nest.flatten(leaf, expand_composites=True))
        parts = [call[begin:end] for call in calls]
        begin = end
        if isinstance(leaf, tf.TensorSpec):
            arrays = [array for (array,) in parts]
            if arrays[0].ndim and len({array.shape[1:] for array in arrays}) == 1:
                joined.append(np.concatenate(arrays))
                continue
        tensors = [data.packed(leaf, [*part]) for part in parts]
        joined.append(trainer.convert_to_np_if_not_ragged(trainer.potentially_ragged_concat(tensors)))
    return tf.nest.pack_sequence_as(spec, joined)
