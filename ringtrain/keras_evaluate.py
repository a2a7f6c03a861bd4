"""`ringtrain.evaluate` and `ringtrain.predict`: Keras' own on a part of the data, with the results of one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from ringtrain import data, hvd, keras_fit
from ringtrain.errors import ConfigError, DataError
from ringtrain.hvd.keras_patches import has_weights
from ringtrain.run import evaluation
from ringtrain.run.context import on_rank
from ringtrain.sources import callbacks_in
from ringtrain.strategies.rows import errors_named


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

    def compute(held_out: data.Split, numbers: range, batches: Any, callbacks: evaluation.CallbacksOfRank) -> Any:
        callbacks.begin()
        return evaluation.evaluate_shard(model, held_out, numbers, batches, callbacks, is_prepared=False)

    given = data.FitArguments(x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps)
    states, of_rank = _on_parts(model, given, callbacks, verbose, "evaluate", model.test_step, compute)
    metrics = evaluation.over_all_ranks(model, states)
    logs = evaluation.logs_of_all(metrics, of_rank.logs_of_rank)
    hvd.run_together(lambda: of_rank.end(logs), of_script=True)
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

    def compute(held_out: data.Split, numbers: range, batches: Any, callbacks: evaluation.CallbacksOfRank) -> bool:
        if not numbers:
            callbacks.on_predict_begin()
            callbacks.on_predict_end()
            return False
        with warnings.catch_warnings():  # Keras may not know the number of batches
            warnings.filterwarnings("ignore", "Your input ran out of data")
            model.predict(batches, verbose=0, callbacks=callbacks)
        return bool(model.stop_predicting)

    given = data.FitArguments(x=x, batch_size=batch_size, steps_per_epoch=steps)
    is_stopped, of_rank = _on_parts(model, given, callbacks, verbose, "predict", model.predict_step, compute)
    calls: list[Any] = []
    with tf.device("CPU"):  # outputs of all ranks may be more than a GPU holds
        for outputs, ends_here in hvd.allgather_object((of_rank.outputs, is_stopped), name="ringtrain_outputs"):
            calls += outputs
            if ends_here:
                break
        return tf.nest.map_structure(_joined, *calls)


def _joined(*outputs: Any) -> Any:
    """Outputs of calls along their rows, as Keras joins them."""
    return trainer.convert_to_np_if_not_ragged(trainer.potentially_ragged_concat([*outputs]))


def _on_parts(
    model: keras.Model,
    given: data.FitArguments,
    callbacks: Any,
    verbose: str | int,
    method: str,  # of Keras
    step: Callable[[Any], Any],  # of the model, which builds it
    compute: Callable[..., Any],
) -> tuple[Any, evaluation.CallbacksOfRank]:
    """Result of `compute` for this rank's part of the data, and the callbacks that it has called. Collective."""
    if not hvd.is_initialized():
        keras_fit.start()
    with errors_named(f"ringtrain.{method}"), hvd.during("evaluate"):
        held_out, num_rows = _agreed(given)
        numbers = held_out.shard(hvd.rank(), hvd.size(), num_rows)
        batches = data.evaluation_batches(held_out, numbers, num_rows)
        shows, num_batches = verbose != 0 and hvd.rank() == 0, math.ceil(len(numbers) / num_rows)
        params: dict[str, Any] = {"verbose": verbose, "epochs": 1, "steps": num_batches, "model": model}
        own = on_rank(callbacks_in(callbacks), hvd.rank())
        of_rank = evaluation.CallbacksOfRank(own, add_progbar=shows, **params)

        def build() -> None:
            if not has_weights(model) or not numbers:  # of the latter, metrics may still lack their variables
                tf.function(step).get_concrete_function(batches.element_spec)

        def read() -> Any:
            held_out.begin_evaluation()
            result = compute(held_out, numbers, batches, of_rank)
            held_out.end()
            if numbers and not of_rank.num_calls:
                name = f"{type(model).__name__} has a {method} of its own"
                raise ConfigError(f"ringtrain.{method}: {name} that does not call super().{method}")
            return result

        hvd.run_together(build, of_script=True)
        hvd.broadcast_variables(model.weights, root_rank=0)
        return hvd.run_together(read, of_script=True), of_rank


def _agreed(given: data.FitArguments) -> tuple[data.Split, int]:
    """Data of all ranks, and the rows of a batch. Collective."""
    (x,) = data.for_all_ranks(given.x)

    def read() -> tuple[data.Split, int, int]:
        _, steps = keras_fit.within_limits_of_keras(1, given.steps_per_epoch)
        held_out, num_rows = data.to_evaluate(replace(given, x=x, steps_per_epoch=steps))
        checksum = 0
        if not held_out.is_shard:
            checksum = held_out.checksum()
        return held_out, num_rows, checksum

    held_out, num_rows, checksum = hvd.run_together(read, of_script=True)
    checksums = hvd.allgather_object(checksum, name="ringtrain_checksum_of_data")
    for rank, other in enumerate(checksums):
        if other != checksums[0]:
            raise DataError(
                f"ringtrain.fit: rank {rank} has other data than rank 0: pass the same on every rank, with seeds for"
                f" random operations, or ringtrain.from_rank_0(batches)"
            )
    return held_out, num_rows
