"""Ends a run on all ranks after the same step: signals, time limits, callbacks, non-finite loss."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras
import numpy as np

from ringtrain import hvd
from ringtrain.config import Config
from ringtrain.errors import DataError, NonFiniteLoss
from ringtrain.monitor import journal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
NAMES = {number.name: number for number in SIGNALS}


class Signals:
    """Records the first of SIGTERM, SIGINT and SIGUSR1; a SIGINT after it ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            os._exit(128 + number)
        self.received = self.received or number
        journal.note("signal", signal=signal.Signals(number).name)


class StopTogether(keras.callbacks.Callback):
    """Ends training on all ranks after the same step, at the request of any rank.

    Every few steps, the ranks exchange their requests in one small allreduce; also before every checkpoint, so that
    none is saved after a non-finite loss. A callback on a single rank that sets `model.stop_training`, such as Keras'
    EarlyStopping, ends all ranks as well. It must be on every rank, after all callbacks that may request a stop and
    before those that save.

    Args:
        global_step: steps completed before.
        raise_unreadable: raises DataError if this rank could not read a sample.

    Attributes:
        save_is_due: whether the ranks have just agreed that checkpoint.every_minutes is over; the same on every rank.
        stopped_by: why training ended before its last step: a signal's name, "train.max_time_s", "train.patience",
            "train.target_accuracy" or "a callback"; "" if it did not.
    """

    def __init__(
        self,
        signals: Signals,
        config: Config,
        global_step: int,
        steps_per_epoch: int,
        raise_unreadable: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.raise_unreadable = raise_unreadable
        self.signals = signals
        every_save = config.checkpoint.every_steps or steps_per_epoch
        self.every_steps = {config.health.agree_every_steps, every_save, steps_per_epoch}
        self.max_time_s = config.train.max_time_s
        self.global_step = global_step
        self.steps_per_epoch = steps_per_epoch
        self.every_save_s = 60 * config.checkpoint.every_minutes
        self.save_is_due = False
        self.stopped_by = ""
        self._wanted = ""
        self._begin_s = self._saved_s = time.monotonic()
        self._first_bad_step = 0

    @property
    def exit_code(self) -> int:
        """0, or 128 + the number of the signal that ended training."""
        return 128 + NAMES[self.stopped_by] if self.stopped_by in NAMES else 0

    def want(self, reason: str) -> None:
        """Requests the end of training at the next agreement of the ranks, at the latest after the epoch."""
        self._wanted = self._wanted or reason

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.global_step += 1
        self.save_is_due = False
        self._take_over()
        if not self._first_bad_step and not math.isfinite(float((logs or {}).get("loss", 0.0))):
            self._first_bad_step = self.global_step
        if any(self.global_step % every == 0 for every in self.every_steps):
            self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._take_over()
        self._agree()

    def _take_over(self) -> None:
        """Turns a callback's `stop_training` into a request: Keras would end this rank alone, and the others wait."""
        if self.model.stop_training and not self.stopped_by:
            self.want("a callback")
            self.model.stop_training = False

    @hvd.during("reduce")
    def _agree(self) -> None:
        now_s = time.monotonic()
        time_is_up = hvd.rank() == 0 and 0 < self.max_time_s < now_s - self._begin_s
        save = hvd.rank() == 0 and 0 < self.every_save_s < now_s - self._saved_s
        wishes = [self.signals.received, time_is_up, bool(self._wanted), save]
        own = np.array([self._first_bad_step > 0, self._unreadable(), *wishes], np.int32)
        if hvd.size() > 1:
            own = hvd.allreduce(own, op=hvd.Max, name="ringtrain_stop").numpy()
        bad, unreadable, number, time_is_up, wanted, save = own
        if save:
            self.save_is_due, self._saved_s = True, now_s
        if unreadable:
            hvd.run_together(self.raise_unreadable)
        if bad:
            self._raise_together()
        if not self.stopped_by and (number or time_is_up or wanted):
            asked = "train.max_time_s" if time_is_up else self._wanted or "a callback"
            self.stopped_by = signal.Signals(number).name if number else asked
            self.model.stop_training = True

    def _unreadable(self) -> bool:
        try:
            self.raise_unreadable()
        except DataError:
            return True
        return False

    def _raise_together(self) -> None:
        everybody = hvd.allgather_object((self._first_bad_step, socket.gethostname()), name="ringtrain_bad_loss")
        step, rank, host = min((step, rank, host) for rank, (step, host) in enumerate(everybody) if step)
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        raise NonFiniteLoss(
            f"the loss is no finite number on rank {rank} ({host}) from step {step} on (epoch {epoch + 1}, batch"
            f" {batch + 1}): look at the learning rate and at that batch's data; the last checkpoint is from before"
        )
