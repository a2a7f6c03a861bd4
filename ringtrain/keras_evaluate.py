"""`ringtrain.evaluate` and `ringtrain.predict`: Keras' own on each rank's batches, with the results of one process."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import data, keras_fit
from ringtrain.errors import ConfigError, DataError, OutOfSync
from ringtrain.predict_outputs import gathered
from ringtrain.sources import ON_RANK_0, callbacks_in, classes_of

if TYPE_CHECKING:
    import keras

    from ringtrain.run.evaluation import CallbacksOfAll


@dataclass(frozen=True)
class _Given:
    """Arguments of `evaluate` or `predict`."""

    x: Any
    y: Any
    sample_weight: Any
    batch_size: int | None
    steps: int | None
    verbose: str | int
    callbacks: Any


def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """Evaluates a compiled model on all ranks, as `model.evaluate` does on one.

    Each rank evaluates some of the batches that one process has, and the metrics are those of all rows, equal to one
    process up to rounding. Every rank calls it with the same data, and gets the same result. Rank 0's weights are used.

    Args:
        model: Compiled model, as `ringtrain.fit` has left it. One from `runs/<name>/model.keras` needs a `compile`.
        x, y, sample_weight: Data of `keras.Model.evaluate`, the same on all ranks; or what `ringtrain.fit` takes for x:
            `ringtrain.from_rank_0(batches)`, all of which rank 0 evaluates, or a function (rank, number of ranks) that
            returns batches for this rank alone.
        batch_size: Rows of a batch, which one rank evaluates whole. None: 32.
        verbose: 0 prints nothing. Otherwise, rank 0 shows its own batches.
        steps: Batches of all ranks; None: all.
        callbacks: Keras callbacks. They run on every rank with its batches, and `on_test_end` has the metrics of all;
            those that write files run on rank 0 only.
        return_dict: Whether metrics are returned by name.

    Returns:
        Metrics as `model.evaluate` returns them: a number, a list, or with `return_dict` a dict.

    Raises:
        RingtrainError: On every rank: data that differ between ranks, or an error of one rank.

    Example:
        >>> history = ringtrain.fit(model, x, y, epochs=10)
        >>> loss, accuracy = ringtrain.evaluate(model, test_x, test_y)
    """
    given = _Given(x, y, sample_weight, batch_size, steps, verbose, callbacks)
    with _as_called_by("ringtrain.evaluate"):
        if _num_ranks() == 1:
            x, batch_size = _for_keras(x, batch_size)
            words = {"verbose": verbose, "sample_weight": sample_weight, "steps": steps, "callbacks": callbacks}
            return model.evaluate(x, y, batch_size=batch_size, return_dict=return_dict, **words)
        logs = _evaluate(model, given)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Computes a model's outputs on all ranks, as `model.predict` does on one.

    Each rank computes some of the batches that one process has; all of them get all outputs, in the order of the rows.
    Every rank calls it with the same data, and needs memory for twice the outputs. Rank 0's weights are used.

    Args:
        model: Model, as `ringtrain.fit` has left it, or loaded from `runs/<name>/model.keras`.
        x: Data of `keras.Model.predict`, or as for `evaluate`.
        batch_size: Rows of a batch, which one rank computes whole. None: 32.
        verbose: 0 prints nothing. Otherwise, rank 0 shows its own batches.
        steps: Batches of all ranks; None: all.
        callbacks: Keras callbacks. They run on every rank with its batches; those that write files on rank 0 only. If
            one sets `stop_predicting`, the outputs end there.

    Returns:
        Outputs as `model.predict` returns them: arrays, or ragged tensors if their later dimensions differ between
        batches, in the nest that the model returns.

    Raises:
        RingtrainError: On every rank: data that differ between ranks, or an error of one rank.

    Example:
        >>> model = keras.models.load_model("runs/first/model.keras")
        >>> classes = ringtrain.predict(model, test_x).argmax(axis=1)
    """
    given = _Given(x, None, None, batch_size, steps, verbose, callbacks)
    with _as_called_by("ringtrain.predict"):
        if _num_ranks() == 1:
            x, batch_size = _for_keras(x, batch_size)
            return model.predict(x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)
        return _predict(model, given)


@contextlib.contextmanager
def _as_called_by(door: str) -> Iterator[None]:
    """Context in which errors name the function that the script has called."""
    from ringtrain.strategies.rows import errors_named

    with errors_named(door):
        yield


def _num_ranks() -> int:
    """Number of ranks. Starts Horovod, if neither `fit` nor the script has."""
    from ringtrain import hvd

    if not hvd.is_initialized():
        keras_fit.start()
    return int(hvd.size())


