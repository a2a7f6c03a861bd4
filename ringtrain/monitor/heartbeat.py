"""Heartbeats: every rank reports its step and phase each second, and blocking ranks and stragglers are named.

A background thread of each rank connects to that of rank 0. Steps have no additional collective, and training does not
depend on the thread: a rank that cannot connect to rank 0 prints one line and continues.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import keras

from ringtrain import hvd
from ringtrain.config import HealthConfig
from ringtrain.errors import Stalled
from ringtrain.monitor import diagnosis
from ringtrain.monitor.diagnosis import Row, Times
from ringtrain.protocol import failures, status, transport

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext

HEARTBEAT_S = 1.0
BETWEEN_MEASUREMENTS_S = 0.02
STACKS_TIMEOUT_S = 3.0
"""time for a blocking rank to send its stacks"""
REPORT_FIRST_S = 5.0
"""delay before the other ranks exit, so that the stall report reaches the launcher first"""
RECONNECT_S = 10.0
FIRST_CALL_S = 5.0
"""maximum time that training waits for the first connection"""
STACK_LINES = 40
IDLE_THREADS = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py", "multiprocessing/pool.py")


class StepTimer(keras.callbacks.Callback):
    """Callback that measures the parts of this rank's steps; must follow `Clock` in the list.

    It measures one step in BETWEEN_MEASUREMENTS_S, since reading the timestamps takes 0.1 ms; all steps for a timeline.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__()
        self.run, self.tracker = run, hvd.step_timing.PLACE
        self.own_steps = 0
        self.begin_s = 0.0
        self.window: deque[tuple[float, float, float, float]] = deque(maxlen=diagnosis.WINDOW_STEPS)
        self.totals: list[float] = [0.0] * 4
        self.measured_steps = 0
        self._next = 1
        self._returned_s = 0.0
        self._waited_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._returned_s = 0.0  # time between epochs belongs to no step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begin_s = time.time()
        self.tracker.enter("step")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end_s, waited_s = time.time(), self.tracker.waited_s
        self.own_steps += 1
        if self.run.timeline or self.own_steps >= self._next:
            self._measure(end_s, waited_s)
            # By number, not by time, which would prefer long steps. With callbacks, which may be what is slow.
            step_s = end_s - (self._returned_s or self.begin_s)
            self._next = self.own_steps + max(1, int(BETWEEN_MEASUREMENTS_S / max(1e-4, step_s)))
        self._returned_s, self._waited_s = end_s, waited_s
        self.tracker.enter("callbacks")

    def _measure(self, end_s: float, waited_s: float) -> None:
        """Adds the parts of the step that has just ended."""
        input_s, computed_s, reduced_s = self.tracker.moments()
        # Without new timestamps, as with a user's train_step, the whole step counts as computing.
        input_s = input_s if self.begin_s <= input_s <= end_s else self.begin_s
        wait_s = max(0.0, reduced_s - computed_s) if computed_s >= input_s else 0.0
        between_s = self.begin_s - self._returned_s if self._returned_s else 0.0
        waited_between_s = waited_s - self._waited_s if self._returned_s else 0.0
        step = (
            max(0.0, input_s - self.begin_s),
            max(0.0, end_s - input_s - wait_s),
            max(0.0, between_s - waited_between_s),
            max(0.0, wait_s + waited_between_s),
        )
        if self.run.timeline:
            edges_s = self.begin_s, input_s, computed_s, reduced_s, end_s
            self.run.timeline.step(self.run.clock.global_step, edges_s)
        if self.own_steps > 1:  # the first step builds the graph
            self.measured_steps += 1
            self.window.append(step)
            self.totals = [total + seconds for total, seconds in zip(self.totals, step, strict=True)]

    def phase(self) -> str:
        """Current phase of this rank, including the parts of a step."""
        if self.tracker.phase != hvd.step_timing.GRAPH:
            return self.tracker.phase
        input_s, computed_s, reduced_s = self.tracker.moments()
        if input_s < self.begin_s - 1e-3:  # timestamps are rounded
            return "input"
        if computed_s < input_s:
            return "compute"
        return "reduce" if reduced_s < computed_s else "update"


