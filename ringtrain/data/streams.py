"""Batches of a tf.data.Dataset, PyDataset or generator, of which each rank trains its rows, with their fingerprint."""

from __future__ import annotations

import contextlib
import math
import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter_utils import get_tensor_spec
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from ringtrain.data import division
from ringtrain.data.dataset import Split, ahead
from ringtrain.data.parts import Header, Parts, fingerprint, header_of_shard
from ringtrain.errors import DataError


class Stream(Split):
    """Whole batches of a `tf.data.Dataset`; its samples are counted in batches.

    Without `steps`, each epoch is an iteration of the dataset. As in Keras' `fit`, another one is begun at its end, and
    not read, if the length is known. With fewer `steps`, all epochs are one iteration. Of validation data, each
    evaluation is an iteration: every rank reads all of it, so that shuffles and caches advance alike everywhere.
    """

    is_held_out = is_endless = False
    """whether these are validation data; whether all epochs are one iteration"""
    why_rank_0 = made_by = ""
    """why rank 0 reads for all, and who makes the rows, as phrases; "": it does not, one process"""
    division: division.Division | None = None
    """how each rank makes its own rows alone; None: it makes whole batches"""
    steps_per_call = 1
    """batches that Keras' train_function reads at once"""
    parts = Parts(range(1), 1)
    """of each batch that this rank trains"""
    is_even = True
    has_empty_parts = False
    """as of `RowBatches`"""
    _open: Iterator[Any] | None = None
    """iterator over an epoch, all epochs, or an evaluation, which has begun"""
    _num_read = 0
    """batches that it has given, at the end of an epoch"""

    def __init__(
        self, kind: str, dataset: tf.data.Dataset, steps: int | None = None, epochs: int = 1, batch_size: int = 1
    ) -> None:
        self.kind, self.dataset, self.batch_size = kind, dataset, batch_size  # in rows; 1: unknown
        self.rows = ahead(dataset)
        """what this rank reads"""
        if any(spec.shape.rank is None for spec in tf.nest.flatten(dataset.element_spec)):
            raise DataError(
                f"ringtrain.fit: got a {kind} of unknown shapes, expected batches with known ones: use"
                f" Dataset.from_generator(..., output_signature=...) or tf.ensure_shape"
            )
        length = int(dataset.cardinality())
        self.has_unread = length >= 0 and not steps
        """whether Keras begins another iteration at the end of each"""
        if steps == length:
            steps = None
        self.is_endless, self.num_batches = steps is not None, steps or length  # of an epoch
        if steps and 0 <= length < steps * epochs:
            raise DataError(
                f"ringtrain.fit: got a {kind} of {length} batches for {epochs} epochs of steps_per_epoch {steps},"
                f" which are one iteration: use repeat(), or leave out steps_per_epoch"
            )
        if not steps and length == -1:
            raise DataError(
                f"ringtrain.fit: got a {kind} without an end: pass steps_per_epoch (validation_steps), or use take(n)"
            )
        if not steps and length == -2:
            self.num_batches, self.may_end_early = self._counted(), True
        if not self.num_batches:
            raise DataError(f"ringtrain.fit: got a {kind} without batches, expected at least one")
        which = "all earlier batches" if steps else "the epoch's earlier batches"
        self.on_resume = f"{which} are read again, without training"
        if not steps and division.calls_python(dataset):
            self.on_resume += "; Python functions of the pipeline are not called for earlier epochs"

    def divide(self) -> None:
        """Lets each rank make its own rows alone, if the pipeline is plain."""
        why_whole = f"a {self.kind} makes whole batches"
        if self.kind == "tf.data.Dataset":
            self.division, why_whole = division.division_of(self.dataset)
        self.made_by = f"each rank, all rows: {why_whole}"
        if self.division:
            self.made_by = "each rank, its rows alone"

    def take_rows(self, parts: Parts, steps_per_call: int = 1, has_header: bool = False) -> Stream:
        """Prepares the rows of these parts of each batch; returns the stream, which is called as `RowBatches`."""
        self.steps_per_call, self.parts = steps_per_call, parts
        self.is_even = parts.num_parts == 1 and not has_header
        self.has_empty_parts = parts.num_parts > 1 and not self.is_shard
        rows = self.dataset
        if self.division and parts.num_parts > 1:
            rows = self.division.of_rank(parts)
        elif not self.is_even:
            rows = rows.map(lambda *batch: self._with_header(batch[0] if len(batch) == 1 else batch))
        self.rows = ahead(rows)
        return self

    def _with_header(self, batch: Any) -> tuple[Header, Any]:
        """Rows with a header whose fingerprint, of the whole batch or a shard's length, must be equal on all ranks."""
        return (header_of_shard(batch), batch) if self.is_shard else self.parts.cut(batch)

    def _counted(self) -> int:
        """Number of batches of an iteration: of a copy, if there can be one, so that no epoch is read before."""
        num_batches = 0
        for _ in division.copy_of(self.dataset) or self.dataset:
            num_batches += 1
            _advance()
        return num_batches

    def __len__(self) -> int:
        return self.num_batches

    @property
    def plan(self) -> dict[str, str]:
        """Row of the plan that says who makes the rows."""
        return {"made by": self.made_by} if self.made_by else {}

    def checksum(self) -> int:
        """Checksum of length, shapes and dtypes, and the first batch of validation data, whose order must be fixed."""
        first: Any = ()
        if self.is_held_out:  # reading a training batch would shuffle once more: those are compared in training
            first = next(iter(division.copy_of(self.dataset) or self.dataset))
        content = [int(fingerprint(leaf)) for leaf in tf.nest.flatten(first)]
        return zlib.crc32(f"{self.num_batches} {self.dataset.element_spec} {content}".encode())

    def part(self, numbers: Sequence[int]) -> tf.data.Dataset:
        """The batches with these successive numbers of the evaluation that has begun; parts are read in order."""

        def read() -> Iterator[Any]:
            for number in range(self._num_read, numbers[-1] + 1):
                batch = next(self._open or iter(()), None)
                if batch is None:
                    return
                self._num_read = number + 1
                _advance()
                if number >= numbers[0]:
                    yield batch

        return tf.data.Dataset.from_generator(read, output_signature=self.dataset.element_spec)

    def begin_evaluation(self) -> None:
        self._open, self._num_read = iter(self.rows), 0

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Iterator over what this rank reads of an epoch, from a step on; earlier ones have ended."""
        # Whole calls of train_function, the last of an epoch included.
        length = math.ceil(self.num_batches / self.steps_per_call) * self.steps_per_call
        if self.is_endless:
            first_step += epoch * length
        else:
            self._open, self._num_read = None, 0
        batches = self._open = self._open or iter(self.rows)
        for number in range(self._num_read, first_step):
            if next(batches, None) is None:
                raise DataError(
                    f"ringtrain.fit: the training data end after {number} batches, of which this run has trained"
                    f" {first_step}: pass the same data as before, or give fit another name"
                )
            _advance()
        self._num_read = (epoch + 1) * length
        return batches

    def end(self, was_stopped: bool = False) -> None:
        if self.is_endless:
            self._open = self._open or iter(self.rows)
            return
        if self._open is None:
            self._take_orders()
        elif self.is_held_out:  # what is left, as the other ranks do
            for _ in self._open:
                _advance()
        self._open = None
        if self.has_unread and not was_stopped:
            iter(self.dataset)

    def _take_orders(self) -> None:
        """Does to shuffles and caches what an iteration does."""
        shuffles = division.shuffles_of(self.dataset)
        if shuffles is None:
            for _ in self.rows:
                _advance()
        for shuffle in shuffles or ():
            iter(shuffle)

    def close(self) -> None:
        """Ends reading: a Python generator that is read when the interpreter ends keeps the process alive."""
        self._open = None


class PyDatasetStream(Stream):
    """Batches of a finite `keras.utils.PyDataset`, made by number: a resumed run makes no earlier ones."""

    on_resume = "nothing is read again"

    def __init__(
        self, source: keras.utils.PyDataset, class_weight: Any, shuffle: bool, seed: int, take: int | None = None
    ) -> None:
        self.kind, self.num_batches = "PyDataset", min(int(source.num_batches), take or int(source.num_batches))
        if not self.num_batches:
            raise DataError("ringtrain.fit: got a PyDataset without batches, expected at least one")
        self.source, self.standardized = source, PyDatasetAdapter(source, class_weight)._standardize_batch
        self.shuffle, self.seed, self._epoch, self._num_begun, self._is_open = shuffle, seed, 0, 0, False
        self.numbers: Iterable[int] = range(self.num_batches)
        first = list(self.each(range(min(2, self.num_batches))))
        self.batch_size, self._signature = num_rows(first[0]), get_tensor_spec(first)
        self.dataset = tf.data.Dataset.from_generator(lambda: self.each(self.numbers), output_signature=self._signature)
        self.rows = ahead(self.dataset)

    def part(self, numbers: Sequence[int]) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(lambda: self.each(numbers), output_signature=self._signature)

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        self._begin()
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_batches)
        else:
            order = np.arange(self.num_batches)
        self._epoch, self.numbers = epoch, order[first_step:].tolist()
        return iter(self.rows)

    def begin_evaluation(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Calls the hooks as Keras does, which ends an evaluation and resets its data before the next one."""
        for _ in range(2 if self.is_held_out and self._num_begun else 1):
            with _seeded(self.seed, self._num_begun):
                self.source.on_epoch_end()
        with _seeded(self.seed, self._num_begun, 0):
            self.source.on_epoch_begin()
        self._num_begun, self._is_open = self._num_begun + 1, True

    def end(self, was_stopped: bool = False) -> None:
        if not self._is_open:
            self._begin()
        self._is_open = False

    def whole(self, number: int) -> Any:
        """The batch with this number, as a model takes it."""
        return self.standardized(self.source[number])

    def each(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yields the batch of each number, in order, `workers` of them at a time."""
        if self.source.workers <= 1:
            for number in numbers:
                with self.seeded(number):
                    batch = self.whole(int(number))
                yield batch
            return
        started: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(self.source.workers) as threads:
            for number in numbers:
                started.append(threads.submit(self.whole, int(number)))
                if len(started) > self.source.workers:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()

    def seeded(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Context with the random numbers of a batch, also of generators that the PyDataset has as attributes."""
        generators = [value for value in vars(self.source).values() if isinstance(value, np.random.Generator)]
        return _seeded(self.seed, self._epoch, 1, number, generators=generators)


def _advance() -> None:
    """Counts a batch that is read without training as progress, for the detection of stalls."""
    from ringtrain import hvd

    hvd.step_timing.PHASES.advance()


def num_rows(batch: Any) -> int:
    """Rows of a batch of arrays."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


@contextlib.contextmanager
def _seeded(*seed: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Context with random numbers of Python, NumPy and these generators that the numbers `seed` determine."""
    python, numpy = random.getstate(), np.random.get_state()
    sequence = np.random.SeedSequence([int(one) for one in seed])
    words = sequence.generate_state(4)
    random.seed(words.tobytes())
    np.random.seed(words)
    before = [generator.bit_generator.state for generator in generators]
    for generator, own in zip(generators, sequence.spawn(len(generators)), strict=True):
        generator.bit_generator.state = type(generator.bit_generator)(own).state
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, before, strict=True):
            generator.bit_generator.state = state