def _for_keras(x: Any, batch_size: int | None) -> tuple[Any, int | None]:
    """Data of one process as Keras takes them, and their batch size; None: they are batches, or it is Keras' own."""
    x = _of_one(x)
    if isinstance(x, data.Records):
        return x.dataset(batch_size or data.BATCH_SIZE), None
    return x, batch_size


def _of_one(x: Any) -> Any:
    """Data of one process."""
    if isinstance(x, data.FromRank0):
        return x.batches
    if _is_function(x):
        return x(0, 1)
    return x


def _is_function(x: Any) -> bool:
    """Returns whether x is a function of rank and number of ranks."""
    return callable(x) and not hasattr(x, "shape")


def _evaluate(model: keras.Model, given: _Given) -> dict[str, Any]:
    """Metrics of all rows, by name. Collective."""
    from ringtrain import hvd
    from ringtrain.run import evaluation

    whole = _own_batches(model, given, model.test_step)
    no_sums = whole.rows is not None and _has_own_metrics(model)
    if no_sums:  # right without another way to combine their states
        whole = hvd.run_together(lambda: _batches(given, given.x, 0, 1, model.steps_per_execution), of_script=True)
    callbacks = _callbacks(model, given, whole)

    def of_rank() -> tuple[dict[str, Any], dict[str, list[str]], list[NDArray[Any]]]:
        model.reset_metrics()
        before = {id(variable): variable.numpy() for variable in model.metrics_variables}
        logs = evaluation.evaluated(model, whole.dataset, callbacks)
        names = evaluation.metrics_behind(logs, evaluation.results_of_metrics(model))
        if not callbacks.num_calls:
            _build(model.test_step, whole)  # metrics may still lack their variables
        states = evaluation.states_of_metrics(model)
        begins = []
        for variable, state in zip(model.metrics_variables, states, strict=True):
            begins.append(before.get(id(variable), np.zeros_like(state)))
        if not callbacks.num_calls:  # Keras has tried to read a batch, and may have counted it
            states = begins
        if hvd.rank():  # what a reset leaves belongs to the sum once
            states = [state - begin for state, begin in zip(states, begins, strict=True)]
        return logs, names, states

    with hvd.during("evaluate"):
        logs, names, states = hvd.run_together(of_rank, of_script=True)
    if not no_sums:
        num_calls = _compared(whole, callbacks)
        metrics = evaluation.over_all_ranks(model, 1, states)
        # What a test_step returns besides metrics is that of the last batch, which one of the ranks has had.
        last = max(range(hvd.size()), key=lambda rank: (num_calls[rank], rank))
        of_ranks = hvd.allgather_object((logs, names), name="ringtrain_logs_of_last_batch")
        logs, _ = of_ranks[last]
        metric_of = evaluation.first_of_all(
            [its_names for (_, its_names), calls in zip(of_ranks, num_calls, strict=True) if calls]
        )
        logs |= {name: metrics[metric] for name, metric in metric_of.items()}
    hvd.run_together(lambda: callbacks.end(logs), of_script=True)
    return logs


def _predict(model: keras.Model, given: _Given) -> Any:
    """Outputs of all rows. Collective."""
    from ringtrain import hvd

    whole = _own_batches(model, given, model.predict_step)
    callbacks = _callbacks(model, given, whole)

    def of_rank() -> None:
        try:
            with warnings.catch_warnings():  # Keras may not know the number of batches
                warnings.filterwarnings("ignore", "Your input ran out of data")
                model.predict(whole.dataset, verbose=0, callbacks=callbacks)
        except UnboundLocalError:  # raised by Keras where there is no batch
            if callbacks.num_calls:
                raise
        if whole.num_batches and not callbacks.num_calls:
            name = type(model).__name__
            raise ConfigError(f"ringtrain.predict: {name} has a predict of its own that does not call super().predict")

    with hvd.during("evaluate"):
        hvd.run_together(of_rank, of_script=True)
        _compared(whole, callbacks)
        return gathered(callbacks.outputs, model.stop_predicting, whole.is_shard)


def _own_batches(model: keras.Model, given: _Given, step: Callable[[Any], Any]) -> data.WholeBatches:
    """This rank's batches; afterwards, the model is built and has rank 0's weights. Collective."""
    from ringtrain import hvd

    x, per_call = given.x, model.steps_per_execution
    why_rank_0 = data.why_rank_0(x)
    whole: Any = None
    if isinstance(x, data.FromRank0) or why_rank_0:

        def read() -> Any:
            nonlocal whole
            whole = _batches(given, _of_one(x), 0, 1, per_call)
            return whole.dataset.element_spec

        spec = data.read_on_rank_0(read)
        whole = whole or data.no_batches(spec)
    elif _is_function(x):
        whole = hvd.run_together(lambda: _batches(given, x(hvd.rank(), hvd.size()), 0, 1, per_call), of_script=True)
        whole.is_shard = True
    else:
        whole = hvd.run_together(lambda: _batches(given, x, hvd.rank(), hvd.size(), per_call), of_script=True)
        _require_alike(hvd.allgather_object(whole.checksum, name="ringtrain_checksum_of_data"))
    _share_weights(model, lambda: _build(step, whole))
    return whole


