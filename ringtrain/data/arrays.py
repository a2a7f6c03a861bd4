"""Arrays in memory as Keras' `fit` takes them, and the rows of each global batch that one rank trains."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from numpy.typing import NDArray

from ringtrain.data import row_order
from ringtrain.data.dataset import Split, ahead, spaced
from ringtrain.data.parts import Header, Parts
from ringtrain.data.python_calls import of_tensorflow, rows_of
from ringtrain.data.row_order import Order

LARGE = 64 << 20
"""bytes from which on an array is not copied by a pipeline; rows of a smaller copy take less time of the processor"""


class NumberedRows(Split):
    """Rows by number as `ringtrain.fit` takes them: `Arrays` in memory, or `RecordRows` in files."""

    kind, on_resume = "", "nothing is read again"
    is_in_memory = True
    shuffle = False
    """whether every epoch has another order"""
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
        order = tf.data.Dataset.from_tensors((tf.constant(0, tf.int64), np.arange(begin, end)))
        return next(iter(self.batches(order, end - begin, None)))

    def order_of_pass(self, global_batch_size: int, seed: int, epoch: int) -> Order:
        """Order of the rows in an epoch, in batches of this size and a last, smaller one."""
        if self.shuffle:
            return self._shuffled(global_batch_size, seed, epoch)
        return Order(np.arange(len(self)), global_batch_size)

    def _shuffled(self, global_batch_size: int, seed: int, epoch: int) -> Order:
        raise NotImplementedError

    @property
    def plan(self) -> dict[str, str]:
        """Rows of the plan that describe the data."""
        return {}


class Arrays(NumberedRows):
    """Inputs, targets and weights of `fit`: NumPy, tensors, pandas, sparse or ragged, in any nest."""

    kind = "arrays"

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        shuffle: bool = False,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        adapter = ArrayDataAdapter(x, y, sample_weight, class_weight=class_weight)  # with Keras' checks
        self.nest, self.shuffle, self._num_samples = adapter._inputs, shuffle, adapter._num_samples
        self.transform = transform

    def checksum(self) -> int:
        """Checksum of all rows of NumPy arrays; of others and of files, of up to 256, evenly spaced."""
        checksum = len(self)
        for leaf in _flat(self.nest):
            if type(leaf) is np.ndarray:
                rows = leaf[: len(self)]
            else:
                sliceable = _converted(leaf, "numpy")
                rows = np.asarray(sliceable.convert_to_numpy(sliceable[spaced(len(self), 256)]))
            checksum = zlib.crc32(f"{rows.dtype}{rows.shape}".encode(), checksum)
            if rows.dtype.kind == "O":
                checksum = zlib.crc32("\0".join(map(str, rows.flat)).encode(), checksum)
            else:
                checksum = zlib.crc32(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data, checksum)
        return checksum

    def _shuffled(self, global_batch_size: int, seed: int, epoch: int) -> Order:
        return Order(row_order.permutation(len(self), seed, epoch), global_batch_size)

    def batches(self, order: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        """Batches in the nest of the arrays; see `Split.batches`."""
        copied = tuple(_converted(leaf) for leaf in _flat(self.nest) if not is_large(leaf))
        specs = [(array.dtype, array.shape[1:]) for array in self.large_rows(np.zeros(0, np.int64))]

        def batch_of(one: Any, copies: Any) -> Any:
            _, numbers = one
            of_large, of_copies = iter(rows_of(self.large_rows, numbers, specs)), iter(copies)

            def of_leaf(leaf: Any) -> Any:
                if leaf is None:
                    return None
                return next(of_large) if is_large(leaf) else _gathered(next(of_copies), numbers)

            batch = keras.tree.lists_to_tuples(keras.tree.map_structure(of_leaf, self.nest))
            return self.transform(*batch) if self.transform else batch

        # An input of the function: a captured constant of this size would be slow.
        pairs = tf.data.Dataset.zip(order, tf.data.Dataset.from_tensors(copied).repeat())
        batches = pairs.map(tf.autograph.experimental.do_not_convert(batch_of))
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False  # they would copy the arrays
        batches = batches.with_options(options)
        batches.arrays = self  # as long as the dataset lives, so do they
        return batches

    def large_rows(self, numbers: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Rows of large arrays, in the dtype to which Keras converts them."""
        return [_converted(leaf[numbers]) for leaf in _flat(self.nest) if is_large(leaf)]


class NoSamples(Split):
    """Data of a run that is not evaluated."""

    def __len__(self) -> int:
        return 0


