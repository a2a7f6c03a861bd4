"""Ends a run on all ranks after the same step: signals, a time limit, callbacks, a non-finite loss."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ringtrain import hvd
from ringtrain.config.sections import nearest
from ringtrain.errors import ConfigError, DataError, NonFiniteLoss
from ringtrain.monitor.journal import Journal
from ringtrain.training.clock import Ending
from ringtrain.training.console import A_CALLBACK, leave_closed_terminal

if TYPE_CHECKING:
    from ringtrain.training.run import Run

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
NAMES = {number.name: number for number in SIGNALS}
TIME_LIMIT = "train.max_time_s"


class Signals:
    """Records the first of SIGTERM, SIGINT and SIGUSR1; a SIGINT after it ends the process at once."""

    def __init__(self, journal: Journal) -> None:
        self.received = 0
        self.received_s = 0.0
        """time.monotonic() of it"""
        self.journal = journal
        self._before: dict[signal.Signals, Any] = {}
        self.note = ""
        """text that is printed when a signal is received"""
        self._depth = 0
        """contexts within each other: handlers stay until the outermost one ends"""

    def __enter__(self) -> Signals:
        if not self._depth:
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
                self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._receive)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal that was received; 0: none was."""
        return 128 + self.received if self.received else 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
            number = signal.SIGTERM
        if number == signal.SIGINT and self.received:
            os._exit(128 + number)
        if not self.received:
            self.received, self.received_s = number, time.monotonic()
            if self.note:  # not by `print`, which it may interrupt
                with contextlib.suppress(OSError):
                    os.write(2, f"{self.note}\n".encode())
        self.journal.write("signal", signal=signal.Signals(number).name)


