"""Batches that rank 0 alone reads and sends to the others, for sources that are not the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ringtrain.data.dataset import Split
from ringtrain.data.streams import Stream
from ringtrain.errors import DataError, RingtrainError


class FromRank0:
    """Marks batches for `ringtrain.fit`; see `from_rank_0`."""

    def __init__(self, batches: Any, why: str = "") -> None:
        self.batches, self.why = batches, why  # a phrase; "": the script wants it


def from_rank_0(batches: Any) -> FromRank0:
    """Batches for `ringtrain.fit` that rank 0 reads and sends to all ranks, of which each trains its rows.

    For a source that gives every process other batches, such as a queue, a database, or a generator without a seed.
    Each batch crosses the network while the ranks wait for it: data that every rank can read by itself are faster.

    Args:
        batches: A generator, `tf.data.Dataset` or `PyDataset`. The other ranks ignore theirs, which may be None.

    Example:
        >>> history = ringtrain.fit(model, ringtrain.from_rank_0(batches_of_a_queue()), steps_per_epoch=100, epochs=5)
    """
    return FromRank0(batches)


class StreamOfRank0(Stream):
    """Stream that rank 0 reads, and evaluates alone; the others know shapes and length, and get batches. Collective."""

    is_of_rank_0 = True

    def __init__(self, source: Callable[[], Stream], why: str = "") -> None:
        self._source: Any = Split()  # on other ranks, without batches

        def read() -> tuple[Any, ...]:
            self._source = one = source()  # which other ranks do not call
            facts = one.num_batches, one.batch_size, one.on_resume, one.may_end_early, one.is_endless
            return one.kind, one.dataset.element_spec, facts

        kind, spec, facts = read_on_rank_0(read)
        self.num_batches, self.batch_size, self.on_resume, self.may_end_early, self.is_endless = facts
        self.kind = kind if why else f"{kind} of rank 0"
        self.why_rank_0, self.made_by = why, f"rank 0, {why}" if why else ""
        self.dataset = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)

    def close(self) -> None:
        if isinstance(self._source, Stream):
            self._source.close()

    def end(self, was_stopped: bool = False) -> None:
        self._source.end(was_stopped)

    def shard(self, number: int, num_shards: int, whole: int = 1) -> range:
        return range(0 if number else len(self))

    def part(self, numbers: Sequence[int]) -> tf.data.Dataset | None:
        part: tf.data.Dataset | None = self._source.part(numbers)
        return self.dataset if part is None else part

    def begin_evaluation(self) -> None:
        self._source.begin_evaluation()

    def __call__(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        cut_own = tf.function(lambda batch: self.parts.cut(batch), input_signature=[self.dataset.element_spec])
        batches = None
        for number in itertools.count():

            def read() -> list[Any]:
                nonlocal batches
                if batches is None:
                    self._source.steps_per_call = self.steps_per_call
                    batches = self._source(epoch, first_step)
                return leaves(next(batches, ()))

            batch = read_on_rank_0(read)
            if not batch and number % self.steps_per_call:
                return  # a last call with fewer batches
            if not batch:
                raise tf.errors.OutOfRangeError(None, None, "rank 0 has no more batches")
            yield cut_own(packed(self.dataset.element_spec, batch))


def read_on_rank_0(read: Callable[[], Any]) -> Any:
    """Returns on every rank what `read` returns on rank 0; raises an error on every rank if it fails. Collective."""
    from ringtrain import hvd

    def tried() -> Any:
        try:
            return read()
        except RingtrainError:
            raise
        except Exception as error:
            raise DataError(f"cannot read its batches: {type(error).__name__}: {error}") from error

    return hvd.on_rank_0(tried)


def leaves(batch: Any) -> list[Any]:
    """Arrays of a batch, in which sparse and ragged tensors are several."""
    return [leaf.numpy() for leaf in tf.nest.flatten(batch, expand_composites=True)]


def packed(spec: Any, arrays: list[Any]) -> Any:
    """The batch with these `leaves`."""
    return tf.nest.pack_sequence_as(spec, [tf.constant(one) for one in arrays], expand_composites=True)
