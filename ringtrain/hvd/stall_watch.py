"""Stall detection for user scripts: ends a job whose ranks wait for different collectives, and names each of these.

A thread per rank reports the position of the main thread to rank 0 once a second. The job ends only if all main threads
were idle for the limit, in an eager collective or in the reduction of gradients, and each of these lacks ranks. Other
graphs may compute or read on other threads: their ranks are named in one line, and the job continues.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import tensorflow as tf

from ringtrain.config import HealthConfig
from ringtrain.errors import RingtrainError, Stalled
from ringtrain.hvd import collectives
from ringtrain.hvd.backend import WITH_HOROVOD, ProcessSet, global_process_set, horovod
from ringtrain.hvd.process import PROCESS
from ringtrain.hvd.step_timing import PLACE
from ringtrain.protocol import transport
from ringtrain.protocol.failures import report_failure

TIMEOUT = "RINGTRAIN_STALL_TIMEOUT"
"""environment variable: seconds without progress after which the job ends; 0: never"""
HEARTBEAT_S = 1.0
FRESH_S = 5.0
"""maximum age of a row"""
PROGRESS_S = 0.002
"""CPU time of the main thread between two heartbeats that counts as progress"""
REPORT_DELAY_S = 5.0
"""delay before the other ranks exit, so that rank 0's report reaches the launcher first"""
COLLECTIVE_FILE = "horovod/tensorflow/mpi_ops.py"
JOIN = "join"
REDUCTION = "the reduction of gradients"
GRAPH_FILE = "tensorflow/python/eager/execute.py"
LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
    "<",
)


@dataclass(frozen=True)
class Row:
    """Position of a rank's main thread, its eager collective or `REDUCTION`, and how long it used no CPU time there."""

    rank: int
    host: str
    step: str = ""
    line: str = ""
    collective: str = ""
    num_ranks: int = 0
    is_in_graph: bool = False
    idle_s: float = 0.0

    def __str__(self) -> str:
        where = f"in {self.collective}" if self.collective else "in a TensorFlow graph"
        step = f", {self.step}" if self.step else ""
        return f"rank {self.rank} on {self.host}: {where} at {self.line}{step}"


def is_standstill(rows: Collection[Row], size: int, limit_s: float) -> bool:
    """Returns whether `size` ranks are idle for `limit_s` in collectives or graphs, and not all in one collective."""
    all_idle = all(row.idle_s >= limit_s and (row.collective or row.is_in_graph) for row in rows)
    return len(rows) == size and all_idle and len({row.collective for row in rows}) > 1


def is_deadlock(rows: Collection[Row]) -> bool:
    """Returns whether stalled ranks wait for each other forever: no collective has all of its ranks."""
    if any(row.collective in ("", JOIN) for row in rows):  # "" may compute, join takes part in the others' reductions
        return False
    waiting = Counter((row.collective, row.num_ranks) for row in rows)
    return all(count < num_ranks for (_, num_ranks), count in waiting.items())


def place_of(frame: FrameType | None) -> dict[str, Any]:
    """Returns the `Row` fields that follow from a thread's stack: line of user code, collective, graph."""
    line = collective = ""
    num_ranks, is_in_graph = 0, False
    for inner, number in traceback.walk_stack(frame):
        file = inner.f_code.co_filename
        if file.endswith(COLLECTIVE_FILE) and not line:
            collective = f"{inner.f_code.co_name.strip('_')} {inner.f_locals.get('name') or ''}".strip()
            num_ranks = inner.f_locals.get("process_set", global_process_set).size()
        is_in_graph = is_in_graph or file.endswith(GRAPH_FILE)
        if not line and not file.startswith(LIBRARIES):
            line = f"{file}:{number}"
    if is_in_graph and not collective and (num_ranks := PLACE.awaited()):
        collective = REDUCTION
    return {"line": line, "collective": collective, "num_ranks": num_ranks, "is_in_graph": is_in_graph}


