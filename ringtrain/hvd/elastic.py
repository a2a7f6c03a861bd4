"""Elastic training of Keras 3 models, under the names of `horovod.tensorflow.keras.elastic`.

For runs under `horovodrun --min-np`, over Gloo. Horovod's Keras state calls `optimizer.variables()`, a list in Keras 3,
and its `run` ends training if a named collective fails.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.hvd.backend import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    ObjectState,
    horovod,
    network,
    notification_manager,
)
from ringtrain.hvd.batch_norm import is_shared, seeds
from ringtrain.hvd.collectives import allgather_object, broadcast_object, broadcast_variables, init, shutdown
from ringtrain.hvd.keras_patches import compiled_optimizer, has_weights, slots_of
from ringtrain.hvd.placement import CPU
from ringtrain.hvd.process import PROCESS, elastic
from ringtrain.hvd.sync import broadcast_model
from ringtrain.protocol import services

is_on = elastic
SAME_FAILURES = 3


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)` so that it restarts from the last commit when workers fail, leave or join.

    If the same error message occurs three times without a commit in between, the cause is not a lost worker: the third
    exception is raised unchanged.
    """

    @functools.wraps(func)
    def survivor(state: Any, *args: Any, **kwargs: Any) -> Any:
        listen()
        notification_manager.register_listener(state)
        failures: list[tuple[str, int]] = []
        try:
            while True:
                try:
                    state.sync()
                    return func(state, *args, **kwargs)
                except (tf.errors.UnknownError, HorovodInternalError) as error:
                    # Numbers are replaced: the message names the socket that was closed, a different one each time.
                    failures.append((re.sub(r"\d+", "0", str(error)), getattr(state, "num_commits", 0)))
                    if failures[-SAME_FAILURES:] == failures[-1:] * SAME_FAILURES:
                        raise
                    state.restore()
                except HostsUpdatedInterrupt:
                    pass
                shutdown()
                PROCESS.has_ended = False  # these ranks meet again
                PROCESS.hang_up()
                init()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return survivor


def listen() -> None:
    """Starts to receive host changes from Horovod's driver, also before `run`; does nothing outside elastic runs.

    The driver announces a change to ranks that listen: one before `run` or during a restart would be lost.
    """
    if is_on() and not notification_manager._listeners:
        services.restrict(network, services.address_of(os.environ.get("HOROVOD_GLOO_IFACE", "")))
        notification_manager.register_listener(_Listener())  # before the driver knows that this rank listens
        notification_manager.init()


class _Listener:
    def on_hosts_updated(self, timestamp: int, update_res: Any) -> None:
        """Called by Horovod."""
        PROCESS.host_changes.put((timestamp, update_res))


class _VariablesState(_Listener, ObjectState):
    """Variables and named objects that are committed, restored and synchronized together."""

    def __init__(self, **kwargs: Any) -> None:
        self._committed: list[tuple[Any, np.ndarray]] = []
        self.num_commits = 0
        self._keep()
        super().__init__(bcast_object=broadcast_object, get_rank=horovod.rank, **kwargs)

    def commit(self) -> None:
        """Saves the current state, and restarts the function of `run` if hosts have joined or left."""
        self.num_commits += 1
        super().commit()

    def check_host_updates(self) -> None:
        """Restarts the function of `run` on all workers if any of them was notified of a change of hosts.

        Horovod's method asks rank 0 only. If hosts have only left, it skips `sync` on the others, even if a spare host
        replaces them and waits for `sync`.
        """
        notified = not PROCESS.host_changes.empty()
        while not PROCESS.host_changes.empty():
            PROCESS.host_changes.get()
        with tf.device(CPU):
            any_notified = horovod.allreduce(tf.constant(int(notified)), op=horovod.Max, name="ringtrain_hosts_updated")
        if any_notified > 0:
            raise HostsUpdatedInterrupt(skip_sync=False)

    def save(self) -> None:
        """Copies the current state to host memory."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Restores the state that was saved last."""
        for variable, value in self._committed:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all workers, and saves it; subclasses broadcast the variables first."""
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._committed = [(one, keras.ops.convert_to_numpy(one).copy()) for one in self._variables()]

    def _variables(self) -> list[Any]:
        raise NotImplementedError


class KerasState(_VariablesState):
    """Keras 3 model, optimizer and named objects that are committed, restored and synchronized together.

    Args:
        model: Built model.
        optimizer: Optimizer of the model. None: the one it was compiled with, if any.
        backend: For TensorFlow 1; ignored.
        kwargs: Objects to keep with the model; they become attributes.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = compiled_optimizer(model) if optimizer is None else optimizer
        if not has_weights(model):
            raise ValueError(f"KerasState: {model.name} has no weights yet; call model.build(input_shape) first")
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def sync(self) -> None:
        broadcast_model(self.model, 0, optimizer=self.optimizer)
        super().sync()

    def _variables(self) -> list[Any]:
        slots = slots_of(self.model, self.optimizer)
        return [*self.model.weights, *slots, *(seeds(self.model) if is_shared(self.model) else [])]


TensorFlowKerasState = KerasState


class SharedKerasState(KerasState):
    """`KerasState` of a model whose step keeps it equal on all ranks, and is undone as a whole if a reduction fails.

    So nothing is copied: a commit only asks for new hosts, and after a change the rank that is furthest gives its
    state. Two ranks are at most a step apart, since a reduction needs all of them. `settle` returns the model to the
    end of the last complete step, and this rank's progress, a tuple, without a collective; `synced` follows `sync`.
    """

    def __init__(
        self, model: keras.Model, settle: Callable[[], tuple[Any, ...]], synced: Callable[[], None], **kwargs: Any
    ) -> None:
        self._settle, self._synced = settle, synced
        super().__init__(model, **kwargs)

    def commit(self) -> None:
        self.num_commits += 1
        self.check_host_updates()

    def save(self) -> None:
        """Does nothing."""

    def restore(self) -> None:
        """Does nothing: `sync` follows."""

    def sync(self) -> None:
        """Sends the state of the rank that is furthest to all others."""
        own = self._settle()
        progress = allgather_object(own, name="ringtrain_progress")
        root = progress.index(max(progress))
        # If the rank ahead is lost while it sends, the others continue as they were: a step behind, or new.
        if own < progress[root]:
            behind = [keras.ops.convert_to_numpy(one) for one in self._variables()]
        else:
            behind = []
        try:
            broadcast_model(self.model, root, optimizer=self.optimizer)
            self._bcast_object = functools.partial(broadcast_object, root_rank=root)
            ObjectState.save(self)
            ObjectState.sync(self)
        except BaseException:
            for variable, value in zip(self._variables(), behind, strict=False):
                variable.assign(value)
            raise
        self._synced()

    def _keep(self) -> None:
        """Does nothing."""


class TensorFlowState(_VariablesState):
    """TensorFlow or Keras variables and named objects that are committed, restored and synchronized together.

    Args:
        variables: Variables to keep. Horovod's default, all variables of a graph, exists in TensorFlow 1 only.
        session: For TensorFlow 1; ignored.
        kwargs: Objects to keep with the variables; they become attributes.

    Raises:
        ValueError: No variables are given.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if not variables:
            raise ValueError("TensorFlowState: got no variables; TensorFlow 2 keeps no list of all: give them")
        self.variables = list(variables)
        super().__init__(**kwargs)

    def sync(self) -> None:
        broadcast_variables(self.variables, 0)
        super().sync()

    def _variables(self) -> list[Any]:
        return self.variables


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
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        """Commits the state."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the current batch, and to 0 after each epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of finished epochs, including those before a restart."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
