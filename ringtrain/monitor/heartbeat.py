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
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import keras

from ringtrain import hvd
from ringtrain.config import HealthConfig
from ringtrain.errors import Stalled
from ringtrain.monitor import diagnosis
from ringtrain.monitor.diagnosis import Row, Times
from ringtrain.monitor.journal import Journal
from ringtrain.protocol import failures, transport

BEAT_S = 1.0
ANSWERS_S = 3.0
"""time for a blocking rank to send its stacks"""
SPEAKER_FIRST_S = 5.0
"""delay before the other ranks exit, so that the stall report reaches the launcher first"""
RECONNECT_S = 10.0
FIRST_CALL_S = 5.0
"""maximum time that training waits for the first connection"""
STACK_LINES = 40
IDLE_THREADS = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py", "multiprocessing/pool.py")


class StepTimer(keras.callbacks.Callback):
    """Callback that measures the parts of this rank's steps; must follow `Clock` in the list.

    `trace` is called after each step with its number and five timestamps: begin, input, computed, reduced, end.
    """

    def __init__(self, place: hvd.step_timing.PhaseTracker, clock: Any) -> None:
        super().__init__()
        self.place = place
        self.clock = clock
        self.own_steps = 0
        self.begin_s = 0.0
        self.window: deque[tuple[float, float, float, float]] = deque(maxlen=diagnosis.WINDOW_STEPS)
        self.totals: list[float] = [0.0] * 4
        self.trace: Callable[[int, Sequence[float]], None] = lambda global_step, edges_s: None
        self._returned_s = 0.0
        self._waited_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._returned_s = 0.0  # time between epochs belongs to no step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begin_s = time.time()
        self.place.enter("step")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end_s, waited_s = time.time(), self.place.waited_s
        self.own_steps += 1
        there_s, computed_s, reduced_s = self.place.moments()
        # Without new timestamps, as with a user's train_step, the whole step counts as computing.
        there_s = there_s if self.begin_s <= there_s <= end_s else self.begin_s
        wait_s = max(0.0, reduced_s - computed_s) if computed_s >= there_s else 0.0
        between_s = self.begin_s - self._returned_s if self._returned_s else 0.0
        waited_between_s = waited_s - self._waited_s if self._returned_s else 0.0
        step = (
            max(0.0, there_s - self.begin_s),
            max(0.0, end_s - there_s - wait_s),
            max(0.0, between_s - waited_between_s),
            max(0.0, wait_s + waited_between_s),
        )
        self._returned_s, self._waited_s = end_s, waited_s
        self.trace(self.clock.global_step, (self.begin_s, there_s, computed_s, reduced_s, end_s))
        if self.own_steps > 1:  # the first step builds the graph
            self.window.append(step)
            self.totals = [total + seconds for total, seconds in zip(self.totals, step, strict=True)]
        self.place.enter("callbacks")

    def phase(self) -> str:
        """Current phase of this rank, including the parts of a step."""
        if self.place.phase != hvd.step_timing.GRAPH:
            return self.place.phase
        there_s, computed_s, reduced_s = self.place.moments()
        if there_s < self.begin_s - 1e-3:  # timestamps are rounded
            return "input"
        if computed_s < there_s:
            return "compute"
        return "reduce" if reduced_s < computed_s else "update"