def _batches(given: _Given, x: Any, rank: int, size: int, per_call: int) -> data.WholeBatches:
    """Batches of a rank, of data that Keras takes."""
    import keras

    for argument in ("batch_size", "steps"):
        number = getattr(given, argument)
        if number is not None and number < 1:
            raise DataError(f"ringtrain.fit: got {argument} {number}, expected at least 1")
    steps, limit = given.steps, keras.config.max_steps_per_epoch()
    if limit:
        steps = min(steps or limit, limit)
    return data.whole_batches(x, given.y, given.sample_weight, given.batch_size, steps, rank, size, per_call)


def _build(step: Callable[[Any], Any], whole: data.WholeBatches) -> None:
    """Builds the model, and its metrics if `step` updates them, without reading a batch."""
    import tensorflow as tf

    tf.function(step).get_concrete_function(whole.dataset.element_spec)


def _share_weights(model: keras.Model, build: Callable[[], None]) -> None:
    """Gives the model rank 0's weights, if those of the ranks differ. Collective."""
    from ringtrain import hvd
    from ringtrain.hvd.keras_patches import has_weights

    def checksums() -> tuple[str, bytes]:
        if not has_weights(model):
            build()
        digest = hashlib.sha256()
        for variable in model.weights:
            digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
        return str([(variable.shape, variable.dtype) for variable in model.weights]), digest.digest()

    own = hvd.run_together(checksums, of_script=True)
    of_ranks = hvd.allgather_object(own, name="ringtrain_checksum_of_weights")
    for rank, (shapes, _) in enumerate(of_ranks):
        if shapes != of_ranks[0][0]:
            raise OutOfSync(f"rank {rank} has a model with other weights than rank 0: build the same one on every rank")
    if len(set(of_ranks)) > 1:
        hvd.broadcast_variables(model.weights, root_rank=0)


def _has_own_metrics(model: keras.Model) -> bool:
    """Returns whether a model has metrics of the script's own, whose states may be no sums over rows; says so."""
    from ringtrain import hvd
    from ringtrain.hvd.keras_patches import metrics_of_script

    names = metrics_of_script(model)
    if names and hvd.rank() == 0:
        text = f"{', '.join(names)}: the state of this metric may be no sum over rows: every rank evaluates all of them"
        print(f"ringtrain: evaluate: {text}", file=sys.stderr, flush=True)
    return bool(names)


def _callbacks(model: keras.Model, given: _Given, whole: data.WholeBatches) -> CallbacksOfAll:
    """The script's callbacks that run on this rank, with progress on rank 0."""
    from ringtrain import hvd
    from ringtrain.run.evaluation import CallbacksOfAll

    callbacks = [*callbacks_in(given.callbacks)]
    if hvd.rank():
        callbacks = [callback for callback in callbacks if not classes_of(callback) & {*ON_RANK_0}]
    return CallbacksOfAll(
        callbacks,
        add_progbar=given.verbose != 0 and hvd.rank() == 0,
        verbose=given.verbose,
        epochs=1,
        steps=whole.num_batches,
        model=model,
    )


def _compared(whole: data.WholeBatches, callbacks: CallbacksOfAll) -> list[int]:
    """Number of calls of each rank; raises DataError if ranks have read other batches. Collective."""
    from ringtrain import hvd

    read = [] if whole.is_shard else list(whole.read.values())
    of_ranks = hvd.allgather_object((callbacks.num_calls, read), name="ringtrain_batches_read")
    if not any(num_calls for num_calls, _ in of_ranks):
        raise DataError("ringtrain.fit: got data without batches, expected at least one")
    num_read = min(len(of_rank) for _, of_rank in of_ranks)  # prefetching goes beyond a rank's last batch
    _require_alike([tuple(of_rank[:num_read]) for _, of_rank in of_ranks])
    return [num_calls for num_calls, _ in of_ranks]


def _require_alike(of_ranks: Sequence[Any]) -> None:
    """Raises DataError if a rank's data are not those of rank 0."""
    for rank, own in enumerate(of_ranks):
        if own != of_ranks[0]:
            raise DataError(
                f"ringtrain.fit: rank {rank} has other data than rank 0: pass the same on every rank, with seeds for"
                f" random operations, or ringtrain.from_rank_0(batches)"
            )
