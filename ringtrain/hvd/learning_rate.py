"""Horovod's learning-rate callbacks for Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ringtrain.hvd.engine import horovod
from ringtrain.hvd.keras_hooks import innermost


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`, from `start_epoch` up to `end_epoch`.

    The rate depends on the epoch and batch alone, so a run that starts again with `fit(initial_epoch=...)` goes on
    where it was.

    Args:
        initial_lr: Learning rate that `multiplier` refers to. None takes the optimizer's, in a run that starts at its
            first step; a resumed optimizer no longer knows it.
        multiplier: A function of the epoch, or a constant c for c ** (epoch - start_epoch).
        start_epoch: First epoch that is adjusted.
        end_epoch: First epoch that is not adjusted any more.
        staircase: Adjust at the start of an epoch, by a whole number of epochs; otherwise before every batch, by
            epoch + batch / steps_per_epoch.
        momentum_correction: Scale momentum with the learning rate (Goyal et al. 2017, arXiv 1706.02677, section 3),
            for SGD and RMSprop with `momentum`, whose velocities hold the rate.
        steps_per_epoch: Batches per epoch, where Keras does not know it.
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
        if isinstance(innermost(optimizer)._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
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
            # Velocities hold the old rate: v <- m v - lr g. Scaling them is scaling m for one step.
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    Goyal et al. 2017 (arXiv 1706.02677, section 2.2). With N ranks and e epochs, counted at the end of a batch:
    lr = initial_lr / N * (e * (N - 1) / warmup_epochs + 1).

    Args:
        initial_lr: Learning rate after the warm-up; None as in `LearningRateScheduleCallback`.
        warmup_epochs: Length of the warm-up.
        momentum_correction, steps_per_epoch: As in `LearningRateScheduleCallback`.
        verbose: 1 lets rank 0 print the rate that was reached.
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


def _velocities(optimizer: Any) -> list[Any]:
    slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [velocity for velocity in slots if velocity is not None]