class RowNumbers:
    """Numbers of one rank's rows in each step of a pass; a part without rows in a batch gets the batch's first one."""

    def __init__(self, samples: NumberedRows, global_batch_size: int, parts: Parts, seed: int) -> None:
        self._samples, self._global_batch_size, self._seed = samples, global_batch_size, seed
        self.num_whole, self.rest = divmod(len(samples), global_batch_size)  # whole batches; 0: no smaller one
        self.num_steps = self.num_whole
        self.sizes = [global_batch_size] if self.num_whole else []
        if self.rest:
            self.num_steps += 1
            self.sizes.append(self.rest)
        self._places = [np.array(parts.places(size)) for size in self.sizes]
        self.num_own = len(self._places[0])  # rows of this rank in the first step
        self.position = 0, self.num_steps
        """step, of all passes, that the next iteration begins with, and the one after its last"""
        self.moves_on = False
        """whether the iteration after it has the steps that follow"""
        self._last_pass: tuple[int, Order] | None = None
        """number and order of the pass that was read last"""

    def next_position(self) -> NDArray[np.int64]:
        first, end = self.position
        if self.moves_on:
            self.position = end, 2 * end - first
        return np.array([first, end])

    def steps(self) -> tf.data.Dataset:
        """Numbers of steps, counted through all passes, int64 []. Each iteration has those of the next position."""
        next_position = of_tensorflow(self.next_position)

        def of_next(_: tf.Tensor) -> tf.data.Dataset:  # called when an iterator is made
            position = tf.ensure_shape(tf.numpy_function(next_position, [], tf.int64), [2])
            return tf.data.Dataset.range(position[0], position[1])

        steps = tf.data.Dataset.range(1).flat_map(of_next)
        steps.row_numbers = self  # which the functions do not keep alive
        return steps

    def batches(self, num_rows: int | None) -> tf.data.Dataset:
        """Pairs of a pass, int64 [], and a step's row numbers, int64 [num_rows]; None: of unknown length."""
        rows = of_tensorflow(self._rows)

        def read(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            number, numbers = tf.numpy_function(rows, [step], [tf.int64] * 2)
            return tf.ensure_shape(number, []), tf.ensure_shape(numbers, [num_rows])

        return self.steps().map(read)

    def _rows(self, step: np.int64) -> tuple[np.int64, NDArray[np.int64]]:
        """Pass of a step, and the numbers of this rank's rows in it."""
        number, in_pass = divmod(step, self.num_steps)
        places = self._places[0 if in_pass < self.num_whole else -1]
        return np.int64(number), self._order(int(number)).rows(int(in_pass), places)

    def _order(self, number: int) -> Order:
        last_pass = self._last_pass
        if last_pass is None or last_pass[0] != number:
            self._last_pass = None  # frees it first
            last_pass = number, self._samples.order_of_pass(self._global_batch_size, self._seed, number)
            self._last_pass = last_pass
        return last_pass[1]


class RowBatches:
    """One rank's rows of each batch of an epoch; a part without rows gets the batch's first one, with the share 0."""

    def __init__(
        self,
        samples: NumberedRows,
        global_batch_size: int,
        parts: Parts,
        seed: int,
        steps_per_epoch: int | None = None,  # if several epochs share a pass, which none goes beyond; None: a pass
        has_header: bool = False,  # also if all parts are equal, since other ranks may follow
        num_epochs: int = 0,
    ) -> None:
        # Epochs that one iterator serves, if each is read to its end: making one takes as long as several small steps.
        # Of rows in files, each epoch has its own.
        self._num_epochs = num_epochs if samples.is_in_memory else 0
        self._iterator: Any = None
        self._next_step = -1
        """the first step of the epoch that the iterator goes on with"""
        self._numbers = numbers = RowNumbers(samples, global_batch_size, parts, seed)
        self.steps = numbers.num_steps  # of a pass
        self.steps_per_epoch = steps_per_epoch or self.steps
        self.is_even = not has_header and not any(size % parts.num_parts for size in numbers.sizes)
        """whether all parts have the same number of rows in every step; batches then have no header"""
        self.has_empty_parts = min(numbers.sizes) < parts.num_parts
        # Without a smaller batch the number of rows is part of the graph, as in Keras: it decides about last bits.
        is_fixed = not numbers.rest and not has_header
        order = numbers.batches(numbers.num_own if is_fixed else None)
        batches = samples.batches(order, numbers.num_own, seed)
        if not self.is_even:

            def header(step: tf.Tensor) -> Header:
                rows = tf.where(step % numbers.num_steps < numbers.num_whole, global_batch_size, numbers.rest)
                return parts.header(tf.cast(rows, tf.int64))

            batches = tf.data.Dataset.zip(numbers.steps().map(header), batches)
        self.dataset = ahead(batches)

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Iterator with the batches of an epoch from a step on: (header, batch), or the batch alone if `is_even`."""
        first, end = epoch * self.steps_per_epoch + first_step, (epoch + 1) * self.steps_per_epoch
        if first != self._next_step:
            self._numbers.position = first, max(end, self._num_epochs * self.steps_per_epoch)
            self._iterator = iter(self.dataset)
        self._next_step = end if self._num_epochs else -1
        return self._iterator


def is_large(array: Any) -> bool:
    """Returns whether an array is so large that its rows are read where it is, instead of from a copy."""
    if type(array) not in (np.ndarray, np.memmap) or array.nbytes < LARGE:
        return False
    # TensorFlow takes numbers of the processor's byte order alone.
    return array.dtype.kind in "biufc" and array.dtype.isnative


def _converted(leaf: Any, target: str = "tensorflow") -> Any:
    """An array as Keras converts it for a backend."""
    return array_slicing.convert_to_sliceable(leaf, target_backend=target)


def _gathered(leaf: Any, numbers: Any) -> Any:
    """Rows with these numbers of a converted array."""
    if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(leaf, numbers)
    return tf.gather(leaf, numbers, axis=0)


def _flat(nest: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(nest) if leaf is not None]