class StopTogether(keras.callbacks.Callback):
    """Ends training on all ranks after the same step, at the request of any rank."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, config, steps_per_epoch = run, run.config, run.job.numbers.steps_per_epoch
        every_save = config.checkpoint.every_steps or steps_per_epoch
        # Requests are exchanged in a small allreduce, also before a save, so that none comes after a non-finite loss.
        self.every_steps = {config.health.agree_every_steps, every_save, steps_per_epoch}
        self._agrees_each_step = any(map(has_batch_hooks, run.job.users_callbacks))
        """whether a callback of this rank may ask for the end after any step; the ranks agree on that, too"""
        self._has_agreed = False
        before = run.start.ending
        self.is_ended = before.is_ended or run.start.is_ended
        """whether a callback has asked for the end, also if a signal came first; the same on every rank"""
        self.stopped_by = before.stopped_by
        """a signal's name, "train.max_time_s" or "a callback"; "" if training goes on to its last step"""
        if self.is_ended:
            self.stopped_by = self.stopped_by or A_CALLBACK
        self._reason = before.requested
        self._begin_s = time.monotonic()
        self._first_bad_step = 0

    @property
    def exit_code(self) -> int:
        """0, or 128 + the number of the signal that ended training."""
        return 128 + NAMES[self.stopped_by] if self.stopped_by in NAMES else 0

    @property
    def grace_ends_s(self) -> float:
        """When ranks are killed after the signal that ended training, by time.monotonic(); infinity: they are not."""
        if self.stopped_by != signal.SIGTERM.name or not self.run.attempt.grace_s:
            return math.inf
        return (self.run.signals.received_s or time.monotonic()) + self.run.attempt.grace_s

    @property
    def ending(self) -> Ending:
        """Agreements and requests so far, with which other ranks continue."""
        return Ending(self.stopped_by, self._reason, self.is_ended, self.run.callbacks.saver.is_closed)

    def request(self, reason: str) -> None:
        """Requests the end of training at the next agreement of the ranks, at the latest after the epoch."""
        self._reason = self._reason or reason

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        global_step = self.run.clock.global_step
        self._read_stop_training()
        if not self._first_bad_step and not _is_finite(logs or {}):
            self._first_bad_step = global_step
        # A stop that was asked for before an epoch's first step ends training after it, as in Keras.
        is_first = not self._has_agreed or self.run.clock.before % self.run.job.numbers.steps_per_epoch == 0
        is_early = self.run.clock.before < self.run.start.global_step + self.run.config.health.agree_every_steps
        compares = is_early and self.run.strategy.fingerprint() is not None  # before other batches are trained
        if compares or is_first or any(map(self.run.clock.passed, self.every_steps)):
            self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._read_stop_training()
        self._agree()

    def _read_stop_training(self) -> None:
        """Turns a callback's `stop_training` into a request: Keras would end this rank alone, and the others wait."""
        if self.model.stop_training:
            self.request(A_CALLBACK)
            self.model.stop_training = False

    @hvd.during("reduce")
    def _agree(self) -> None:
        run, now_s = self.run, time.monotonic()
        time_is_up = run.rank == 0 and 0 < run.config.train.max_time_s < now_s - self._begin_s
        ends_quietly = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in run.job.users_callbacks)
        requests = [run.signals.received, time_is_up, bool(self._reason), ends_quietly, self._agrees_each_step]
        batches = run.strategy.fingerprint() or 0
        problems = [self._first_bad_step > 0, run.lock.is_lost]
        local = np.array([*problems, *requests, batches, -batches], np.int32)
        if run.size > 1:
            local = hvd.allreduce(local, op=hvd.Max, name="ringtrain_stop").numpy()
        bad, taken_over, number, time_is_up, requested, ends_quietly, each, highest, lowest = local
        self._has_agreed = True
        if each:
            self.every_steps = {1}
        if highest != -lowest:
            self._raise_other_batches(batches)
        if taken_over:
            hvd.run_together(run.lock.raise_if_lost)
        if bad and not ends_quietly:
            self._raise_together()
        if bad:  # TerminateOnNaN has asked for the end, which is no error then; the last checkpoint is older
            run.callbacks.saver.is_closed = requested = True
        self.is_ended = self.is_ended or bool(requested)
        if not self.stopped_by and (number or time_is_up or requested):
            reason = TIME_LIMIT if time_is_up else self._reason or A_CALLBACK
            self.stopped_by = signal.Signals(number).name if number else reason
        if self.stopped_by:
            self.model.stop_training = True

    def _raise_other_batches(self, batches: int) -> None:
        of_ranks = hvd.allgather_object((batches, socket.gethostname()), name="ringtrain_other_batches")
        other = next(rank for rank, (of_rank, _) in enumerate(of_ranks) if of_rank != of_ranks[0][0])
        raise DataError(
            f"rank {other} on {of_ranks[other][1]} has other batches than rank 0, by step {self.run.clock.global_step}:"
            f" {self.run.job.data_set.train.advice}"
        )

    def _raise_together(self) -> None:
        first_bad = hvd.allgather_object((self._first_bad_step, socket.gethostname()), name="ringtrain_bad_loss")
        step, rank, host = min((step, rank, host) for rank, (step, host) in enumerate(first_bad) if step)
        epoch, batch = divmod(step - 1, self.run.job.numbers.steps_per_epoch)
        where = "" if hvd.is_shared(self.model) else f" on rank {rank} ({host})"  # each rank has the loss of all
        raise NonFiniteLoss(
            f"non-finite loss{where} at step {step} (epoch {epoch + 1}, batch {batch + 1}): lower the"
            f" learning rate or check this batch; the last checkpoint is older"
        )


def has_batch_hooks(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback has code of its own at batches, which may ask for the end of training."""
    for name in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"):
        module = getattr(callback, name).__module__ or ""  # of the function: Keras' own ask for no end there
        if module.partition(".")[0] not in ("keras", "ringtrain"):
            return True
    return False


def _is_finite(logs: Mapping[str, Any]) -> bool:
    """Returns whether the loss of a step is finite; without one, as of a GAN, all that are named ..._loss."""
    if "loss" in logs:
        losses = [logs["loss"]]
    else:
        losses = [value for name, value in logs.items() if name.endswith("_loss")]
    # A number in nearly all cases, for which NumPy takes a hundred times as long.
    return all(math.isfinite(loss) if isinstance(loss, float) else np.isfinite(loss).all() for loss in losses)


def check_monitor(monitor: str, metrics: Sequence[keras.metrics.Metric | str], has_more: bool = False) -> None:
    """Raises ConfigError unless `monitor` is loss or a metric, also after test_ or, with `has_more`, an output."""
    names = ["loss"]
    for metric in metrics:
        names.append(metric if isinstance(metric, str) else metric.name)
    known = [*names, *(f"test_{name}" for name in names)]
    if monitor not in known and not (has_more and monitor.endswith(tuple(f"_{name}" for name in names))):
        raise ConfigError(f"train.monitor: got {monitor}, {nearest(monitor, known)}")
