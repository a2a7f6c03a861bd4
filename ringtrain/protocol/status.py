"""The step a rank is at, in shared memory: readable after the process has been killed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

from ringtrain.protocol.env import JOB

STATUS_FILES = "/dev/shm/ringtrain"
"""how the names of ranks' boxes begin; the job's id and the rank follow"""
STATUS_LENGTH = 80


class StatusLine:
    """Says which step a rank is at, in a line that is there also when the process has been killed.

    In memory that the host keeps after the process' end: the launcher's keeper reads it, and removes it. Without a
    launcher that listens, it is nowhere; nor where something else has its name. Training never fails for it.
    """

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            if environ.get(JOB):
                name = f"{STATUS_FILES}-{environ[JOB]}-{rank}"
                # Not to block: a FIFO without a reader would.
                descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
                    self._descriptor = descriptor
                else:
                    os.close(descriptor)

    def put(self, global_step: int, phase: str) -> None:
        """Says where this rank stands now."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):  # /dev/shm is full, as with the 64 MB that Docker gives it
            os.pwrite(self._descriptor, f"{global_step} {phase}".ljust(STATUS_LENGTH - 1).encode() + b"\n", 0)
