"""Measures the steps of a script's first `fit` for `ringtrain bench train`, and then ends the script."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from ringtrain import hvd
from ringtrain.errors import ConfigError

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext

WARM_STEPS = 3
FEWEST_CALLS = 4
"""calls of an epoch from which on its first and its last one are not measured"""
MOST_STEPS = 500
"""steps of a block"""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured: `protocol.for_script.ForScript.measure`."""

    out: str
    """file of the results, which rank 0 writes"""
    turns: int = 3
    """blocks of steps"""
    steps: int = 0
    """of a block; 0: as many as take block_s seconds"""
    block_s: float = 1.0
    seconds: float = 0.0
    """seconds for blocks, whatever their number; 0: `turns` blocks"""
    input_only: bool = False
    """read the batches of the steps, and train nothing"""


class Measuring(keras.callbacks.Callback):
    """Times the steps on all ranks, from the end of one to the end of the next; must be last in the list.

    Steps are those in the middle of epochs: the first fills the input pipeline, the last one may have fewer rows.
    """

    def __init__(self, run: RunContext, measure: Measure) -> None:
        super().__init__()
        self.run, self.measure = run, measure
        self.block: list[float] = []
        self.block_steps = 0  # not known until the warm-up has ended
        self.rows_per_s: list[float] = []
        self.begin_s = self.before_s = self.end_s = 0.0
        self.calls = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self.measure.input_only:
            self.model.train_function = self._read

    def _read(self, batches: Iterator[Any]) -> dict[str, float]:
        """Takes the batches of a call in place of Keras' function, which trains them."""
        for _ in range(int(self.model.steps_per_execution)):
            next(batches)
        return {"loss": 0.0}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls, self.before_s = 0, 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begin_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now_s = time.perf_counter()
        seconds = now_s - (self.before_s or self.begin_s)
        self.before_s = now_s
        self.calls += 1
        num_steps = self.run.numbers.steps_per_epoch
        has_few = math.ceil(num_steps / self.model.steps_per_execution) < FEWEST_CALLS
        if has_few or (self.calls > 1 and batch + 1 < num_steps):
            self._add(seconds)

    def on_train_end(self, logs: Any = None) -> None:
        if self.run.callbacks.stop.stopped_by in ("SIGINT", "SIGTERM", "SIGUSR1"):
            return
        if self.block_steps and len(self.block) > 1:
            self._end_block()
        if not self.rows_per_s:
            raise ConfigError(
                f"ringtrain.fit: the first call ends after {self.run.clock.global_step} steps, which are too few to be"
                f" measured: expected {FEWEST_CALLS * (WARM_STEPS + 2)} or more"
            )
        self._finish()

    def _add(self, seconds: float) -> None:
        """Adds a call of the step; ends the block, the measurement and the script if it was the last one."""
        self.block.append(seconds)
        if not self.block_steps:
            if len(self.block) >= WARM_STEPS:
                self._end_warm_up()
            return
        if len(self.block) >= self.block_steps:
            self._end_block()
            is_over = len(self.rows_per_s) >= self.measure.turns
            if self.measure.seconds:
                is_over = time.perf_counter() >= self.end_s
            if hvd.broadcast_object(is_over, root_rank=0, name="ringtrain_measured"):
                self._finish()
            self.before_s = time.perf_counter()

    def _end_warm_up(self) -> None:
        steps = self.measure.steps
        if not steps:
            steps = min(MOST_STEPS, max(2, math.ceil(self.measure.block_s / min(self.block))))
        self.block_steps = hvd.broadcast_object(steps, root_rank=0, name="ringtrain_block")
        self.block = []
        self.end_s = time.perf_counter() + self.measure.seconds
        self.before_s = time.perf_counter()

    def _end_block(self) -> None:
        mean_s = statistics.fmean(self.block)
        slowest_s = float(hvd.allreduce([mean_s], op=hvd.Max, name="ringtrain_measured_block")[0])
        self.rows_per_s.append(self._rows / slowest_s)
        self.block = []

    @property
    def _rows(self) -> int:
        """Rows that a call trains on all ranks."""
        return self.run.numbers.samples_per_step * int(self.model.steps_per_execution)

    def _finish(self) -> None:
        """Writes the results, and ends the script on all ranks."""

        def write() -> None:
            Path(self.measure.out).write_text(json.dumps(self._results()), encoding="utf-8")

        hvd.on_rank_0(write)
        raise SystemExit(0)

    def _results(self) -> dict[str, Any]:
        run = self.run
        step_s = self._rows / statistics.median(self.rows_per_s)
        return {
            "rows_per_s": self.rows_per_s,
            "step_s": step_s,
            "rows_per_step": self._rows,
            "num_ranks": run.size,
            "model": run.config.model.name,
            "parts": run.step_timer.own_times() if run.step_timer else {},
        }
