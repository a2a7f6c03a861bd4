"""`ringtrain.evaluate` and `ringtrain.predict`: Keras' own on each rank's batches, with the results of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from numpy.typing import NDArray

from ringtrain import data, hvd, keras_fit
from ringtrain.errors import ConfigError, DataError
from ringtrain.hvd.keras_patches import has_weights
from ringtrain.run import evaluation
from ringtrain.run.context import on_rank
from ringtrain.sources import callbacks_in
from ringtrain.strategies.rows import errors_named


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
    with errors_named("ringtrain.evaluate"):
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
    Every rank calls it with the same data, and needs memory for several times the outputs. Rank 0's weights are used.

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
    with errors_named("ringtrain.predict"):
        return _predict(model, given)


def _evaluate(model: keras.Model, given: _Given) -> dict[str, Any]:
    """Metrics of all rows, by name. Collective."""
    whole = _own_batches(model, given, model.test_step)
    callbacks = _callbacks(model, given, whole)

    def of_rank() -> tuple[dict[str, Any], dict[str, list[str]], list[NDArray[Any]]]:
        model.reset_metrics()
        before = {id(variable): variable.numpy() for variable in model.metrics_variables}
        logs = evaluation.evaluated(model, whole.dataset, callbacks)
        names = evaluation.metrics_behind(logs, evaluation.results_of_metrics(model))
        if not callbacks.num_calls:
            _build(model.test_step, whole)  # metrics may still lack their variables
        states = []
        for variable in model.metrics_variables:
            state = variable.numpy()
            begin = before.get(id(variable), np.zeros_like(state))
            if not callbacks.num_calls:  # Keras has tried to read a batch, and may have counted it
                state = begin
            if hvd.rank():  # what a reset leaves belongs to the sum once
                state = state - begin
            states.append(state)
        return logs, names, states

    with hvd.during("evaluate"):
        logs, names, states = hvd.run_together(of_rank, of_script=True)
    _compare(whole, callbacks)
    metrics = evaluation.over_all_ranks(model, 1, states)
    of_last_batch = ((callbacks.num_calls, hvd.rank()), logs, names) if callbacks.num_calls else None
    logs = evaluation.logs_of_all(metrics, of_last_batch)
    hvd.run_together(lambda: callbacks.end(logs), of_script=True)
    return logs


def _predict(model: keras.Model, given: _Given) -> Any:
    """Outputs of all rows. Collective."""
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
        _compare(whole, callbacks)
        return _joined(callbacks.outputs, model.stop_predicting, whole.is_shard)


def _joined(outputs: Sequence[Any], is_stopped: bool, is_shard: bool) -> Any:
    """Outputs of all ranks' calls, joined along their rows as by Keras. Collective.

    Args:
        outputs: Of each call of this rank.
        is_stopped: Whether a callback has ended this rank's calls.
        is_shard: Whether the ranks' calls follow each other, instead of alternating.
    """
    # In memory of the host: outputs of all ranks may be more than a GPU holds.
    own = [tf.nest.map_structure(_in_memory, call) for call in outputs]
    of_ranks = hvd.allgather_object((own, is_stopped), name="ringtrain_outputs")
    received, ends = {}, []
    for rank, (calls, is_stopped) in enumerate(of_ranks):
        for number, call in enumerate(calls):
            order = (rank, number) if is_shard else (number, rank)
            received[order] = call
        if is_stopped and calls:
            ends.append(order)
    # Up to the first call in which a callback has ended a rank's calls.
    in_order = [received[order] for order in sorted(received) if not ends or order <= min(ends)]
    with tf.device("CPU"):
        return tf.nest.map_structure(_concatenated, *in_order)


def _in_memory(output: Any) -> Any:
    """Array of an output; ragged and sparse tensors stay what they are."""
    return np.asarray(output) if isinstance(output, tf.Tensor) else output


def _concatenated(*parts: Any) -> Any:
    """Outputs of calls along their rows, as Keras joins them."""
    if isinstance(parts[0], np.ndarray):
        if parts[0].ndim and len({part.shape[1:] for part in parts}) == 1:
            return np.concatenate(parts)
        parts = tuple(map(tf.constant, parts))
    return trainer.convert_to_np_if_not_ragged(trainer.potentially_ragged_concat([*parts]))


def _own_batches(model: keras.Model, given: _Given, step: Callable[[Any], Any]) -> data.WholeBatches:
    """This rank's batches; afterwards, the model is built and has rank 0's weights. Collective."""
    if not hvd.is_initialized():
        keras_fit.start()
    x, rank, size = given.x, hvd.rank(), hvd.size()
    why_rank_0 = data.why_rank_0(x)
    whole: Any = None
    if isinstance(x, data.FromRank0) or why_rank_0:

        def read() -> Any:
            nonlocal whole
            whole = _batches(model, given, x.batches if isinstance(x, data.FromRank0) else x)
            return whole.dataset.element_spec

        spec = data.read_on_rank_0(read)
        whole = whole or data.no_batches(spec)
    elif callable(x) and not hasattr(x, "shape"):
        whole = hvd.run_together(lambda: _batches(model, given, x(rank, size)), of_script=True)
        whole.is_shard = True
    else:
        whole = hvd.run_together(lambda: _batches(model, given, x, rank, size), of_script=True)
        _require_alike(hvd.allgather_object(whole.checksum, name="ringtrain_checksum_of_data"))

    def build() -> None:
        if not has_weights(model):
            _build(step, whole)

    hvd.run_together(build, of_script=True)
    hvd.broadcast_variables(model.weights, root_rank=0)
    return whole


def _batches(model: keras.Model, given: _Given, x: Any, rank: int = 0, size: int = 1) -> data.WholeBatches:
    """Batches of a rank, of data that Keras takes."""
    for argument in ("batch_size", "steps"):
        number = getattr(given, argument)
        if number is not None and number < 1:
            raise DataError(f"ringtrain.fit: got {argument} {number}, expected at least 1")
    steps, limit = given.steps, keras.config.max_steps_per_epoch()
    if limit:
        steps = min(steps or limit, limit)
    per_call = model.steps_per_execution
    return data.whole_batches(x, given.y, given.sample_weight, given.batch_size, steps, rank, size, per_call)


def _build(step: Callable[[Any], Any], whole: data.WholeBatches) -> None:
    """Builds the model, and its metrics if `step` updates them, without reading a batch."""
    tf.function(step).get_concrete_function(whole.dataset.element_spec)


def _callbacks(model: keras.Model, given: _Given, whole: data.WholeBatches) -> evaluation.CallbacksOfAll:
    """The script's callbacks that run on this rank, with progress on rank 0."""
    callbacks = on_rank(callbacks_in(given.callbacks), hvd.rank())
    shows = given.verbose != 0 and hvd.rank() == 0
    more: dict[str, Any] = {"verbose": given.verbose, "epochs": 1, "steps": whole.num_batches, "model": model}
    return evaluation.CallbacksOfAll(callbacks, add_progbar=shows, **more)


def _compare(whole: data.WholeBatches, callbacks: evaluation.CallbacksOfAll) -> None:
    """Raises DataError if ranks have read other batches, or none. Collective."""
    read = [] if whole.is_shard else list(whole.read.values())
    of_ranks = hvd.allgather_object((callbacks.num_calls, read), name="ringtrain_batches_read")
    if not any(num_calls for num_calls, _ in of_ranks):
        raise DataError("ringtrain.fit: got data without batches, expected at least one")
    num_read = min(len(of_rank) for _, of_rank in of_ranks)  # prefetching goes beyond a rank's last batch
    _require_alike([tuple(of_rank[:num_read]) for _, of_rank in of_ranks])


def _require_alike(of_ranks: Sequence[Any]) -> None:
    """Raises DataError if a rank's data are not those of rank 0."""
    for rank, own in enumerate(of_ranks):
        if own != of_ranks[0]:
            raise DataError(
                f"ringtrain.fit: rank {rank} has other data than rank 0: pass the same on every rank, with seeds for"
                f" random operations, or ringtrain.from_rank_0(batches)"
            )
