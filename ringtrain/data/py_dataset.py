"""Batches of a finite `keras.utils.PyDataset`, made by number."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain.data.streams import Stream, num_rows
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class PyDatasetStream(Stream):
    """Batches of a finite `keras.utils.PyDataset`, made by number: a resumed run makes no earlier ones.

    Its hooks and, without workers, each of its batches get random numbers (`random`, `numpy.random`) that seed, epoch
    and batch determine. As in Keras, epoch e comes after e + 1 calls of `on_epoch_end`. Workers are threads.

    Args:
        shuffle: Whether each epoch has its batches in another order.
    """

    on_resume = "nothing is read again"

    def __init__(
        self, source: keras.utils.PyDataset, class_weight: Any, shuffle: bool, seed: int, take: int | None = None
    ) -> None:
        import tensorflow as tf
        from keras.src.trainers.data_adapters.data_adapter_utils import get_tensor_spec
        from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

        self.kind, self.num_batches = "PyDataset", min(int(source.num_batches), take or int(source.num_batches))
        if not self.num_batches:
            raise DataError("ringtrain.fit: got a PyDataset without batches, expected at least one")
        self.source, self.standardized = source, PyDatasetAdapter(source, class_weight)._standardize_batch
        self.shuffle, self.seed, self._epoch, self._begun = shuffle, seed, 0, 0
        self.numbers: Iterable[int] = range(self.num_batches)
        first = list(self.each(range(min(2, self.num_batches))))
        self.batch_size, self._signature = num_rows(first[0]), get_tensor_spec(first)
        self.dataset = tf.data.Dataset.from_generator(lambda: self.each(self.numbers), output_signature=self._signature)

    def part(self, numbers: Sequence[int]) -> tf.data.Dataset:
        import tensorflow as tf

        return tf.data.Dataset.from_generator(lambda: self.each(numbers), output_signature=self._signature)

    def iterator(self, epoch: int, first_step: int) -> Iterator[Any]:
        while self._begun <= epoch:  # those that were elsewhere as well
            with _seeded(self.seed, self._begun):
                self.source.on_epoch_end()
            with _seeded(self.seed, self._begun, 0):
                self.source.on_epoch_begin()
            self._begun += 1
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_batches)
        else:
            order = np.arange(self.num_batches)
        self._epoch, self.numbers = epoch, order[first_step:].tolist()
        return iter(self._own())

    def pass_over(self, number: int) -> None:
        """Does nothing: hooks are called before the next epoch or evaluation."""

    def end_epoch(self, epoch: int) -> None:
        """Does nothing, for the same reason."""

    def end_evaluation(self) -> None:
        """Does nothing: each rank reads its own batches."""

    def begin_evaluation(self, number: int) -> None:
        """Calls the hooks as Keras does, which ends an evaluation and resets its data before the next one."""
        while self._begun <= number:
            for _ in range(2 if self._begun else 1):
                with _seeded(self.seed, self._begun):
                    self.source.on_epoch_end()
            with _seeded(self.seed, self._begun, 0):
                self.source.on_epoch_begin()
            self._begun += 1

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
