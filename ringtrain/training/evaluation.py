"""Metrics over all ranks, equal to those of one process up to rounding."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from numpy.typing import NDArray

from ringtrain import data, hvd
from ringtrain.training.metric_results import flat_logs, metric_results
from ringtrain.training.sums import seed_of

if TYPE_CHECKING:
    from ringtrain.training.run import Run


LogsOfRank = tuple[dict[str, Any], dict[str, list[str]]]
"""Keras' logs of a rank's last batch, and the metrics of which they may be"""


class Evaluation(keras.callbacks.Callback):
    """Adds metrics of all ranks and test samples to an epoch's logs; on each rank, before callbacks that read them."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.test = run, run.job.data_set.test
        self.num_shards = run.config.train.virtual_ranks or run.size
        self.own = range(*data.part_of(self.num_shards, run.rank, run.size))
        """numbers of this rank's shards: one, or one per virtual rank"""
        rows = run.job.validation.batch_size
        self.shards = [self.test.shard(number, self.num_shards, rows) for number in self.own]
        self.batches: list[Any] = []
        if run.job.numbers.num_test:
            self.batches = [data.evaluation_batches(self.test, shard, rows) for shard in self.shards]
        self.seconds = 0.0
        self.logs: dict[str, Any] = {}
        """of the last complete epoch"""
        self._left_out: set[str] = set()
        """names of logs that are no metrics and differ in shape between ranks"""

    def on_train_begin(self, logs: Any = None) -> None:
        """Lets shuffles and caches, which training data may share, be as earlier processes have left them."""
        self.run.job.pass_over(self.run.start.initial_epoch, self.run.clock.epoch)

    @hvd.during("evaluate")
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.run.clock.epoch_complete:
            return  # the partial sums in this rank's metrics are saved with the checkpoint
        logs = {} if logs is None else logs
        self._add_metrics(epoch, logs)
        self.logs = dict(logs)  # callbacks add to theirs, which Keras' `on_train_end` does not see

    def _add_metrics(self, epoch: int, logs: dict[str, Any]) -> None:
        hvd.average_moving_statistics(self.model)
        results = results_of_metrics(self.model)
        metrics = over_all_ranks(self.model)
        self.set_metrics(logs, metrics, (self.run.clock.results, results))
        was_stopped = self.run.callbacks.stop.is_ended  # by a step: those that end with the epoch come later
        self.run.job.data_set.train.end(was_stopped)
        if not self.run.job.numbers.num_test or not self.run.job.validation.is_due(epoch):
            return
        begin_s = time.perf_counter()
        parts, logs_of_rank = hvd.run_together(self._evaluate_shards, of_script=True)
        values = parts[0]
        if self.run.config.train.virtual_ranks:  # a row each: their sum does not depend on the number of ranks
            values = [np.zeros((self.num_shards, *sums.shape)) for sums in parts[0]]
            for number, part in zip(self.own, parts, strict=True):
                for rows, sums in zip(values, part, strict=True):
                    rows[number] = sums
        metrics = over_all_ranks(self.model, values)
        for name, value in logs_of_all(metrics, logs_of_rank).items():
            logs[f"{self.run.job.validation.prefix}{name}"] = value
        self.seconds += time.perf_counter() - begin_s

    def set_metrics(
        self, logs: dict[str, Any], metrics: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replaces an epoch's logs by the metrics of all ranks or, where they are no metrics, by means. Collective."""
        candidates: dict[str, list[str]] = {}
        for of_rank in results:  # of its metrics after the first step since a resume, and now
            for name, names in metrics_behind(logs, of_rank).items():
                candidates[name] = [*candidates.get(name, ()), *names]
        if not logs:  # after a resume at the end of an epoch whose data have ended early
            candidates = {name: [name] for name in keras_names(self.model)}
        of_ranks = [candidates]
        if not hvd.is_shared(self.model):  # else each rank has the logs of all
            of_ranks = hvd.allgather_object(candidates, name="ringtrain_metrics_of_logs")
        metric_of = first_of_all(of_ranks)
        self.replace_by_means(logs, metric_of)
        for name, metric in metric_of.items():
            logs[name] = metrics[metric]

    def replace_by_means(self, logs: dict[str, Any], metrics: Collection[str]) -> None:
        """Replaces an epoch's logs that are no metrics by their means over the ranks. Collective."""
        others = {name: value for name, value in logs.items() if name not in metrics}
        if hvd.is_shared(self.model):  # each rank has those of all, whose mean would be rounded
            for name, value in others.items():
                if _is_numeric(value):
                    logs[name] = _number(value)
            return
        means, unlike = means_over_ranks(others)
        for name in unlike & logs.keys():
            del logs[name]  # another number on each rank, by which callbacks might decide otherwise
        logs |= means
        unlike -= self._left_out
        self._left_out |= unlike
        if unlike and self.run.rank == 0:
            text = f"left out are logs that not all ranks have in one shape: {', '.join(sorted(unlike))}"
            print(f"ringtrain: {text}: return the same ones on every rank", file=sys.stderr, flush=True)

    def _evaluate_shards(self) -> tuple[list[list[NDArray[Any]]], LogsOfRank | None]:
        """State of the metrics after each of this rank's shards, and its logs."""
        self.test.begin_evaluation()
        # Where ranks share seeds, layers that are random here, too, must leave them as they were.
        seeds = hvd.seeds(self.model) if hvd.is_shared(self.model) else []
        kept, parts = [keras.ops.convert_to_numpy(seed) for seed in seeds], []
        # One evaluation for the script's callbacks, also on a rank without a batch: they may change what ranks share.
        callbacks = CallbacksOfRank([*self.run.job.users_callbacks])  # parameters would replace those of training
        callbacks.begin()
        try:
            for number, shard, batches in zip(self.own, self.shards, self.batches, strict=True):
                for seed, value in zip(seeds, kept, strict=True):
                    seed.assign(value + seed_of(number))
                parts.append(evaluate_shard(self.model, self.test, shard, batches, callbacks, True))
        finally:
            for seed, value in zip(seeds, kept, strict=True):
                seed.assign(value)
        self.test.end()
        if callbacks.logs_of_rank:
            logs = callbacks.logs_of_rank[0]
        else:  # this rank had no batch
            logs = {name: results_of_metrics(self.model)[name] for name in keras_names(self.model)}
        callbacks.end(logs)
        return parts, callbacks.logs_of_rank


class CallbacksOfRank(keras.callbacks.CallbackList):
    """Callbacks of a rank's evaluation or prediction, each batch of which is progress for the detection of stalls."""

    num_calls = 0  # of Keras' function
    logs_of_rank: LogsOfRank | None = None  # of the last shard with a batch

    def __init__(self, *arguments: Any, **params: Any) -> None:
        super().__init__(*arguments, **params)
        self.outputs: list[Any] = []  # of each call of a prediction

    def on_test_begin(self, logs: Any = None) -> None:
        """Does nothing: Keras calls it for each shard of a rank."""

    def on_test_end(self, logs: Any = None) -> None:
        """Does nothing, for the same reason."""

    def begin(self) -> None:
        super().on_test_begin()

    def end(self, logs: Mapping[str, Any]) -> None:
        super().on_test_end(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count()
        super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count()
        self.outputs.append(logs["outputs"])
        super().on_predict_batch_end(batch, logs)

    def _count(self) -> None:
        self.num_calls += 1
        hvd.step_timing.PHASES.advance()


def evaluate_shard(
    model: keras.Model, test: data.Split, shard: range, batches: Any, callbacks: CallbacksOfRank, is_prepared: bool
) -> list[NDArray[Any]]:
    """State of the metrics after a shard of the test samples, whose logs the callbacks keep."""
    if not len(shard):
        model.reset_metrics()
        return states_of_metrics(model)
    calls_before = callbacks.num_calls
    # Keras would read data of unknown length to their end, and count the end in the losses of single outputs.
    # A shard of a stream has as many batches as numbers.
    steps = len(shard) if int(batches.cardinality()) == tf.data.UNKNOWN_CARDINALITY else None
    with _prepared(model, batches, steps, is_prepared) as words:
        logs = model.evaluate(batches, verbose=0, callbacks=callbacks, return_dict=True, steps=steps, **words)
    if callbacks.num_calls > calls_before:  # else the model's own `evaluate` has not called Keras'
        callbacks.logs_of_rank = logs, metrics_behind(logs, results_of_metrics(model))
    return states_of_metrics(model)


@contextlib.contextmanager
def _prepared(model: keras.Model, batches: Any, steps: int | None, is_prepared: bool) -> Iterator[dict[str, Any]]:
    """Context of an evaluation, with arguments by which a model's own `evaluate` does not prepare its batches again."""
    if not is_prepared or type(model).evaluate is keras.Model.evaluate:
        yield {}
        return
    # As in Keras' `fit`: else the tasks of KerasHub would prepare the batches a second time.
    model._eval_epoch_iterator = TFEpochIterator(
        model.distribute_strategy, batches, steps_per_epoch=steps, steps_per_execution=model.steps_per_execution
    )
    try:
        yield {"_use_cached_eval_dataset": True}
    finally:
        del model._eval_epoch_iterator


def states_of_metrics(model: keras.Model) -> list[NDArray[Any]]:
    """Sums, counts and confusion matrices that a model's metrics hold."""
    return [keras.ops.convert_to_numpy(variable) for variable in model.metrics_variables]


def results_of_metrics(model: keras.Model) -> dict[str, Any]:
    """Results of a model's metrics by name, as floats or arrays."""
    metrics = metric_results(model)
    return {name: _number(keras.ops.convert_to_numpy(value)) for name, value in metrics.items()}


def keras_names(model: keras.Model) -> list[str]:
    """Names under which Keras' own steps log the results of a model's metrics."""
    return [*flat_logs(model.get_metrics_result())]


def metrics_behind(logs: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns, by the name of a log, the metrics of which it may be the result, that of its own name first."""
    if logs.keys() == results.keys():  # as in Keras
        return {name: [name] for name in logs}
    # A step of the user's own may return other values under a metric's name, and results under other names.
    metrics_of = {}
    for name, value in logs.items():
        equal = [metric for metric, result in results.items() if _is_equal(value, result)]
        if name in equal:
            equal.remove(name)
            equal.insert(0, name)
        metrics_of[name] = equal
    return metrics_of


def first_of_all(of_ranks: Sequence[Mapping[str, list[str]]]) -> dict[str, str]:
    """Metric of each log, given those of which it may be the result on each rank: the first that all ranks have."""
    metric_of = {}
    for name, metrics in of_ranks[0].items():
        for metric in reversed(metrics):
            if all(metric in of_rank.get(name, ()) for of_rank in of_ranks):
                metric_of[name] = metric
    return metric_of


def logs_of_all(metrics: Mapping[str, Any], of_rank: LogsOfRank | None) -> dict[str, Any]:
    """Logs of all ranks' evaluation. Collective."""
    of_ranks = hvd.allgather_object(of_rank, name="ringtrain_logs_of_evaluation")
    had_batches = [one for one in of_ranks if one is not None]
    logs, _ = had_batches[-1]  # what a test_step returns besides metrics, as in Keras
    metric_of = first_of_all([names for _, names in had_batches])
    return {**logs, **{name: metrics[metric] for name, metric in metric_of.items()}}


def _is_equal(value: Any, result: Any) -> bool:
    """Returns whether a log and a metric's result are equal, but for the last bits."""
    if not _is_numeric(value) or np.shape(value) != np.shape(result):
        return False
    return bool(np.allclose(value, result, rtol=1e-6, atol=0.0, equal_nan=True))


def over_all_ranks(model: keras.Model, values: Sequence[NDArray[Any]] | None = None) -> dict[str, Any]:
    """Adds up the state of all ranks' metrics since their reset, on every rank; returns results by name. Collective."""
    # Sums, counts and confusion matrices: one process would have their sum over the ranks.
    of_rank = states_of_metrics(model) if values is None else values
    sums = of_rank
    if values is not None or not hvd.is_shared(model):  # else each rank has those of all
        with hvd.during("reduce"):
            sums = sums_over_ranks(of_rank, "ringtrain_metrics")
    for variable, total in zip(model.metrics_variables, sums, strict=True):
        if total.ndim > len(variable.shape):  # rows of which the state is the sum
            total = total.sum(axis=0)
        variable.assign(total)
    return results_of_metrics(model)


def _number(value: Any) -> Any:
    """A float, or an array if the value has axes."""
    array = np.asarray(value)
    if array.ndim:
        return array
    return float(array)


def _is_numeric(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "biuf"


def means_over_ranks(logs: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Means of the ranks' logs that are no metrics, and the names of those without a mean. Collective."""
    logs = {name: value for name, value in logs.items() if _is_numeric(value)}
    shapes = hvd.allgather_object({name: np.shape(value) for name, value in logs.items()}, name="ringtrain_shapes")
    alike = []
    for name, shape in shapes[0].items():
        if all(of_rank.get(name) == shape for of_rank in shapes):
            alike.append(name)
    unlike = set().union(*shapes).difference(alike)  # not on all ranks, or of several shapes
    logs = {name: logs[name] for name in alike}  # in one order on all ranks
    if not logs:
        return {}, unlike
    sums = sums_over_ranks([np.asarray(value) for value in logs.values()], "ringtrain_logs")
    means = {}
    for name, total in zip(logs, sums, strict=True):
        means[name] = _number(total / hvd.size())
    return means, unlike


def sums_over_ranks(arrays: Sequence[NDArray[Any]], name: str) -> list[NDArray[np.float64]]:
    """Sum of each array over the ranks, in one allreduce. Collective."""
    parts = [np.asarray(array, np.float64) for array in arrays]
    if hvd.size() == 1:
        return parts
    total = hvd.allreduce(np.concatenate([part.reshape(-1) for part in parts]), op=hvd.Sum, name=name).numpy()
    ends = np.cumsum([part.size for part in parts])[:-1]
    return [sums.reshape(part.shape) for sums, part in zip(np.split(total, ends), parts, strict=True)]