class Monitor:
    """Heartbeat thread of one rank, as a context manager around training. Exits with code 75 when the job stalls.

    The constructor is a collective: rank 0 broadcasts its address. `say` prints a line; None: to stderr.
    """

    def __init__(
        self,
        pulse: StepTimer,
        config: HealthConfig,
        say: Callable[[str], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.pulse = pulse
        self.config = config
        self.journal = journal or Journal()
        self.say = say or (lambda text: print(f"ringtrain: {text}", file=sys.stderr, flush=True))
        self.rank, self.size, self.host = hvd.rank(), hvd.size(), socket.gethostname()
        self.slow = diagnosis.SlowRanks(config.straggler_factor)
        self.rows: dict[int, Row] = {}
        self._slate, self._box = transport.Slate(), pulse.clock.box
        self._is_wanted = bool(config.stall_timeout or config.straggler_factor)
        self._wire = transport.Wire(secrets.token_hex(16), self._is_wanted and self.rank == 0 and self.size > 1)
        row = Row(self.rank, self.host, os.getpid(), self._slate.descriptor)
        address = (row, transport.own_addresses(), self._wire.port, self._wire.token)
        self._rank_0, addresses, self._port, self._wire.token = hvd.broadcast_object(address, 0, name="ringtrain_beats")
        self._addresses = ["127.0.0.1", *addresses] if self._rank_0.host == self.host else addresses
        self._leaving, self._called = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringtrain-heartbeat", daemon=True)
        self._seen: Any = None
        self._idle_s = 0.0
        self._warned = False
        self._asked_s: float | None = None
        self._wants_stacks = False
        self._strange: list[Row] = []

    def __enter__(self) -> Monitor:
        self.pulse.place.on_change = self._put
        if self._is_wanted:
            self._thread.start()
            # A rank that hangs immediately must be known to rank 0.
            self._called.wait(FIRST_CALL_S if self.rank else 0.0)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.journal.write_failure(error, global_step=self.pulse.clock.global_step)
        self.pulse.place.on_change = lambda: None
        self._leaving.set()
        self._wire.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_S)

    def own_times(self) -> dict[str, Any]:
        """Step times of this rank for summary.json: medians over the last steps, and totals of all but the first."""
        num_steps = max(0, self.pulse.own_steps - 1)
        totals = dataclasses.replace(Times.of([self.pulse.totals], sum), num_steps=num_steps)
        return {
            "rank": self.rank,
            "host": self.host,
            **dataclasses.asdict(Times.of(list(self.pulse.window))),
            "totals": dataclasses.asdict(totals),
        }

    def _put(self) -> None:
        step, phase = self.pulse.clock.global_step, self.pulse.place.phase
        self._slate.put(step, phase)
        self._box.put(step, phase)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._listen() if self.rank == 0 else self._call()
        except Exception:  # a bug here must not end training
            self.say(f"rank {self.rank} is not watched any more:\n{traceback.format_exc()}")

    def _listen(self) -> None:
        """Thread of rank 0: receives all heartbeats and finds stalls and stragglers."""
        last_s = time.monotonic()
        self.rows[0] = self._rank_0
        while not self._leaving.is_set():
            ask = self._asked_s is not None
            silent = [row for row in self.rows.values() if row.is_silent]
            culprits = diagnosis.keeping_waiting(self.rows.values()) if ask else []
            message = {
                "row": dataclasses.asdict(self.rows[0]),
                "silent": [[row.rank, row.host, row.process, row.slate] for row in silent],
                "stacks_of": [row.rank for row in culprits],
            }
            heard = self._wire.exchange(message, BEAT_S)
            # Time in which this thread did not run, as in a suspended job, does not count.
            now_s = time.monotonic()
            passed_s, last_s = min(now_s - last_s, 2 * BEAT_S), now_s
            for rank, row in self.rows.items():
                self.rows[rank] = dataclasses.replace(row, silent_s=row.silent_s + passed_s)
            for fields in heard:
                row = Row.from_json(fields["row"])
                self.rows[row.rank] = row
            self._strange = silent
            self.rows[0] = self._own_row(passed_s, with_stacks=ask)
            self._look_for_stragglers()
            if self.config.stall_timeout:
                self._look_for_stall()
        self._wire.exchange({"row": None, "done": True}, 0.0)
        self._wire.close()

    def _call(self) -> None:
        """Thread of the other ranks: sends heartbeats, follows rank 0's requests, and supervises rank 0."""
        last_s = time.monotonic()
        done = complained = False
        rank_0_silent_s = 0.0
        while not self._leaving.is_set() and not done:
            if not self._wire.is_connected:
                beat = {"row": dataclasses.asdict(self._own_row(0.0))}
                if self._wire.connect(self._addresses, self._port, beat):
                    self.rows.setdefault(0, self._rank_0)
                elif not self.rows and not complained:
                    complained = True
                    where = ", ".join(self._addresses)
                    self.say(
                        f"rank {self.rank} on {self.host} cannot connect to rank 0 at {where}, port {self._port}:"
                        " training continues without monitoring this rank: check the firewall"
                    )
                self._called.set()
                if not self.rows:
                    self._leaving.wait(RECONNECT_S)
                    continue
            beat = {"row": dataclasses.asdict(self._own_row(0.0, self._wants_stacks))}
            heard = self._wire.exchange(beat, BEAT_S)
            now_s = time.monotonic()
            passed_s, last_s = min(now_s - last_s, 2 * BEAT_S), now_s
            self._note_progress(passed_s)
            rank_0_silent_s = 0.0 if heard else rank_0_silent_s + passed_s
            if self._leaving.is_set():
                break
            for message in heard:
                done = done or bool(message.get("done"))
                if message.get("end"):
                    self._end_after(message["end"])
                if message.get("row"):
                    self.rows[0] = Row.from_json(message["row"])
                    self._strange = [
                        Row(rank, host, process, slate) for rank, host, process, slate in message["silent"]
                    ]
                    self._wants_stacks = self.rank in message["stacks_of"]
            if 0 in self.rows and self.config.stall_timeout and not done:
                self.rows[0] = dataclasses.replace(self.rows[0], silent_s=rank_0_silent_s)
                self._look_for_rank_0()
        self._wire.exchange({"row": dataclasses.asdict(dataclasses.replace(self._own_row(0.0), is_done=True))}, 0.0)
        self._wire.close()

    # ---- heartbeat of this rank -------------------------------------------------------------------------------------

    def _note_progress(self, passed_s: float) -> None:
        place = self.pulse.place
        seen = (self.pulse.clock.global_step, place.changes, place.moments())
        self._idle_s = self._idle_s + passed_s if seen == self._seen else 0.0
        self._seen = seen

    def _own_row(self, passed_s: float, with_stacks: bool = False) -> Row:
        if passed_s:
            self._note_progress(passed_s)
        here = [row for row in self._strange if row.host == self.host]
        return Row(
            rank=self.rank,
            host=self.host,
            process=os.getpid(),
            slate=self._slate.descriptor,
            step=self.pulse.clock.global_step,
            own_steps=self.pulse.own_steps,
            phase=self.pulse.phase(),
            idle_s=self._idle_s,
            times=Times.of(list(self.pulse.window)),
            stacks=stacks(self._thread.ident) if with_stacks else "",
            saw={str(row.rank): transport.look_at(row.process, row.slate) for row in here},
        )

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _look_for_stragglers(self) -> None:
        rows = list(self.rows.values())
        if len(rows) < self.size or any(row.is_done for row in rows):
            return
        for row, part, times in self.slow.look(rows):
            self.say(diagnosis.slow_words(row, part, times))
            facts = {"of_rank": row.rank, "of_host": row.host, "part": part, "times": round(times, 2)}
            self.journal.write("straggler", global_step=row.step, **facts, **dataclasses.asdict(row.times))

    def _look_for_stall(self) -> None:
        rows = list(self.rows.values())
        idle_s = diagnosis.idle_s(rows)
        if idle_s <= 2 * BEAT_S:
            self._warned, self._asked_s = False, None
        if not self._warned and idle_s > diagnosis.warning_s(rows, self.config.stall_timeout):
            culprits = diagnosis.keeping_waiting(rows)
            late = idle_s > diagnosis.warning_s(rows, self.config.stall_timeout) + ANSWERS_S
            if diagnosis.waiting(rows, culprits) and (late or all(diagnosis.is_located(row, rows) for row in culprits)):
                self._warned = True
                names = "; ".join(diagnosis.sentence(row, rows) for row in culprits[:3])
                self.say(f"{names}{diagnosis.waiting(rows, culprits)}")
        if self._asked_s is None:
            if idle_s > diagnosis.limit_s(rows, self.config.stall_timeout):
                self._asked_s = time.monotonic()
            return
        culprits = diagnosis.keeping_waiting(rows)
        answered = all(
            row.stacks if not row.is_silent else diagnosis.is_located(row, rows) for row in culprits or [self.rows[0]]
        )
        if answered or time.monotonic() - self._asked_s > ANSWERS_S:
            self._speak(rows, culprits)

    def _look_for_rank_0(self) -> None:
        """Reports a stall of rank 0, if it has no heartbeat: the only decision of the other ranks."""
        if not self.rows[0].is_silent:
            return
        self._strange = [self.rows[0]]
        rows = [self.rows[0], self._own_row(0.0)]
        limit_s = diagnosis.limit_s(rows, self.config.stall_timeout)
        # Rank 1 reports for all. Without it, each rank reports.
        if diagnosis.idle_s(rows) > limit_s + (SPEAKER_FIRST_S if self.rank > 1 else 0.0):
            self._speak(rows, [self.rows[0]])

    def _speak(self, rows: Sequence[Row], culprits: Sequence[Row]) -> None:
        text = diagnosis.report(rows, culprits)
        self._journal(text, [row.rank for row in culprits])
        if self.rank == 0:
            self._wire.exchange({"row": None, "end": {"text": text, "culprits": [r.rank for r in culprits]}}, 0.2)
        error = Stalled(text)
        self.say(text)
        of = culprits[0] if culprits else self._own_row(0.0)
        failures.report_failure(error, of.rank, exit_code=Stalled.EXIT_CODE, with_traceback=False, host=of.host)
        time.sleep(0.2)  # until this rank's output has reached its log
        os._exit(Stalled.EXIT_CODE)

    def _end_after(self, order: dict[str, Any]) -> None:
        self._journal(order["text"], order["culprits"])
        time.sleep(SPEAKER_FIRST_S)
        os._exit(Stalled.EXIT_CODE)

    def _journal(self, text: str, culprits: list[int]) -> None:
        step, phase = self.pulse.clock.global_step, self.pulse.phase()
        self.journal.write("stall", global_step=step, phase=phase, text=text, of_ranks=culprits)


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
