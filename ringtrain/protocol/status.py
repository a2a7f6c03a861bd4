"""Status line of a rank (step and phase) in shared memory, readable after the process was killed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

from ringtrain.protocol.env import JOB

STATUS_FILES = "/dev/shm/ringtrain"
"""path prefix of the status lines; the job's ID and the rank follow"""
STATUS_LENGTH = 80


class StatusLine:
    """Status line of one rank in /dev/shm, which the host agent reads and removes after the process has exited.

    Nothing is written without a launcher, or if another kind of file has its name. Errors never stop training.
    """

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            if environ.get(JOB):
                name = f"{STATUS_FILES}-{environ[JOB]}-{rank}"
                # O_NONBLOCK: a FIFO without a reader would block.
                descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
                opened = os.fstat(descriptor)
                if stat.S_ISREG(opened.st_mode) and opened.st_uid == os.geteuid() and opened.st_nlink == 1:
                    self._descriptor = descriptor
                else:
                    os.close(descriptor)

    def put(self, global_step: int, phase: str) -> None:
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):  # /dev/shm may be full: Docker gives it 64 MB
            os.pwrite(self._descriptor, f"{global_step} {phase}".ljust(STATUS_LENGTH - 1).encode() + b"\n", 0)
