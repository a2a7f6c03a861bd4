"""Gate of the ranks that stand by: a file in their host's shared memory, which the host agent makes when they may go.

It holds the attempt that begins (`attempt.Attempt`), as JSON in base64, on one line. Its name is secret.
"""

from __future__ import annotations

import base64
import contextlib
import os
import stat
import time
from collections.abc import MutableMapping

from ringtrain.protocol.env import ATTEMPT, BEGUN, GATE

FOLDER = "/dev/shm"
LOOK_S = 0.05
MODULE = "ringtrain.standby"
"""which waits at the gate, and then runs a script"""


def order(name: str, attempt: str) -> str:
    """The launcher's order to an agent, which opens the gate on its host, and says whether it could."""
    return f"go {name} {base64.b64encode(attempt.encode()).decode()}"


def wait(parent: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Waits until the gate is open, and puts the attempt into the environment. Exits if its parent has exited."""
    path = f"{FOLDER}/{environ.pop(GATE)}"
    while os.getppid() == parent:
        text = _read(path)
        if text.endswith(b"\n"):  # else it is being written
            environ[ATTEMPT] = base64.b64decode(text).decode()
            environ[BEGUN] = str(time.time())
            return
        time.sleep(LOOK_S)
    raise SystemExit(1)


def _read(path: str) -> bytes:
    """Content of a file of this user; b"" if there is none."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                return file.read()
    return b""
