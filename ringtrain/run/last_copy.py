"""Process that copies a run to its mirror after a signal, and continues for a while if its rank is killed.

An MPI kills all ranks when one of them is lost, rank 0 in the middle of its upload. So rank 0 leaves the last copy, and
the lease of the mirror, to a process that no launcher and no host agent counts to the job: in a session of its own,
without a parent in the job and without the job's ID in its environment.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ringtrain.errors import RingtrainError
from ringtrain.protocol.env import JOB
from ringtrain.protocol.json_text import parse_object
from ringtrain.run.mirror import Left, Mirror

# The first of two processes exits at once, so that the second is not below the rank; before imports start threads.
START = """
import os
if os.fork():
    os._exit(0)
from ringtrain.run import last_copy
last_copy.main()
"""
LOG = "logs/last-copy.log"
"""output of the process, in the run folder"""
ALONE_S = 30.0
"""for which it continues without its rank, after a signal that sets no time"""
RELEASE_S = 5.0


class LastCopy:
    """The process, for its rank.

    Args:
        left: State of the rank's mirror, with its credentials, which go through a socket.
        ends_s: Time, by time.monotonic(), until which it continues without the rank; infinity: for ALONE_S.

    Raises:
        OSError: The process has not started.
    """

    def __init__(self, left: Left, folder: Path, ends_s: float) -> None:
        self.folder = folder
        state = pickle.dumps((left, folder.absolute(), ends_s))
        self._socket, other = socket.socketpair()
        environ = {name: value for name, value in os.environ.items() if name != JOB}
        with other, open(folder / LOG, "ab") as log:  # not the rank's output, for whose end launchers wait
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", START],
                env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=log,
                start_new_session=True,
            )
        if process.wait():
            self._socket.close()
            raise OSError(f"exit code {process.returncode}: see {folder / LOG}")
        self._socket.sendall(state)

    def finish(self) -> dict[str, Any]:
        """Lets it copy what has changed since, and waits until it exits. Returns facts; none if it was killed."""
        with contextlib.suppress(OSError), self._socket, self._socket.makefile("rb") as answer:
            self._socket.shutdown(socket.SHUT_WR)
            return parse_object(answer.read().decode(errors="replace"))
        return {}

    def abandon(self) -> None:
        """Ends it at once: another rank copies."""
        with contextlib.suppress(OSError), self._socket:
            self._socket.sendall(b"end")


def main() -> None:
    """Copies until standard input ends: the rank has written its last file, or is gone."""
    left, folder, ends_s = pickle.load(sys.stdin.buffer)
    mirrors: list[Mirror] = []
    threading.Thread(target=_end_in_time, args=(ends_s, mirrors), daemon=True).start()
    url, _, name = left.url.rpartition("/")
    mirror = Mirror(url, name, expires_s=left.expires_s, left=left)
    _print(f"process {os.getpid()} copies {folder} to {mirror.url}")
    mirrors.append(mirror)
    mirror.add(folder)
    if sys.stdin.buffer.read():
        os._exit(0)  # `abandon`
    error = ""
    try:
        mirror.finish(folder)
    except RingtrainError as failure:
        error = str(failure)
    mirror.close()
    _print(error or f"all is copied; {_complete(mirrors)}")
    facts = {"error": error, "failed": mirror.failures, "seconds": mirror.seconds}
    with contextlib.suppress(OSError):  # the rank may be gone
        os.write(1, json.dumps({**facts, "taken_by": mirror.lease.taken_by}).encode())
    os._exit(0)


def _end_in_time(ends_s: float, mirrors: list[Mirror]) -> None:
    """Ends this process when its rank is gone and the time is over."""
    rank = select.poll()
    rank.register(sys.stdin.fileno(), select.POLLHUP)  # not yet at the end of input, after which the rank waits
    rank.poll()
    time.sleep(max(0.0, ALONE_S if ends_s == math.inf else ends_s - time.monotonic()))
    _print(f"not all is copied: the rank is gone and the time to save is over (--grace); {_complete(mirrors)}")
    for mirror in mirrors:  # the next start need not wait until the lease expires
        release = threading.Thread(target=mirror.lease.release, daemon=True)
        release.start()
        release.join(RELEASE_S)
    os._exit(1)


def _complete(mirrors: list[Mirror]) -> str:
    steps = [str(step) for mirror in mirrors for step in mirror.copied]
    return f"complete checkpoints there: {', '.join(steps) or 'none'}"


def _print(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)
