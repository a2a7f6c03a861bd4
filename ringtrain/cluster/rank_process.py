"""A process that horovodrun starts, a rank or its ssh: output, exit code, and the signal that ends it.

In place of Horovod's `safe_shell_exec.execute`, which waits for every process that holds the output of a rank, starts
another Python for each rank, and leaves semaphores in /dev/shm if it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain.cluster.processes import start_rank

SHELLS = ("sh", "bash", "dash")
GRACE_S = 5.0
TICK_S = 0.1
LAST_OUTPUT_S = 5.0
"""seconds for the output of a process that has failed, if others hold it"""


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    given: str = "",  # standard input
    grace_s: float = GRACE_S,  # between SIGTERM, when one of `events` is set, and SIGKILL
    stdout: Any = None,
    stderr: Any = None,
    index: int | None = None,  # the rank, which tags each line
    events: Sequence[Any] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Runs a command; returns its exit code, negative for a signal. A success waits for others that hold its output."""
    from horovod.runner.common.util.safe_shell_exec import prefix_connection
    from horovod.runner.util.threads import in_thread

    process = start_rank(argv, environ, given)
    readers = []
    for pipe, stream, name in (
        (process.stdout, stdout or sys.stdout, "stdout"),
        (process.stderr, stderr or sys.stderr, "stderr"),
    ):
        # silent: a log may be closed when a process that has outlived the rank prints.
        copied = (pipe, stream, name, index, prefix_output_with_timestamp)
        readers.append(in_thread(prefix_connection, copied, silent=True))
    is_ending, kill_at_s = False, float("inf")
    while process.poll() is None or (process.returncode == 0 and not is_ending and any(r.is_alive() for r in readers)):
        if not is_ending and any(event.is_set() for event in events or ()):
            is_ending, kill_at_s = True, time.monotonic() + grace_s
            _terminate(process.pid)
        if time.monotonic() > kill_at_s:
            process.kill()
        running = [reader for reader in readers if reader.is_alive()]
        if running:
            running[0].join(TICK_S)
        else:
            time.sleep(TICK_S)
    if process.returncode != 0 or is_ending:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + LAST_OUTPUT_S
    for reader in readers:
        reader.join(max(0.0, deadline_s - time.monotonic()))
    return int(process.returncode)


def _terminate(process_id: int) -> None:
    """Sends SIGTERM to a rank; Horovod itself would stop one that saves."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        ranks = process.children() if process.name() in SHELLS else [process]
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                if rank.name() != "ssh":  # which forwards no signal: the host agent ends its rank
                    rank.terminate()
