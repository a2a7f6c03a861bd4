"""Arrays in memory as Keras' `fit` takes them, and the rows of each global batch that one rank trains."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import sharding
from ringtrain.data.dataset import Split, spaced
from ringtrain.data.pipeline import ahead

if TYPE_CHECKING:
    import tensorflow as tf


class Arrays(Split):
    """Inputs, targets and weights of `fit`: NumPy, tensors, pandas, sparse or ragged, in any nest.

    Args:
        x, y, sample_weight: As in `keras.Model.fit`, whose checks and error messages apply.
        class_weight: Weight by class, for one output.
        shuffle: Whether every epoch has another order; "batch": of the rows of each global batch.
    """

    has_classes = False
    kind, on_resume = "arrays", "nothing is read again"

    def __init__(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, shuffle: bool | str = False
    ) -> None:
        from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

        adapter = ArrayDataAdapter(x, y, sample_weight, class_weight=class_weight)
        self.nest, self.shuffle, self._num_samples = adapter._inputs, shuffle, adapter._num_samples

    def __len__(self) -> int:
        return int(self._num_samples)

    def first(self, num_samples: int) -> Arrays:
        """The same arrays, of which only the first samples are used."""
        part = copy.copy(self)
        part._num_samples = min(num_samples, len(self))
        return part

    def rows(self, begin: int, end: int) -> Any:
        """Batch of the rows from one number up to another."""
        return _rows_of(self._tensors(), np.arange(begin, end))

    def checksum(self) -> int:
        """Checksum of up to 256 samples, evenly spaced."""
        checksum, chosen = len(self), spaced(len(self), 256) if len(self) else np.zeros(0, np.int64)
        for leaf in _flat(_sliceable(self.nest, "numpy")):
            rows = np.asarray(leaf.convert_to_numpy(leaf[chosen]))
            content = "\0".join(map(str, rows.flat)).encode() if rows.dtype.kind == "O" else rows.tobytes()
            checksum = zlib.crc32(content, zlib.crc32(f"{rows.dtype}{rows.shape}".encode(), checksum))
        return checksum

    def epoch_order(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        if self.shuffle and self.shuffle != "batch":
            return sharding.epoch_order(len(self), global_batch_size, seed, epoch)
        num_steps = len(self) // global_batch_size
        return np.arange(num_steps * global_batch_size).reshape(num_steps, global_batch_size)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        """Batches in the nest of the arrays; see `Split.batches`."""
        import tensorflow as tf

        # An input of the function: a captured constant of this size would be slow.
        pairs = tf.data.Dataset.zip(order, tf.data.Dataset.from_tensors(self._tensors()).repeat())
        batches = pairs.map(tf.autograph.experimental.do_not_convert(lambda one, data: _rows_of(data, one[1])))
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False  # they would copy the arrays
        return batches.with_options(options)

    def _tensors(self) -> Any:
        import keras

        return keras.tree.lists_to_tuples(_sliceable(self.nest, "tensorflow"))


class NoSamples(Split):
    """Data of a run that are not known, or of one that is not evaluated."""

    has_classes = False

    def __len__(self) -> int:
        return 0


class RowBatches:
    """One rank's rows of each global batch of an epoch, the last and smaller one included.

    A rank without a row in a batch, of which there are fewer than ranks, gets one of another rank, with the share 0.

    Args:
        samples: Data whose `epoch_order` of global batches of 1 contains every sample.
        global_batch_size: Rows of a step on all ranks.
        steps_per_epoch: Steps of an epoch, if several epochs share a pass over the data; None: a pass. An epoch does
            not go beyond the end of a pass.

    Attributes:
        steps: Number of steps of a pass.
        shares: float64 [steps]; this rank's rows of a step times the number of ranks, divided by all rows.
        is_even: Whether all ranks have the same number of rows in every step. Batches then have no share.
        has_empty_parts: Whether some rank has no row in some step.
    """

    def __init__(
        self,
        samples: Split,
        global_batch_size: int,
        rank: int,
        size: int,
        seed: int,
        steps_per_epoch: int | None = None,
    ) -> None:
        import tensorflow as tf

        self.samples, self.global_batch_size, self.seed = samples, global_batch_size, seed
        self.rank, self.size = rank, size
        self.position = 0, 0, 0
        """number of the pass; first step of it, and the step after the last one"""
        whole, self.rest = divmod(len(samples), global_batch_size)
        per_step = [global_batch_size] * whole + [self.rest] * (self.rest > 0)
        parts = [sharding.part_of(rows, rank, size) for rows in per_step]
        self.steps = len(per_step)
        self.steps_per_epoch = steps_per_epoch or self.steps
        self.shares = np.array(
            [(end - begin) * size / rows for (begin, end), rows in zip(parts, per_step, strict=True)], np.float64
        )
        self.is_even = not any(rows % size for rows in per_step)
        self.has_empty_parts = min(per_step) < size
        begin, end = parts[0]

        def of_epoch(function: Any, dtype: Any) -> tf.data.Dataset:
            # Called when an iterator is made: one pipeline serves all epochs.
            return tf.data.Dataset.range(1).flat_map(
                lambda _: tf.data.Dataset.from_tensor_slices(
                    tf.ensure_shape(tf.numpy_function(function, [], dtype), [None])
                )
            )

        # Without a smaller batch the number of rows is part of the graph, as in Keras: it decides about last bits.
        numbers = of_epoch(self._numbers, tf.int64).batch(max(1, end - begin), drop_remainder=not self.rest)
        batches = samples.batches(numbers.map(lambda rows: (tf.constant(0, tf.int64), rows)), end - begin, seed)
        if not self.is_even:
            batches = tf.data.Dataset.zip(of_epoch(self._shares, tf.float64), batches)
        self.dataset = ahead(batches)

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Iterator over the batches of an epoch from a step on: (share, batch), or the batch alone if `is_even`."""
        number, begin = divmod(epoch * self.steps_per_epoch + first_step, self.steps)
        self.position = number, begin, begin + self.steps_per_epoch - first_step
        return iter(self.dataset)

    def _numbers(self) -> NDArray[np.int64]:
        epoch, first_step, end = self.position
        order = self.samples.epoch_order(1, self.seed, epoch).reshape(-1)
        length = len(order) - self.rest
        whole, rest = order[:length].reshape(-1, self.global_batch_size), order[length:]
        if getattr(self.samples, "shuffle", False) == "batch":
            draw = np.random.default_rng([self.seed, epoch])
            whole, rest = draw.permuted(whole, axis=1), draw.permutation(rest)
        whole = whole[first_step:end]
        parts = [whole[:, slice(*self._part(self.global_batch_size))].reshape(-1)]
        if self.rest and end == self.steps:
            parts.append(rest[slice(*self._part(self.rest))])
        return np.concatenate(parts)

    def _shares(self) -> NDArray[np.float64]:
        return self.shares[slice(*self.position[1:])]

    def _part(self, rows: int) -> tuple[int, int]:
        begin, end = sharding.part_of(rows, self.rank, self.size)
        return (begin, end) if begin < end else (0, 1)


def _sliceable(nest: Any, target: str) -> Any:
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.convert_to_sliceable(nest, target_backend=target)


def _rows_of(nest: Any, numbers: Any) -> Any:
    """Rows with these numbers of the arrays of a nest, as tensors."""
    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters import array_slicing

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(leaf, numbers)
        if isinstance(leaf, np.ndarray):
            return tf.convert_to_tensor(leaf[numbers])
        return None if leaf is None or isinstance(leaf, list | tuple | dict) else tf.gather(leaf, numbers, axis=0)

    return keras.tree.traverse(of_leaf, nest)


def _flat(nest: Any) -> list[Any]:
    import keras

    return [leaf for leaf in keras.tree.flatten(nest) if leaf is not None]