class Monitor:
    """Heartbeat thread of one rank, as a context manager around training. Exits with code 75 when the job stalls."""

    def __init__(self, run: RunContext) -> None:
        self.run, self.config, self.journal, self.clock = run, run.config.health, run.journal, run.clock
        self.step_timer = StepTimer(run)
        self.rank, self.size, self.host = run.rank, run.size, socket.gethostname()
        self.slow = diagnosis.SlowRanks(self.config.straggler_factor)
        self.rows: dict[int, Row] = {}
        self._is_wanted = bool(self.config.stall_timeout or self.config.straggler_factor)
        self._transport = transport.Wire(secrets.token_hex(16), self._is_wanted and self.rank == 0 and self.size > 1)
        row = Row(self.rank, self.host, os.getpid(), run.status.descriptor)
        address = (row, transport.own_addresses(), self._transport.port, self._transport.token)
        self._rank_0, addresses, self._port, self._transport.token = hvd.broadcast_object(
            address, 0, name="ringtrain_beats"
        )
        self._addresses = ["127.0.0.1", *addresses] if self._rank_0.host == self.host else addresses
        self._leaving, self._connected = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringtrain-heartbeat", daemon=True)
        self._progress: Any = None
        self._idle_s = 0.0
        self._warned = False
        self._asked_s: float | None = None
        self._wants_stacks = False
        self._silent: list[Row] = []

    def __enter__(self) -> Monitor:
        self.step_timer.tracker.on_change = self._put_status
        if self._is_wanted:
            self._thread.start()
            # A rank that hangs immediately must be known to rank 0.
            self._connected.wait(FIRST_CALL_S if self.rank else 0.0)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.journal.write_failure(error, global_step=self.clock.global_step)
        self.step_timer.tracker.on_change = lambda: None
        self._leaving.set()
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * HEARTBEAT_S)

    def own_times(self) -> dict[str, Any]:
        """Step times of this rank for summary.json: medians over the last steps, and totals of all but the first."""
        num_steps = max(0, self.step_timer.own_steps - 1)
        of_all = num_steps / max(1, self.step_timer.measured_steps)
        scaled = [seconds * of_all for seconds in self.step_timer.totals]
        totals = dataclasses.replace(Times.of([scaled], sum), num_steps=num_steps)
        return {
            "rank": self.rank,
            "host": self.host,
            **dataclasses.asdict(Times.of(list(self.step_timer.window))),
            "totals": dataclasses.asdict(totals),
        }

    def _put_status(self) -> None:
        self.run.status.put(self.clock.global_step, self.step_timer.tracker.phase)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._exchanged_s = time.monotonic()
        try:
            self._receive_heartbeats() if self.rank == 0 else self._send_heartbeats()
        except Exception:  # a bug here must not end training
            _print(f"rank {self.rank} is no longer monitored:\n{traceback.format_exc()}")

    def _receive_heartbeats(self) -> None:
        """Thread of rank 0: receives all heartbeats and finds stalls and stragglers."""
        self.rows[0] = self._rank_0
        while not self._leaving.is_set():
            ask = self._asked_s is not None
            silent = [row for row in self.rows.values() if row.is_silent]
            blocking = diagnosis.blocking_ranks(self.rows.values()) if ask else []
            message = {
                "row": dataclasses.asdict(self.rows[0]),
                "silent": [[row.rank, row.host, row.process, row.status] for row in silent],
                "stacks_of": [row.rank for row in blocking],
            }
            received, passed_s = self._exchange(message)
            for rank, row in self.rows.items():
                self.rows[rank] = dataclasses.replace(row, silent_s=row.silent_s + passed_s)
            for fields in received:
                row = Row.from_json(fields["row"])
                self.rows[row.rank] = row
            self._silent = silent
            self.rows[0] = self._local_row(with_stacks=ask)
            self._check_for_stragglers()
            if self.config.stall_timeout:
                self._check_for_stall()
        self._transport.exchange({"row": None, "done": True}, 0.0)
        self._transport.close()

    def _send_heartbeats(self) -> None:
        """Thread of the other ranks: sends heartbeats, follows rank 0's requests, and supervises rank 0."""
        done = reported = False
        rank_0_silent_s = 0.0
        while not self._leaving.is_set() and not done:
            if not self._transport.is_connected:
                if self._transport.connect(self._addresses, self._port, _message(self._local_row())):
                    self.rows.setdefault(0, self._rank_0)
                elif not self.rows and not reported:
                    reported = True
                    where = ", ".join(self._addresses)
                    _print(
                        f"rank {self.rank} on {self.host} cannot connect to rank 0 at {where}, port {self._port}:"
                        " training continues without monitoring this rank: check the firewall"
                    )
                self._connected.set()
                if not self.rows:
                    self._leaving.wait(RECONNECT_S)
                    continue
            received, passed_s = self._exchange(_message(self._local_row(self._wants_stacks)))
            rank_0_silent_s = 0.0 if received else rank_0_silent_s + passed_s
            if self._leaving.is_set():
                break
            for message in received:
                done = done or bool(message.get("done"))
                if message.get("end"):
                    self._end_after(message["end"])
                if message.get("row"):
                    self.rows[0] = Row.from_json(message["row"])
                    self._silent = [Row(*fields) for fields in message["silent"]]
                    self._wants_stacks = self.rank in message["stacks_of"]
            if 0 in self.rows and self.config.stall_timeout and not done:
                self.rows[0] = dataclasses.replace(self.rows[0], silent_s=rank_0_silent_s)
                self._check_for_rank_0()
        self._transport.exchange(_message(dataclasses.replace(self._local_row(), is_done=True)), 0.0)
        self._transport.close()

    # ---- heartbeat of this rank -------------------------------------------------------------------------------------

    def _exchange(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
        """Sends a heartbeat; returns the messages received in one interval and its length. Updates the idle time."""
        received = self._transport.exchange(message, HEARTBEAT_S)
        # Time in which this thread did not run, as in a suspended job, does not count.
        now_s = time.monotonic()
        passed_s, self._exchanged_s = min(now_s - self._exchanged_s, 2 * HEARTBEAT_S), now_s
        tracker = self.step_timer.tracker
        progress = (self.clock.global_step, tracker.changes, tracker.moments())
        self._idle_s = self._idle_s + passed_s if progress == self._progress else 0.0
        self._progress = progress
        return received, passed_s

    def _local_row(self, with_stacks: bool = False) -> Row:
        here = [row for row in self._silent if row.host == self.host]
        return Row(
            rank=self.rank,
            host=self.host,
            process=os.getpid(),
            status=self.run.status.descriptor,
            step=self.clock.global_step,
            own_steps=self.step_timer.own_steps,
            phase=self.step_timer.phase(),
            idle_s=self._idle_s,
            times=Times.of(list(self.step_timer.window)),
            stacks=stacks(self._thread.ident) if with_stacks else "",
            saw={str(row.rank): status.look_at(row.process, row.status) for row in here},
        )

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _check_for_stragglers(self) -> None:
        rows = list(self.rows.values())
        if len(rows) < self.size or any(row.is_done for row in rows):
            return
        for row, part, times in self.slow.look(rows):
            _print(diagnosis.straggler_text(row, part, times))
            facts = {"of_rank": row.rank, "of_host": row.host, "part": part, "times": round(times, 2)}
            self.journal.write("straggler", global_step=row.step, **facts, **dataclasses.asdict(row.times))

    def _check_for_stall(self) -> None:
        rows = list(self.rows.values())
        idle_s = diagnosis.idle_s(rows)
        if idle_s <= 2 * HEARTBEAT_S:
            self._warned, self._asked_s = False, None
        if not self._warned and idle_s > diagnosis.warning_s(rows, self.config.stall_timeout):
            blocking = diagnosis.blocking_ranks(rows)
            late = idle_s > diagnosis.warning_s(rows, self.config.stall_timeout) + STACKS_TIMEOUT_S
            if diagnosis.waiting(rows, blocking) and (late or all(diagnosis.is_located(row, rows) for row in blocking)):
                self._warned = True
                names = "; ".join(diagnosis.sentence(row, rows) for row in blocking[:3])
                _print(f"{names}{diagnosis.waiting(rows, blocking)}")
        if self._asked_s is None:
            if idle_s > diagnosis.limit_s(rows, self.config.stall_timeout):
                self._asked_s = time.monotonic()
            return
        blocking = diagnosis.blocking_ranks(rows)
        answered = all(
            row.stacks if not row.is_silent else diagnosis.is_located(row, rows) for row in blocking or [self.rows[0]]
        )
        if answered or time.monotonic() - self._asked_s > STACKS_TIMEOUT_S:
            self._report_stall(rows, blocking)

    def _check_for_rank_0(self) -> None:
        """Reports a stall of rank 0, if it has no heartbeat: the only decision of the other ranks."""
        if not self.rows[0].is_silent:
            return
        self._silent = [self.rows[0]]
        rows = [self.rows[0], self._local_row()]
        limit_s = diagnosis.limit_s(rows, self.config.stall_timeout)
        # Rank 1 reports for all. Without it, each rank reports.
        if diagnosis.idle_s(rows) > limit_s + (REPORT_FIRST_S if self.rank > 1 else 0.0):
            self._report_stall(rows, [self.rows[0]])

    def _report_stall(self, rows: Sequence[Row], blocking: Sequence[Row]) -> None:
        text = diagnosis.report(rows, blocking)
        self._journal(text, [row.rank for row in blocking])
        if self.rank == 0:
            self._transport.exchange({"row": None, "end": {"text": text, "culprits": [r.rank for r in blocking]}}, 0.2)
        error = Stalled(text)
        _print(text)
        of = blocking[0] if blocking else self._local_row()
        failures.report_failure(error, of.rank, exit_code=Stalled.EXIT_CODE, with_traceback=False, host=of.host)
        time.sleep(0.2)  # until this rank's output has reached its log
        os._exit(Stalled.EXIT_CODE)

    def _end_after(self, order: dict[str, Any]) -> None:
        self._journal(order["text"], order["culprits"])
        time.sleep(REPORT_FIRST_S)
        os._exit(Stalled.EXIT_CODE)

    def _journal(self, text: str, blocking: list[int]) -> None:
        phase = self.step_timer.phase()
        self.journal.write("stall", global_step=self.clock.global_step, phase=phase, text=text, of_ranks=blocking)


def _message(row: Row) -> dict[str, Any]:
    return {"row": dataclasses.asdict(row)}


def _print(text: str) -> None:
    print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def slow_ranks(ranks: Sequence[dict[str, Any]], config: HealthConfig) -> list[int]:
    """Ranks that were stragglers at the end, given each rank's `Monitor.own_times`."""
    names = [field.name for field in dataclasses.fields(Times)]
    rows = [Row(one["rank"], one["host"], times=Times(**{name: one[name] for name in names})) for one in ranks]
    num_steps = {one["rank"]: one["totals"]["num_steps"] for one in ranks}
    return [
        row.rank
        for row, _, times in diagnosis.stragglers(rows, config.straggler_factor)
        if diagnosis.lost_s(row, times, num_steps[row.rank]) >= diagnosis.MIN_LOST_S
    ]


def stacks(own_thread: int | None = None) -> str:
    """Python stacks of this process: the main thread first, and up to 3 others that do not just wait for work."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for number in sorted(frames, key=lambda number: number != main):
        stack = traceback.extract_stack(frames[number])
        if number == own_thread or not stack or (number != main and stack[-1].filename.endswith(IDLE_THREADS)):
            continue
        lines = "".join(traceback.format_list(stack)).rstrip().splitlines()[-STACK_LINES:]
        texts.append(f"thread {names.get(number, number)}, latest call last:\n" + "\n".join(lines))
    return "\n".join(texts[:4])
