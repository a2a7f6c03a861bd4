"""Elastic training of Keras 3 models, under the names of `horovod.tensorflow.keras.elastic`.

Runs under `horovodrun --min-np`, over Gloo. Horovod's own Keras state calls `optimizer.variables()`, a list in Keras 3,
and its `run` takes the failure of a named collective for the end of training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from ringtrain.hvd.collectives import init
from ringtrain.hvd.sync import broadcast_model

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `func(state, ...)` survive the loss and the arrival of workers, starting it again from the last commit."""

    @functools.wraps(func)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.UnknownError as error:
            raise HorovodInternalError(error) from error

    return run_fn(guarded, _restart)


class KerasState(ObjectState):
    """A Keras 3 model and optimizer, and objects given by name, that are committed, restored and synchronized together.

    Args:
        model: A built model.
        optimizer: Its optimizer, if it is not compiled into the model.
        kwargs: Objects to keep with it; they become attributes.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer or model.optimizer
        if not model.built:
            raise ValueError(f"KerasState: {model.name} has no weights yet; call model.build(input_shape) first")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._committed: list[np.ndarray] = []
        self._keep()
        super().__init__(bcast_object=horovod.broadcast_object, get_rank=horovod.rank, **kwargs)

    def save(self) -> None:
        """Keeps the present state in host memory."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Goes back to the state that was kept last."""
        for variable, value in zip(self._variables(), self._committed, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Gives every worker the state of rank 0, and keeps it."""
        broadcast_model(self.model, 0, optimizer=self.optimizer)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._committed = [keras.ops.convert_to_numpy(variable).copy() for variable in self._variables()]

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *self.optimizer.variables]


class CommitStateCallback(keras.callbacks.Callback):
    """Commits `state` every `batches_per_commit` batches and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps the current batch in `state.batch`, 0 after an epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps the number of finished epochs in `state.epoch`, counted through restarts."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1


def _restart() -> None:
    horovod.shutdown()
    init()
