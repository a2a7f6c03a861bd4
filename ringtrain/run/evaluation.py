"""Metrics over all ranks, equal to those of one process up to rounding."""

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
    """Adds the metrics of all ranks to an epoch's logs, and those of the test samples as test_...

    It must be on every rank, before all callbacks that read an epoch's metrics. An interrupted epoch is not evaluated.
    `own` are the sample numbers of `batches`, this rank's shard of the test samples; they may be empty.
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
            return  # the partial sums in this rank's metrics are saved with the checkpoint
        logs = {} if logs is None else logs
        logs |= over_all_ranks(self.model, 1)
        begin_s = time.perf_counter()
        hvd.average_moving_statistics(self.model, self.not_averaged)
        num_own = self.data_set.test.num_readable(self.own)
        if num_own:
            with warnings.catch_warnings():  # with skipped samples, Keras does not know the number of batches
                warnings.filterwarnings("ignore", "Your input ran out of data")
                self.model.evaluate(self.batches, verbose=0, callbacks=[_Advance()])
        else:
            self.model.reset_metrics()
        hvd.run_together(self.data_set.raise_unreadable)
        logs |= {f"test_{name}": value for name, value in over_all_ranks(self.model, num_own).items()}
        self.seconds += time.perf_counter() - begin_s


class _Advance(keras.callbacks.Callback):
    """Marks each evaluated batch as progress, for the detection of stalls."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        hvd.step_timing.PLACE.advance()


def over_all_ranks(model: keras.Model, num_own: int) -> dict[str, Any]:
    """Sums the metrics of all ranks since their reset, and returns each by name, as a float or an array. Collective.

    Keras' metrics keep sums, counts and confusion matrices, so one process would have their sum over the ranks.
    Afterwards the metrics on every rank hold that sum. Raises DataError on every rank if the sum of `num_own`, the
    number of samples that each rank has seen, is 0.
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
