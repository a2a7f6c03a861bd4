"""Training on samples with integer classes: each rank trains its shard of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringtrain import data

if TYPE_CHECKING:
    import tensorflow as tf

    from ringtrain.run.context import RunContext

    BatchesOf = Callable[[int, int], tuple[tf.data.Dataset, int]]
    """Called with an epoch and one of its steps: the batches from there on, and the epoch before which they end."""


class Steps:
    """Steps on samples with classes, see `base.StepsOf`.

    One iterator serves several epochs: it prepares the next epoch's batches before this one ends.

    Args:
        step: Trains the next of some batches; returns Keras' logs.
        batches_of: Makes the batches.
        iterator: Returns an iterator over them.
    """

    def __init__(
        self,
        step: Callable[[Iterator[Any]], Mapping[str, Any]],
        batches_of: BatchesOf,
        iterator: Callable[[tf.data.Dataset], Iterator[Any]] = iter,
    ) -> None:
        self._step, self._batches_of, self._iterator = step, batches_of, iterator
        self._end = 0
        self._batches: Iterator[Any] = iter(())

    def __call__(self, epoch: int, first_step: int) -> Iterator[Mapping[str, Any]]:
        if epoch >= self._end:
            batches, self._end = self._batches_of(epoch, first_step)
            self._batches = self._iterator(batches)
        return self._steps()

    def _steps(self) -> Iterator[Mapping[str, Any]]:
        while True:
            yield self._step(self._batches)


def shards(run: RunContext) -> BatchesOf:
    """Batches of this rank's shard of each global batch: pairs of inputs and labels."""
    if run.strategy.shares_state:
        return _parts(run)
    numbers, end = run.numbers, run.config.train.epochs
    # Batches that are accumulated into one update, or trained by several copies of the model, are cut from one:
    # this rank's shard of the global batch.
    copies = run.strategy.copies
    per_update = numbers.accumulation_steps * copies

    def batches_of(epoch: int, first_step: int) -> tuple[tf.data.Dataset, int]:
        updates, steps = divmod(epoch * numbers.steps_per_epoch + first_step, numbers.accumulation_steps)
        batches = data.training_batches(
            run.data_set.train, numbers.batch_size * per_update, run.rank, run.size, run.config.seed, end, updates
        )
        if per_update > 1:
            batches = batches.rebatch(numbers.batch_size, drop_remainder=True).skip(steps * copies)
        return batches, end

    return batches_of


def _parts(run: RunContext) -> BatchesOf:
    """Batches of this rank's part of each step, whatever number of ranks trained the steps before."""
    numbers, end = run.numbers, run.config.train.epochs
    split, part = run.data_set.train, part_of_rank(run)

    def batches_of(epoch: int, first_step: int) -> tuple[tf.data.Dataset, int]:
        global_step = epoch * numbers.steps_per_epoch + first_step
        sizes = numbers.global_batch_size, numbers.samples_per_step
        return data.part_batches(split, *sizes, part, run.config.seed, end, global_step), end

    return batches_of


def part_of_rank(run: RunContext) -> tuple[int, int]:
    """First and end of this rank's samples in each step: of its virtual ranks, or as equal a part as can be."""
    whole = run.numbers.batch_size if run.config.train.virtual_ranks else 1
    return data.part_of(run.numbers.samples_per_step, run.rank, run.size, whole)
