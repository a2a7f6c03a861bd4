"""Status line of a rank (step and phase) in shared memory, readable after the process was killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping

from ringtrain.protocol.env import JOB

STATUS_FILES = "/dev/shm/ringtrain"
"""path prefix of the status lines; "-", the job's ID, "-" and the rank follow, then "." and a random name if another
user has taken that path"""
STATUS_LENGTH = 80


class StatusLine:
    """Status line of one rank in /dev/shm, which the host agent reads and removes after the process has exited.

    Nothing is written without a launcher, nor to a file that another user or a link has put there. Errors never stop
    training.
    """

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._descriptor = -1
        if job := environ.get(JOB):
            path = f"{STATUS_FILES}-{job}-{rank}"
            self._descriptor = open_own(path)
            if self._descriptor < 0:
                self._descriptor = open_own(f"{path}.{secrets.token_hex(8)}")

    def put(self, global_step: int, phase: str) -> None:
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):  # /dev/shm may be full: Docker gives it 64 MB
            os.pwrite(self._descriptor, f"{global_step} {phase}".ljust(STATUS_LENGTH - 1).encode() + b"\n", 0)


def open_own(path: str) -> int:
    """Descriptor of a file that this user has, or gets, under a path; -1 if it cannot be opened or is anything else."""
    with contextlib.suppress(OSError):
        # O_NONBLOCK: a FIFO without a reader would block.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        opened = os.fstat(descriptor)
        if stat.S_ISREG(opened.st_mode) and opened.st_uid == os.geteuid() and opened.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    return -1
