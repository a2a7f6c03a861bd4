"""Status line of a rank (step and phase) in shared memory: other processes of its host read it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from typing import Any

from ringtrain.protocol.env import JOB

STATUS_FILES = "/dev/shm/ringtrain"
"""path prefix of the status lines; "-", the job's ID, "-" and the rank follow"""
STATUS_LENGTH = 80


class StatusLine:
    """Status line of one rank, readable by its user while the process is stopped and, with a launcher, after it."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self.descriptor = -1
        job = environ.get(JOB)
        if job:
            # A file in /dev/shm, which the host agent reads and removes after the process has exited.
            self.descriptor = open_own(f"{STATUS_FILES}-{job}-{rank}")
        if self.descriptor < 0:
            with contextlib.suppress(OSError):  # what cannot be shown must not stop training
                # Memory that `look_at` alone finds.
                self.descriptor = os.memfd_create("ringtrain")

    def put(self, global_step: int, phase: str) -> None:
        with contextlib.suppress(OSError):  # /dev/shm may be full: Docker gives it 64 MB
            os.pwrite(self.descriptor, f"{global_step} {phase}".ljust(STATUS_LENGTH - 1).encode() + b"\n", 0)


def look_at(process: int, descriptor: int) -> dict[str, Any]:
    """State of another process as a letter of proc(5), "" if it is gone; step and phase if its line is readable."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            seen: dict[str, Any] = {"state": file.read().rpartition(")")[2].split()[0]}
    except OSError:
        return {"state": ""}
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{process}/fd/{descriptor}", encoding="utf-8") as file:
        step, phase = file.read().split()
        seen |= {"step": int(step), "phase": phase}
    return seen


def take(job: str, rank: int) -> str:
    """Status line of a rank that has exited, which is then removed; "" without one."""
    path = f"{STATUS_FILES}-{job}-{rank}"
    descriptor = open_own(path)
    if descriptor < 0:
        return ""
    with open(descriptor, errors="replace") as file:
        text = file.read(STATUS_LENGTH)
    os.unlink(path)
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


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
