"""Process that copies a run to its mirror after a signal, and continues for a while if its rank is killed.

An MPI kills all ranks when one of them is lost, rank 0 in the middle of its upload. So rank 0 leaves the last copy, and
the lease of the mirror, to a process that no launcher and no host agent counts to the job: in a session of its own,
without a parent in the job and without the job's ID in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
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
LOOK_S = 0.5


class LastCopy:
    """The process, for its rank.

    Args:
        left: What it needs of the rank's mirror, credentials included: they go through a pipe.
        ends_s: When it exits if the rank is gone, as of time.monotonic().
    """

    def __init__(self, left: Left, folder: Path, ends_s: float) -> None:
        self.folder = folder
        state = pickle.dumps((left, folder.absolute(), os.getpid(), ends_s))
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
        self._socket.sendall(state)
        process.wait()

    def finish(self) -> dict[str, Any]:
        """Lets it copy what has changed since, and waits until it exits. Returns facts; none if it was killed."""
        with contextlib.suppress(OSError), self._socket, self._socket.makefile("rb") as answer:
            self._socket.shutdown(socket.SHUT_WR)
            return parse_object(answer.read().decode(errors="replace"))
        return {}


def main() -> None:
    """Copies until standard input ends: the rank has written its last file, or is gone."""
    left, folder, rank, ends_s = pickle.load(sys.stdin.buffer)
    mirrors: list[Mirror] = []
    threading.Thread(target=_end_in_time, args=(rank, ends_s, mirrors), daemon=True).start()
    url, _, name = left.url.rpartition("/")
    mirror = Mirror(url, name, expires_s=left.expires_s, left=left)
    _say(f"process {os.getpid()} copies {folder} to {mirror.url}")
    mirrors.append(mirror)
    mirror.add(folder)
    sys.stdin.buffer.read()
    error = ""
    try:
        mirror.finish(folder)
    except RingtrainError as failure:
        error = str(failure)
    mirror.close()
    _say(error or f"all is copied; {_complete(mirrors)}")
    facts = {"error": error, "failed": mirror.failures, "seconds": mirror.seconds}
    with contextlib.suppress(OSError):  # the rank may be gone
        os.write(1, json.dumps({**facts, "taken_by": mirror.lease.taken_by}).encode())
    os._exit(0)


def _end_in_time(rank: int, ends_s: float, mirrors: list[Mirror]) -> None:
    """Ends this process when its rank is gone and the time is over; the lease then expires."""
    while time.monotonic() < ends_s or _is_there(rank):
        time.sleep(LOOK_S)
    _say(f"not all is copied: the rank is gone and the time to save is over (--grace); {_complete(mirrors)}")
    os._exit(1)


def _complete(mirrors: list[Mirror]) -> str:
    steps = [str(step) for mirror in mirrors for step in mirror.copied]
    return f"complete checkpoints there: {', '.join(steps) or 'none'}"


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:  # there is none, or by now another user's
        return False
    return True


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)
