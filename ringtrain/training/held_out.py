"""Keras' `evaluate` and `predict` on a rank's part of the data, with the results of one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from ringtrain import data, hvd
from ringtrain.errors import ConfigError, DataError
from ringtrain.hvd.keras_patches import has_weights
from ringtrain.training import evaluation
from ringtrain.training.rows import errors_named
from ringtrain.training.run import callbacks_in, on_rank
from ringtrain.training.script_options import within_limits_of_keras


def evaluate(model: keras.Model, given: data.FitArguments, callbacks: Any, verbose: str | int) -> Mapping[str, Any]:
    """Metrics over all ranks by name. Collective."""

    def compute(held_out: data.Split, numbers: range, batches: Any, callbacks: evaluation.CallbacksOfRank) -> Any:
        callbacks.begin()
        return evaluation.evaluate_shard(model, held_out, numbers, batches, callbacks, is_prepared=False)

    states, of_rank = _on_parts(model, given, callbacks, verbose, "evaluate", model.test_step, compute)
    metrics = evaluation.over_all_ranks(model, states)
    logs = evaluation.logs_of_all(metrics, of_rank.logs_of_rank)
    hvd.run_together(lambda: of_rank.end(logs), of_script=True)
    return logs


def predict(model: keras.Model, given: data.FitArguments, callbacks: Any, verbose: str | int) -> Any:
    """Outputs of all ranks, in the order of the rows. Collective."""

    def compute(held_out: data.Split, numbers: range, batches: Any, callbacks: evaluation.CallbacksOfRank) -> bool:
        if not numbers:
            callbacks.on_predict_begin()
            callbacks.on_predict_end()
            return False
        with warnings.catch_warnings():  # Keras may not know the number of batches
            warnings.filterwarnings("ignore", "Your input ran out of data")
            model.predict(batches, verbose=0, callbacks=callbacks)
        return bool(model.stop_predicting)

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
        _, steps = within_limits_of_keras(1, given.steps_per_epoch)
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
