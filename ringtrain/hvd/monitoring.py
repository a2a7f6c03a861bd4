"""The monitor of this process: that of a run while it trains, else that of the user's script.

A script's monitor ends a job whose ranks wait for different collectives. Each heartbeat reports the position
of the main thread: its eager collective, the reduction of gradients, or another graph. The rules for both are in
monitor/diagnosis.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tensorflow as tf

from ringtrain.config import HealthConfig
from ringtrain.errors import RingtrainError
from ringtrain.hvd import collectives
from ringtrain.hvd.backend import WITH_HOROVOD, ProcessSet, global_process_set, horovod
from ringtrain.hvd.process import PROCESS, elastic
from ringtrain.hvd.step_timing import PLACE
from ringtrain.monitor.diagnosis import ScriptStalls
from ringtrain.monitor.heartbeat import Monitor
from ringtrain.protocol.env import STALL_TIMEOUT

PROGRESS_S = 0.002
"""CPU time of the main thread between two heartbeats that counts as progress"""
COLLECTIVE_FILE = "horovod/tensorflow/mpi_ops.py"
REDUCTION = "the reduction of gradients"
GRAPH_FILE = "tensorflow/python/eager/execute.py"
LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
    "<",
)


class MainThread:
    """`Activity` of a script: the position of the main thread, which progresses if it moves or uses its CPU.

    `step`: position of training, in words; "": value of `iterations`, the variable that counts an optimizer's updates.
    """

    def __init__(self) -> None:
        self.step = ""
        self.iterations: Any = None
        self._thread = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._used_s = 0.0
        self._num_busy = 0

    def progress(self) -> Any:
        before_s, self._used_s = self._used_s, time.clock_gettime(self._clock)
        if self._used_s - before_s >= PROGRESS_S:
            self._num_busy += 1
        return self._num_busy, self.fields()

    def fields(self) -> dict[str, Any]:
        step = self.step
        if not step and self.iterations is not None:
            step = f"after {int(self.iterations)} updates"
        return {"after": step, **place_of(sys._current_frames().get(self._thread))}


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
    if is_in_graph and not collective:
        num_ranks = PLACE.awaited()
        if num_ranks:
            collective = REDUCTION
    return {"line": line, "collective": collective, "num_ranks": num_ranks, "is_in_graph": is_in_graph}


def begin() -> MainThread | None:
    """Starts the monitor of a script; the first call is a collective.

    Returns:
        The activity that it reports. None with one rank, if elastic, without Horovod, and in a run, which has its own.
    """
    if not WITH_HOROVOD or elastic() or horovod.size() == 1:
        return None
    if PROCESS.monitor is None:
        rank, size = horovod.rank(), horovod.size()
        with tf.init_scope():
            PROCESS.monitor = Monitor(
                rank, size, MainThread(), _timeout_s(), lambda limit_s: ScriptStalls(limit_s, size), broadcast
            )
        PROCESS.monitor.start()
    activity = PROCESS.monitor.activity
    return activity if isinstance(activity, MainThread) else None


@contextlib.contextmanager
def replaced_by(monitor: Monitor) -> Iterator[None]:
    """Context in which the monitor of a run is that of this process, in place of the script's."""
    if PROCESS.monitor is not None:
        PROCESS.monitor.stop()
    PROCESS.monitor = monitor
    try:
        with monitor:
            yield
    finally:
        PROCESS.monitor = None


def broadcast(value: Any) -> Any:
    """Returns rank 0's value on every rank. Collective."""
    return collectives.broadcast_object(value, 0, name="ringtrain_heartbeat")


def _timeout_s() -> float:
    try:
        return max(0.0, float(os.environ.get(STALL_TIMEOUT) or HealthConfig.stall_timeout))
    except ValueError:
        text = f"{STALL_TIMEOUT}: got {os.environ[STALL_TIMEOUT]!r}, expected seconds, or 0 for never"
        raise RingtrainError(text) from None


@tf.autograph.experimental.do_not_convert  # in a script's tf.function
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
    device: str = collectives.CPU,
) -> None:
    """Sets Keras or TensorFlow variables of every rank to the values of `root_rank`.

    The first call of all ranks starts stall detection: a thread per rank, and an open port on rank 0.

    Args:
        variables: The same number on every rank, of the same shapes and dtypes, matched by index.
        root_rank: Rank that sends.
        process_set: Ranks that take part.
        inplace: Use Horovod's in-place broadcast, which saves memory and supports floating-point types only.
        device: Addition of ringtrain. Device of the broadcast; ignored with `inplace`.
    """
    activity = begin() if process_set is global_process_set else None  # all ranks of a user's training loop call this
    if activity is not None:
        counters = [collectives.tensor_of(one) for one in variables if getattr(one, "name", "") == "iteration"]
        activity.iterations = next(iter(counters), activity.iterations)
    collectives.broadcast_variables(variables, root_rank, process_set, inplace, device)
