"""Timeline of each rank, written step by step to the run folder, with its clock offset to rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from ringtrain import hvd
from ringtrain.errors import RunDirectoryError
from ringtrain.monitor import trace

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext

ROUNDS = 30
FLUSH_S = 1.0
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Timeline:
    """Writer of this rank's part of the timeline. The constructor and `close`, which merges all, are collectives."""

    def __init__(self, run: RunContext) -> None:
        self.parts = run.folder / trace.PARTS
        self.out = Path(run.timeline_file) if run.timeline_file else run.folder / "timeline.json"
        self.steps_left, self.flush_at_s = run.config.tracking.timeline_steps, 0.0
        self.rank = run.rank
        hvd.on_rank_0(self._clear)
        self.file = hvd.run_together(self._open)
        offset_s, error_s = clock_offset()
        about = {"rank": self.rank, "size": run.size, "host": socket.gethostname(), "process": os.getpid()}
        about |= {"offset_s": offset_s, "error_s": error_s, "gradients": hvd.step_timing.PLACE.gradients}
        self._write(about)
        if self.rank == 0:
            mark_cycles = os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0")
            hvd.start_timeline(str(self.parts / trace.HOROVOD), mark_cycles=mark_cycles)

    def step(self, global_step: int, edges_s: Sequence[float]) -> None:
        """Adds a step. `edges_s`: Unix times of begin, input, local gradients, reduced gradients and end."""
        if self.steps_left <= 0:
            return
        self._write([global_step, list(edges_s), *hvd.step_timing.PLACE.each()])
        self.steps_left -= 1
        if not self.steps_left:
            self._end()

    def close(self) -> None:
        """Merges the ranks' parts on rank 0."""
        if self.steps_left:
            self._end()
        with contextlib.suppress(OSError):
            self.file.close()
        hvd.run_together(lambda: None)  # until all parts are complete
        if self.rank == 0:
            try:
                trace.merge(self.parts, self.out)
            except (RunDirectoryError, OSError) as error:  # the run itself is not affected
                print(f"ringtrain: no timeline: {error}", file=sys.stderr)

    def _clear(self) -> None:
        try:
            self.parts.mkdir(exist_ok=True)
            for path in self.parts.iterdir():
                path.unlink()
        except OSError as error:
            raise RunDirectoryError(f"{self.parts}: cannot be written: {error.strerror}") from error

    def _open(self) -> TextIO:
        path = self.parts / f"rank-{self.rank}.jsonl"
        try:
            self.parts.mkdir(parents=True, exist_ok=True)  # a host may have a local disk
            return open(path, "w", encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be written: {error.strerror}") from error

    def _write(self, line: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end training
            self.file.write(f"{json.dumps(line)}\n")
            if time.monotonic() > self.flush_at_s:
                self.file.flush()
                self.flush_at_s = time.monotonic() + FLUSH_S

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.file.flush()
        if self.rank == 0:
            hvd.stop_timeline()


def clock_offset(now: Callable[[], float] = time.time, clock: str | None = None) -> tuple[float, float]:
    """Seconds by which this rank's clock is behind rank 0's, and the maximum error; 0.0 for the same clock. Collective.

    Cristian's algorithm (1989): rank 0 reads its clock between the begin of one collective and the end of another, on
    all other ranks. Of several rounds, the shortest is the most accurate. `clock` identifies the clock of a host.
    """
    if clock is None:
        clock = BOOT.read_text() if BOOT.exists() else socket.gethostname()
    is_same = hvd.broadcast_object(clock, root_rank=0, name="ringtrain_clock") == clock
    rounds = []
    if not all(hvd.allgather_object(is_same, name="ringtrain_same_clock")):
        for number in range(ROUNDS):
            hvd.allreduce([0.0], name=f"ringtrain_clock_{number}")  # all ranks begin the round together
            begin_s = now()
            hvd.allreduce([0.0], name=f"ringtrain_clock_to_{number}")
            # float64 seconds: float32 would round them to minutes.
            received = hvd.broadcast(np.array([now()]), root_rank=0, name=f"ringtrain_clock_from_{number}")
            end_s = now()
            rounds.append((end_s - begin_s, float(received[0]) - (begin_s + end_s) / 2))
    if is_same or not rounds:
        return 0.0, 0.0
    shortest_s, offset_s = min(rounds)
    return offset_s, shortest_s / 2
