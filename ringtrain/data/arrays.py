"""Arrays in memory as Keras' `fit` takes them, and the rows of each global batch that one rank trains."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import in_place, sharding
from ringtrain.data.dataset import Split, spaced
from ringtrain.data.parts import Header, Parts, header_arrays
from ringtrain.data.pipeline import ahead

if TYPE_CHECKING:
    import tensorflow as tf


class NumberedRows(Split):
    """Rows by number as `ringtrain.fit` takes them: `Arrays` in memory, or `RecordRows` in files."""

    has_classes = False
    kind, on_resume = "", "nothing is read again"
    shuffle: bool | str = False
    _num_samples = 0

    def __len__(self) -> int:
        return int(self._num_samples)

    def first(self, num_samples: int) -> NumberedRows:
        """The same, of which only the first rows are used."""
        part = copy.copy(self)
        part._num_samples = min(num_samples, len(self))
        return part

    def rows(self, begin: int, end: int) -> Any:
        """Batch of the rows from one number up to another."""
        raise NotImplementedError

    def order_of_pass(self, global_batch_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Numbers of all rows as they are trained in an epoch, in batches of this size and a last, smaller one."""
        return self.epoch_order(1, seed, epoch).reshape(-1)

    @property
    def plan(self) -> dict[str, str]:
        """Rows of the plan that describe the data."""
        return {}


class Arrays(NumberedRows):
    """Inputs, targets and weights of `fit`: NumPy, tensors, pandas, sparse or ragged, in any nest.

    Args:
        x, y, sample_weight: As in `keras.Model.fit`, whose checks and error messages apply.
        class_weight: Weight by class, for one output.
        shuffle: Whether every epoch has another order; "batch": of the rows of each global batch.
    """

    kind = "arrays"

    def __init__(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, shuffle: bool | str = False
    ) -> None:
        from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

        adapter = ArrayDataAdapter(x, y, sample_weight, class_weight=class_weight)
        self.nest, self.shuffle, self._num_samples = adapter._inputs, shuffle, adapter._num_samples

    def rows(self, begin: int, end: int) -> Any:
        numbers = np.arange(begin, end)
        return _rows_of(self._without_large(), numbers, in_place.rows(self.large, numbers, _converted))

    def checksum(self) -> int:
        """Checksum of up to 256 samples, evenly spaced."""
        checksum, chosen = len(self), spaced(len(self), 256) if len(self) else np.zeros(0, np.int64)
        for leaf in _flat(self.nest):
            # Only rows of large arrays are converted.
            part, numbers = (leaf[chosen], slice(None)) if in_place.is_large(leaf) else (leaf, chosen)
            sliceable = _sliceable(part, "numpy")
            rows = np.asarray(sliceable.convert_to_numpy(sliceable[numbers]))
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

        large = self.large

        def batch_of(one: Any, data: Any) -> Any:
            numbers = one[1]
            return _rows_of(data, numbers, in_place.rows(large, numbers, _converted))

        # An input of the function: a captured constant of this size would be slow.
        pairs = tf.data.Dataset.zip(order, tf.data.Dataset.from_tensors(self._without_large()).repeat())
        batches = pairs.map(tf.autograph.experimental.do_not_convert(batch_of))
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False  # they would copy the arrays
        return batches.with_options(options)

    @property
    def large(self) -> list[NDArray[Any]]:
        return [leaf for leaf in _flat(self.nest) if in_place.is_large(leaf)]

    def _without_large(self) -> Any:
        """The nest as tf.data takes it, in which large arrays have no rows."""
        import keras

        nest = keras.tree.map_structure(lambda leaf: leaf[:0] if in_place.is_large(leaf) else leaf, self.nest)
        return keras.tree.lists_to_tuples(_sliceable(nest, "tensorflow"))


class NoSamples(Split):
    """Data of a run that are not known, or of one that is not evaluated."""

    has_classes = False

    def __len__(self) -> int:
        return 0


