"""Horovod's Keras callbacks for Keras 3, and `CheckInSyncCallback`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.hvd.backend import Sum, horovod
from ringtrain.hvd.collectives import allgather_object
from ringtrain.hvd.keras_patches import has_schedule, has_weights, innermost, velocities
from ringtrain.hvd.placement import CPU
from ringtrain.hvd.sync import broadcast_model, check_in_sync


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the weights and optimizer state of one rank to all ranks, before the first step.

    If the model has no weights yet on any rank, the broadcast follows the first batch on all ranks. Put this callback
    before callbacks that compare or save weights.

    Args:
        root_rank: Rank that sends.
        device: Device of the broadcast. "": the CPU.
        local_variables: Variable or collection of variables to exclude from the broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local_variables: list[Any] = []
        single = isinstance(local_variables, keras.Variable | tf.Variable)
        for variable in [local_variables] if single else (local_variables or []):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the broadcast."""
        if not isinstance(var, keras.Variable | tf.Variable):
            raise ValueError(f"local_variables: got {var!r}, expected Keras variables")
        self._local_variables.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        has_weights_by_rank = allgather_object(has_weights(self.model), name="ringtrain_train_begin")
        if not self.broadcast_done and all(has_weights_by_rank):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank, self._local_variables, device=self.device or CPU)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's metrics by their mean over all ranks, weighted by each rank's number of samples.

    Put it before callbacks that read metrics (ReduceLROnPlateau, TensorBoard, ModelCheckpoint).

    Args:
        device: Device of the allreduce. "": the CPU.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._train_samples: float | None = None
        self._validation_samples = 1.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._train_samples, self._validation_samples = None, 1.0

    def on_test_begin(self, logs: Any = None) -> None:
        # Validation inside fit resets the metrics: from now on they count its samples.
        self._train_samples = _num_samples(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        self._validation_samples = _num_samples(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs or horovod.size() == 1:
            return
        train, validation = self._train_samples, self._validation_samples
        if train is None:
            train = _num_samples(self.model)
        numbers = {name: np.asarray(value) for name, value in sorted(logs.items())}
        values = {name: value.astype(np.float64) for name, value in numbers.items() if value.dtype.kind in "fiub"}
        parts = []
        for name, value in values.items():
            weight = validation if name.startswith("val_") else train
            flat = value.reshape(-1)
            parts += [flat * weight if weight else np.zeros(value.size), flat, np.array([weight])]
        with tf.device(self.device or CPU):
            sums = horovod.allreduce(tf.constant(np.concatenate(parts)), op=Sum, name="ringtrain_metric_average")
        flat = sums.numpy()
        for name, value in values.items():
            weighted, plain, weight = flat[: value.size], flat[value.size : 2 * value.size], flat[2 * value.size]
            flat = flat[2 * value.size + 1 :]
            if weight:
                mean = weighted / weight
            else:  # a train_step of its own that does not count in Keras' loss
                mean = plain / horovod.size()
            mean = mean.reshape(value.shape)
            logs[name] = mean if mean.ndim else float(mean)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint that saves the best model only, on rank 0.

    Set `filepath` before training; the other arguments are those of `keras.callbacks.ModelCheckpoint`. `horovod.keras`
    has no `save_weights_only`: a string in its place is used as `mode`, and the next argument as `save_freq`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool | str = False,
        mode: Any = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        if isinstance(save_weights_only, str):
            save_freq = save_freq if mode == "auto" else mode
            mode, save_weights_only = save_weights_only, False
        super().__init__(
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if horovod.rank() == 0:
            super()._save_model(*args, **kwargs)


class CheckInSyncCallback(keras.callbacks.Callback):
    """Runs `check_in_sync` after the first step, every `every_steps` steps and at the end of training.

    Args:
        every_steps: Steps between two checks, at least 1.

    Attributes:
        checksum: Result of the last check, 16 hexadecimal digits; "" before the first.
        seconds: Total time of all checks so far.
    """

    def __init__(self, every_steps: int = 500) -> None:
        super().__init__()
        if every_steps < 1:
            raise ValueError(f"every_steps: got {every_steps}, expected at least 1")
        self.every_steps = every_steps
        self.checksum = ""
        self.seconds = 0.0
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before = self._steps
        self._steps += self.model.steps_per_execution
        if (before - 1) // self.every_steps < (self._steps - 1) // self.every_steps:
            self._check()

    def on_train_end(self, logs: Any = None) -> None:
        self._check()

    def _check(self) -> None:
        start = time.perf_counter()
        self.checksum = check_in_sync(self.model)
        self.seconds += time.perf_counter() - start


def _num_samples(model: keras.Model) -> float:
    """Number of samples that the model's metrics have counted since their reset; 1 without a mean loss."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return float(metric.count)
    return 1.0


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`, from `start_epoch` up to `end_epoch`.

    The rate depends on epoch and batch only, so a resumed run, `fit(initial_epoch=...)`, continues the schedule.

    Args:
        initial_lr: Learning rate that is multiplied. None: that of the optimizer, which must not have made a step yet.
        multiplier: Function of the epoch, or a constant c for c ** (epoch - start_epoch).
        start_epoch: First epoch that is adjusted.
        end_epoch: First epoch that is no longer adjusted. None: adjust until the end.
        staircase: Adjust at the start of each epoch, by the integer epoch. False: before every batch, by
            epoch + batch / steps_per_epoch.
        momentum_correction: Scale momentum with the learning rate (Goyal et al. 2017, arXiv 1706.02677, section 3),
            for SGD and RMSprop with `momentum`, whose velocities contain the rate.
        steps_per_epoch: Batches per epoch, needed without `staircase` if Keras does not know the number.

    Raises:
        ValueError: In `on_train_begin`: the optimizer has a LearningRateSchedule, or has made steps and `initial_lr` is
            None, or the number of batches per epoch is unknown.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if has_schedule(optimizer):
            raise ValueError(
                f"{type(self).__name__}: the optimizer has a LearningRateSchedule of its own; give it a number, "
                "or leave the callback out"
            )
        if self.initial_lr is None:
            if int(optimizer.iterations) > 0:
                raise ValueError(
                    f"{type(self).__name__}: the optimizer has made {int(optimizer.iterations)} steps, so its learning "
                    "rate need not be the initial one: pass initial_lr"
                )
            self.initial_lr = float(optimizer.learning_rate)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: the batches per epoch are not known: pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if self.staircase:
            if batch == 0:
                self._set(self.current_epoch)
        else:
            self._set(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = innermost(self.model.optimizer)
        old, new = float(optimizer.learning_rate), float(np.float32((self.initial_lr or 0.0) * self.multiplier(epoch)))
        optimizer.learning_rate = new
        holds_rate = isinstance(optimizer, keras.optimizers.SGD | keras.optimizers.RMSprop) and optimizer.momentum
        if self.momentum_correction and holds_rate and old > 0 and new != old:
            # Velocities contain the old rate: v <- m v - lr g. Scaling them equals scaling m for one step.
            for velocity in velocities(optimizer):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    Goyal et al. 2017 (arXiv 1706.02677, section 2.2). With N ranks and e epochs, counted at the end of a batch:
    lr = initial_lr / N * (e * (N - 1) / warmup_epochs + 1).

    Args:
        initial_lr: Learning rate after the warm-up; None as in `LearningRateScheduleCallback`.
        warmup_epochs: Length of the warm-up in epochs.
        momentum_correction, steps_per_epoch: As in `LearningRateScheduleCallback`.
        verbose: 1: rank 0 prints the learning rate after the warm-up.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            num_ranks = horovod.size()
            done = epoch + 1.0 / self.steps_per_epoch  # type: ignore[operator]
            return (done * (num_ranks - 1) / warmup_epochs + 1) / num_ranks

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and horovod.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: warm-up finished at a learning rate of {rate:g}.")
