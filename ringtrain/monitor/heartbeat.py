"""The monitor of a rank: it reports what the rank does each second, and names blocking ranks and stragglers.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ringtrain.errors import Stalled
from ringtrain.monitor import diagnosis
from ringtrain.monitor.diagnosis import HEARTBEAT_S, REPORT_FIRST_S, Row, Stalls
from ringtrain.monitor.stragglers import SlowRanks, straggler_text
from ringtrain.protocol import failures, status, transport

RECONNECT_S = 10.0
FIRST_CALL_S = 5.0
"""maximum time that training waits for the first connection"""
FLUSH_S = 1.0
STACK_LINES = 40
IDLE_THREADS = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py", "multiprocessing/pool.py")


class Activity(Protocol):
    """What a rank does, as its heartbeat reports it."""

    def progress(self) -> Any:
        """Value that differs from the previous heartbeat's if the rank has made progress."""

    def fields(self) -> dict[str, Any]:
        """The fields of `Row` that describe the rank's position."""


class Monitor:
    """Heartbeat thread of one rank, around training; exits with code 75 when the job stalls. Made collectively."""

    def __init__(
        self,
        rank: int,
        size: int,
        activity: Activity,
        timeout_s: float,
        broadcast: Callable[[Any], Any],
        *,
        straggler_factor: float = 0.0,
        descriptor: int = -1,
        write_event: Callable[..., None] = lambda event, **facts: None,
    ) -> None:
        self.rank, self.size, self.activity, self.host = rank, size, activity, socket.gethostname()
        self.slow = SlowRanks(straggler_factor)
        self.rows: dict[int, Row] = {}
        self._descriptor = descriptor
        self._write_event = write_event
        is_wanted = bool(timeout_s or straggler_factor)
        self._transport = transport.Wire(secrets.token_hex(16), listens=is_wanted and rank == 0 and size > 1)
        row = Row(rank, self.host, os.getpid(), descriptor)
        address = (row, transport.own_addresses(), self._transport.port, self._transport.token, timeout_s, is_wanted)
        # Rank 0's `timeout_s` is every rank's.
        self._rank_0, addresses, self._port, self._transport.token, self.timeout_s, self._is_wanted = broadcast(address)
        self._addresses = ["127.0.0.1", *addresses] if self._rank_0.host == self.host else addresses
        self.stalls = Stalls(self.timeout_s)
        self._leaving, self._connected = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringtrain-heartbeat", daemon=True)
        self._progress: Any = None
        self._idle_s = 0.0
        self._fields: Mapping[str, Any] = {}
        self._wants_stacks = False
        self._silent: list[Row] = []

    def start(self) -> None:
        if self._is_wanted:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and closes its connections."""
        self._leaving.set()
        self._transport.wake()

    def __enter__(self) -> Monitor:
        self.start()
        if self._is_wanted and self.rank:  # a rank that hangs immediately must be known to rank 0
            self._connected.wait(FIRST_CALL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * HEARTBEAT_S)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._exchanged_s, self._fields = time.monotonic(), self.activity.fields()
        try:
            if self.rank == 0:
                self._receive_heartbeats()
            else:
                self._send_heartbeats()
        except Exception:  # a bug here must not end training
            _print(f"rank {self.rank} is no longer monitored:\n{traceback.format_exc()}")

    def _receive_heartbeats(self) -> None:
        """Thread of rank 0: receives all heartbeats and finds stalls and stragglers."""
        self.rows[0] = self._rank_0
        while not self._leaving.is_set():
            asked = self.stalls.asked(self.rows.values())
            silent = [row for row in self.rows.values() if row.is_silent]
            message = {
                "row": self.rows[0].to_json(),
                "silent": [[row.rank, row.host, row.process, row.status] for row in silent],
                "stacks_of": asked or [],
            }
            received, passed_s = self._exchange(message)
            for rank, row in self.rows.items():
                self.rows[rank] = dataclasses.replace(row, silent_s=row.silent_s + passed_s)
            for fields in received:
                row = Row.from_json(fields["row"])
                self.rows[row.rank] = row
            self._silent = silent
            self.rows[0] = self._local_row(with_stacks=asked is not None)
            self._check_for_stragglers()
            if self.timeout_s:
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
            if 0 in self.rows and self.timeout_s and not done:
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
        self._fields = self.activity.fields()  # before the progress: a new position never has the old idle time
        progress = self.activity.progress()
        self._idle_s = self._idle_s + passed_s if progress == self._progress else 0.0
        self._progress = progress
        return received, passed_s

    def _local_row(self, with_stacks: bool = False) -> Row:
        here = [row for row in self._silent if row.host == self.host]
        return Row(
            rank=self.rank,
            host=self.host,
            process=os.getpid(),
            status=self._descriptor,
            idle_s=self._idle_s,
            stacks=stacks(self._thread.ident) if with_stacks else "",
            saw={str(row.rank): status.look_at(row.process, row.status) for row in here},
            **self._fields,
        )

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _check_for_stragglers(self) -> None:
        rows = list(self.rows.values())
        if len(rows) < self.size or any(row.is_done for row in rows):
            return
        for row, part, times in self.slow.look(rows):
            _print(straggler_text(row, part, times))
            facts = {"of_rank": row.rank, "of_host": row.host, "part": part, "times": round(times, 2)}
            self._write_event("straggler", global_step=row.step, **facts, **dataclasses.asdict(row.times))

    def _check_for_stall(self) -> None:
        rows = list(self.rows.values())
        finding = self.stalls.look(rows, time.monotonic())
        if finding.warning:
            _print(finding.warning)
        if finding.stall:
            order = {"text": finding.stall, "culprits": [row.rank for row in finding.blocking]}
            self._transport.exchange({"row": None, "end": order}, 0.2)
            self._report_stall(finding.stall, finding.blocking)

    def _check_for_rank_0(self) -> None:
        """Reports a stall of rank 0, if it has no heartbeat: the only decision of the other ranks."""
        if not self.rows[0].is_silent:
            return
        self._silent = [self.rows[0]]
        rows = [self.rows[0], self._local_row()]
        if self.stalls.has_lost_rank_0(rows, self.rank):
            self._report_stall(diagnosis.report(rows, rows[:1]), rows[:1])

    def _report_stall(self, text: str, blocking: Sequence[Row]) -> None:
        self._journal(text, [row.rank for row in blocking])
        _print(text)
        of = blocking[0] if blocking else self._local_row()
        failures.report_failure(Stalled(text), of.rank, exit_code=Stalled.EXIT_CODE, with_traceback=False, host=of.host)
        time.sleep(0.2)  # until this rank's output has reached its log
        _exit()

    def _end_after(self, order: dict[str, Any]) -> None:
        self._journal(order["text"], order["culprits"])
        time.sleep(REPORT_FIRST_S)
        _exit()

    def _journal(self, text: str, blocking: list[int]) -> None:
        fields = self.activity.fields()
        step, phase = fields.get("step", 0), fields.get("phase", "")
        self._write_event("stall", global_step=step, phase=phase, text=text, of_ranks=blocking)


def _message(row: Row) -> dict[str, Any]:
    return {"row": row.to_json()}


def _print(text: str) -> None:
    print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def _exit() -> None:
    """Exits without clean-up. A main thread that hangs may hold the lock of standard output."""
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(FLUSH_S)
    os._exit(Stalled.EXIT_CODE)


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