class RowBatches:
    """One rank's rows of each global batch of an epoch, the last and smaller one included.

    A part without a row in a batch, of which there are fewer than parts, gets the batch's first one, with the share 0.

    Args:
        samples: Data to train.
        global_batch_size: Rows of a step on all ranks.
        parts: That this rank trains.
        steps_per_epoch: Steps of an epoch, if several epochs share a pass over the data; None: a pass. An epoch does
            not go beyond the end of a pass.
        has_header: Whether batches have a header even if all parts are equal, since other ranks may follow.

    Attributes:
        steps: Number of steps of a pass.
        is_even: Whether all parts have the same number of rows in every step. Batches then have no header.
        has_empty_parts: Whether some part has no row in some step.
    """

    def __init__(
        self,
        samples: NumberedRows,
        global_batch_size: int,
        parts: Parts,
        seed: int,
        steps_per_epoch: int | None = None,
        has_header: bool = False,
    ) -> None:
        import tensorflow as tf

        self.samples, self.global_batch_size, self.seed = samples, global_batch_size, seed
        self.parts = parts
        self.position = 0, 0, 0
        """number of the pass; first step of it, and the step after the last one"""
        whole, self.rest = divmod(len(samples), global_batch_size)
        sizes = [size for size, number in ((global_batch_size, whole), (self.rest, 1)) if size and number]
        repeats = [number for size, number in ((global_batch_size, whole), (self.rest, 1)) if size and number]
        self.steps = sum(repeats)
        self.steps_per_epoch = steps_per_epoch or self.steps
        self._header = header_arrays(parts, sizes, repeats)
        self.is_even = not has_header and not any(size % parts.num_parts for size in sizes)
        self.has_empty_parts = min(sizes) < parts.num_parts
        num_own = len(parts.places(sizes[0]))

        def of_epoch(function: Any, dtype: Any, shape: tuple[int | None, ...] = (None,)) -> tf.data.Dataset:
            # Called when an iterator is made: one pipeline serves all epochs.
            return tf.data.Dataset.range(1).flat_map(
                lambda _: tf.data.Dataset.from_tensor_slices(
                    tf.ensure_shape(tf.numpy_function(function, [], dtype), shape)
                )
            )

        # Without a smaller batch the number of rows is part of the graph, as in Keras: it decides about last bits.
        is_fixed = not self.rest and not has_header
        numbers = of_epoch(self._numbers, tf.int64).batch(num_own, drop_remainder=is_fixed)
        batches = samples.batches(numbers.map(lambda rows: (tf.constant(0, tf.int64), rows)), num_own, seed)
        if not self.is_even:
            per_part = (None, len(parts.numbers))
            shares = of_epoch(lambda: self._of_steps(self._header.shares), tf.float64, per_part)
            lengths = of_epoch(lambda: self._of_steps(self._header.rows), tf.int64, per_part)
            headers = tf.data.Dataset.zip(shares, lengths).map(
                lambda share, rows: Header(share, rows, tf.zeros([], tf.float64))
            )
            batches = tf.data.Dataset.zip(headers, batches)
        self.dataset = ahead(batches)

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Iterator over the batches of an epoch from a step on: (header, batch), or the batch alone if `is_even`."""
        number, begin = divmod(epoch * self.steps_per_epoch + first_step, self.steps)
        self.position = number, begin, begin + self.steps_per_epoch - first_step
        return iter(self.dataset)

    def _numbers(self) -> NDArray[np.int64]:
        epoch, first_step, end = self.position
        order = self.samples.order_of_pass(self.global_batch_size, self.seed, epoch)
        length = len(order) - self.rest
        whole, rest = order[:length].reshape(-1, self.global_batch_size), order[length:]
        if self.samples.shuffle == "batch":
            draw = np.random.default_rng([self.seed, epoch])
            whole, rest = draw.permuted(whole, axis=1), draw.permutation(rest)
        whole = whole[first_step:end]
        found = [whole[:, self.parts.places(self.global_batch_size)].reshape(-1)]
        if self.rest and end == self.steps:
            found.append(rest[self.parts.places(self.rest)])
        return np.concatenate(found)

    def _of_steps(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[slice(*self.position[1:])]


def _sliceable(nest: Any, target: str) -> Any:
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.convert_to_sliceable(nest, target_backend=target)


def _converted(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows in the dtype to which Keras converts their array."""
    converted: NDArray[Any] = _sliceable(rows, "tensorflow")
    return converted


def _rows_of(nest: Any, numbers: Any, large: Sequence[Any]) -> Any:
    """Rows with these numbers of the arrays of a nest, as tensors.

    Args:
        large: Those of the arrays that have no rows in the nest.
    """
    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters import array_slicing

    of_large = iter(large)

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(leaf, numbers)
        if large and getattr(leaf, "shape", None) is not None and leaf.shape[:1] == (0,):
            return next(of_large)
        if isinstance(leaf, np.ndarray):
            return tf.convert_to_tensor(leaf[numbers])
        return None if leaf is None or isinstance(leaf, list | tuple | dict) else tf.gather(leaf, numbers, axis=0)

    return keras.tree.traverse(of_leaf, nest)


def _flat(nest: Any) -> list[Any]:
    import keras

    return [leaf for leaf in keras.tree.flatten(nest) if leaf is not None]