class Watch:
    """Stall detection thread of one rank. The constructor is a collective: rank 0 broadcasts its address.

    `step`: position of training, in words; "": value of `iterations`, the variable that counts an optimizer's updates.
    """

    def __init__(self) -> None:
        self.step = ""
        self.iterations: Any = None
        self.has_warned = self._has_stopped = False
        self.rank, self.size, self.host = horovod.rank(), horovod.size(), socket.gethostname()
        try:
            limit_s = float(os.environ.get(TIMEOUT) or HealthConfig.stall_timeout)
        except ValueError:
            raise RingtrainError(f"{TIMEOUT}: got {os.environ[TIMEOUT]!r}, expected seconds, or 0 for never") from None
        self._wire = transport.Wire(secrets.token_hex(16), listens=self.rank == 0 and limit_s > 0)
        address = (limit_s, self.host, transport.own_addresses(), self._wire.port, self._wire.token)
        answer = collectives.broadcast_object(address, 0, name="ringtrain_watch")
        self._limit_s, host, addresses, self._port, self._wire.token = answer
        self._addresses: Sequence[str] = ["127.0.0.1", *addresses] if host == self.host else addresses
        if self._limit_s > 0:
            threading.Thread(target=self._run, name="ringtrain-watch", daemon=True).start()

    def _run(self) -> None:
        main = threading.main_thread().ident or 0
        clock = time.pthread_getcpuclockid(main)
        rows: dict[int, tuple[float, Row]] = {}
        used_s = last_s = 0.0
        local = Row(self.rank, self.host)
        if self.rank and not self._wire.connect(self._addresses, self._port, {}):
            if self._has_stopped:
                return
            where = f"{', '.join(self._addresses)}, port {self._port}"
            print(
                f"ringtrain: rank {self.rank} on {self.host} cannot connect to rank 0 at {where}: no rank notices when"
                " this script hangs: check the firewall",
                file=sys.stderr,
                flush=True,
            )
            return
        while not self._has_stopped and (self.rank == 0 or self._wire.is_connected):
            now_s, was_used_s, used_s = time.monotonic(), used_s, time.clock_gettime(clock)
            # Time in which this thread did not run, as in a suspended job, does not count.
            passed_s, last_s = min(now_s - last_s, 2 * HEARTBEAT_S), now_s
            step = self.step or ("" if self.iterations is None else f"after {int(self.iterations)} updates")
            row = Row(self.rank, self.host, step, idle_s=local.idle_s, **place_of(sys._current_frames().get(main)))
            is_idle = row == local and used_s - was_used_s < PROGRESS_S
            local = replace(row, idle_s=row.idle_s + passed_s if is_idle else 0.0)
            for message in self._wire.exchange(asdict(local) if self.rank else {}, HEARTBEAT_S):
                if "end" in message:
                    time.sleep(REPORT_DELAY_S)
                    self._exit()
                if message and not self.rank:
                    rows[message["rank"]] = (time.monotonic(), Row(**message))
            rows[self.rank] = (time.monotonic(), local)
            fresh = [row for received_s, row in rows.values() if time.monotonic() - received_s < FRESH_S]
            if not self.rank and is_standstill(fresh, self.size, self._limit_s):
                fresh.sort(key=lambda row: row.rank)
                if is_deadlock(fresh):
                    self._end(fresh)
                self._warn([row for row in fresh if not row.collective])
        self._wire.close()

    def stop(self) -> None:
        """Ends the thread, and closes its connections."""
        self._has_stopped = True
        self._wire.wake()

    def _warn(self, rows: Sequence[Row]) -> None:
        if rows and not self.has_warned:
            print(
                f"ringtrain: the other ranks have waited for {min(row.idle_s for row in rows):.0f} s for"
                f" {'; '.join(map(str, rows))}: a graph may compute or read, so the job is not ended",
                file=sys.stderr,
                flush=True,
            )
            self.has_warned = True

    def _end(self, rows: Sequence[Row]) -> None:
        self._wire.exchange({"end": True}, 0.2)
        places = "\n".join(f"  {row}" for row in rows)
        error = Stalled(
            f"ranks have waited for different things for {min(row.idle_s for row in rows):.0f} s\n{places}\nall ranks"
            " must call the same collectives in the same order: look for different numbers of batches, and for"
            f" collectives under a condition such as hvd.rank() == 0. {TIMEOUT} sets the seconds, 0 for never"
        )
        print(f"ringtrain: {error}", file=sys.stderr, flush=True)
        report_failure(error, self.rank, exit_code=Stalled.EXIT_CODE, with_traceback=False)
        time.sleep(0.2)  # until this rank's output has reached its log
        self._exit()

    def _exit(self) -> None:
        sys.stdout.flush()
        os._exit(Stalled.EXIT_CODE)


def begin() -> Watch | None:
    """Starts stall detection; the first call is a collective. None with one rank, if elastic, or without Horovod."""
    if not WITH_HOROVOD or collectives.elastic() or horovod.size() == 1:
        return None
    if PROCESS.stall_watch is None:
        with tf.init_scope():
            PROCESS.stall_watch = Watch()
    watch: Watch = PROCESS.stall_watch
    return watch


@tf.autograph.experimental.do_not_convert  # in a script's tf.function
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
    device: str = collectives.CPU,
) -> None:
    """Sets Keras or TensorFlow variables of every rank to the values of `root_rank`; not parts of sharded slots.

    The first call of all ranks starts stall detection: a thread per rank, and an open port on rank 0.

    Args:
        variables: The same number on every rank, of the same shapes and dtypes, matched by index.
        root_rank: Rank that sends.
        process_set: Ranks that take part.
        inplace: Use Horovod's in-place broadcast, which saves memory and supports floating-point types only.
        device: Addition of ringtrain. Device of the broadcast; ignored with `inplace`.
    """
    watch = begin() if process_set is global_process_set else None  # all ranks of a user's training loop call this
    if watch is not None:
        counters = [collectives.tensor_of(one) for one in variables if getattr(one, "name", "") == "iteration"]
        watch.iterations = next(iter(counters), watch.iterations)
    collectives.broadcast_variables(variables, root_rank, process_set, inplace, device)
