"""State of this process that is created once: by `init`, or by the first collectives after it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import queue
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.errors import MissingDependency
from ringtrain.protocol.env import install
from ringtrain.protocol.failures import report

OLDEST_KERAS = (3, 15)
"""older ones have other private parts than those that are patched here"""


@dataclass
class ProcessState:
    """Everything that `init` and the collectives create once per process."""

    sockets: set[tuple[int, str]] = field(default_factory=set)
    """sockets that `init` has opened: see `open_sockets`"""
    mpi_world: Any = None
    """communicators of `mpi_backend`; None before `init` and after `shutdown`"""
    host_changes: queue.Queue[Any] = field(default_factory=queue.Queue)
    """changes of hosts that an elastic run has not handled; `shutdown` keeps them: the driver announces each once"""
    has_ended: bool = False
    """`shutdown` was called, and ranks meet only once"""
    has_started: bool = False
    """`init` was called, also if `shutdown` was called since"""
    num_runs: int = 0
    """runs that this process has set up"""

    def hang_up(self) -> None:
        """Closes the connections that `init` has opened; call it after Horovod's `shutdown`."""
        # Horovod leaves Gloo's connections open. If one worker fails and a second one notices it, the rest would wait
        # for the second one until Gloo's timeout.
        for descriptor, _ in self.sockets & open_sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        self.sockets.clear()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector skips all that was created until the end of this block."""
    enabled = gc.isenabled()
    if "keras" in sys.modules:  # imported by a script, whose garbage would be kept
        gc.collect()
    gc.disable()
    try:
        yield
        # To traverse the 370,000 objects of TensorFlow and Keras takes 0.7 s of their import, 0.2 s of each full
        # collection, also during training, and more than a second at exit.
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def open_sockets() -> set[tuple[int, str]]:
    """Sockets of this process: descriptor, and inode as in "socket:[123]", since descriptors are reused."""
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            if target.startswith("socket:"):
                sockets.add((int(path.name), target))
    return sockets


PROCESS = ProcessState()


def elastic() -> bool:
    """Returns whether ranks join and leave: the size changes then, but a graph is traced once."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


@atexit.register
def _report_no_init() -> None:
    if not PROCESS.has_started:
        report("no-init", os.getpid())


def check_keras(version: str) -> None:
    """Raises MissingDependency if this Keras is too old."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST_KERAS:
        oldest = ".".join(map(str, OLDEST_KERAS))
        fix = install(f"keras=={oldest}.*")
        raise MissingDependency(f"ringtrain.hvd needs Keras {oldest} or later, got {version}: {fix}")
