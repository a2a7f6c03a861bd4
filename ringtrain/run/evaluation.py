"""Metrics over all ranks, those of one process to rounding."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from numpy.typing import NDArray

from ringtrain import hvd
from ringtrain.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

    from ringtrain.data import DataSet
    from ringtrain.run.resume import Clock


class Evaluation(keras.callbacks.Callback):
    """Puts the metrics of all ranks' samples into an epoch's logs, and adds those of the test samples as test_...

    For every rank, before all callbacks that read an epoch's metrics.

    Args:
        batches: this rank's share of the test samples.
        own: their numbers; may be none.
        data_set: knows which of them could not be read.
        clock: says whether the epoch is whole; one that is broken off is not evaluated.

    Attributes:
        seconds: that all evaluations so far have taken.
    """

    def __init__(
        self,
        batches: tf.data.Dataset,
        own: NDArray[np.int64],
        data_set: DataSet,
        clock: Clock,
        not_averaged: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.batches = batches
        self.own = own
        self.data_set = data_set
        self.clock = clock
        self.not_averaged = not_averaged
        self.seconds = 0.0

    @hvd.during("evaluate")
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.clock.epoch_complete:
            return  # what this rank's metrics hold is saved with the rest, to go on with
        logs = {} if logs is None else logs
        logs |= over_all_ranks(self.model, 1)
        begin_s = time.perf_counter()
        hvd.average_moving_statistics(self.model, self.not_averaged)
        num_own = self.data_set.test.num_readable(self.own)
        if num_own:
            with warnings.catch_warnings():  # where samples are skipped, Keras cannot know how many batches there are
                warnings.filterwarnings("ignore", "Your input ran out of data")
                self.model.evaluate(self.batches, verbose=0, callbacks=[_Advance()])
        else:
            self.model.reset_metrics()
        hvd.run_together(self.data_set.raise_unreadable)
        logs |= {f"test_{name}": value for name, value in over_all_ranks(self.model, num_own).items()}
        self.seconds += time.perf_counter() - begin_s


class _Advance(keras.callbacks.Callback):
    """Each evaluated batch shows that something goes on."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        hvd.step_timing.PLACE.advance()


def over_all_ranks(model: keras.Model, num_own: int) -> dict[str, Any]:
    """The metrics of what all ranks have seen since they were reset. A collective: call it on every rank.

    Keras' metrics keep sums, counts and confusion matrices: what one process would have is their sum over the ranks.

    Args:
        model: compiled; its metrics hold this rank's part, and hold everybody's afterwards.
        num_own: samples that this rank has seen, or any number that is 0 if it has seen none.

    Returns:
        Name and value, a float, or an array where the metric gives several.

    Raises:
        DataError: on every rank: none of them has seen a sample.
    """
    variables = model.metrics_variables
    parts = [np.asarray(keras.ops.convert_to_numpy(variable), np.float64) for variable in variables]
    flat = np.concatenate([*(part.reshape(-1) for part in parts), [num_own]])
    with hvd.during("reduce"):
        *sums, total = hvd.allreduce(flat, op=hvd.Sum, name="ringtrain_metrics").numpy()
    if not total:
        raise DataError("none of the samples could be read: those that were skipped are named in the run's logs/")
    start = 0
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(np.reshape(sums[start : start + part.size], part.shape))
        start += part.size
    values = {name: keras.ops.convert_to_numpy(value) for name, value in model.get_metrics_result().items()}
    return {name: float(value) if np.ndim(value) == 0 else np.asarray(value) for name, value in values.items()}
