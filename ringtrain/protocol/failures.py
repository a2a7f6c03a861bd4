"""What a rank tells its launcher on standard error: its process, its run, why it ends."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ringtrain.protocol.env import FIRST_PROCESS, JOB, MARK

PIECE_LETTERS = 600  # launchers cut longer lines in two
CONSEQUENCE = re.compile(
    r"Horovod has been shut down|(UnknownError|HorovodInternalError)\b.*Horovod|grpc_status:14\b", re.DOTALL
)
_failures: list[BaseException] = []


@dataclass(frozen=True)
class Failure:
    """Why one rank ended."""

    rank: int
    host: str
    time_s: float
    """since 1970, by its host's clock"""
    kind: str
    """of the exception"""
    text: str
    """one line, or the traceback"""
    exit_code: int = 1

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank has ended before."""
        return bool(CONSEQUENCE.search(self.text))

    def lines_for_a_person(self) -> list[str]:
        """The lines in which the rank itself says it, without indentation; a traceback's are others."""
        said = f"ringtrain: {self.text.removeprefix(f'{self.kind}: ')}"
        return [line.strip() for line in said.splitlines()]

    def lines(self, job: str) -> list[str]:
        """The failure as short lines for standard error."""
        text = base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode(), 9)).decode()
        pieces = [text[start : start + PIECE_LETTERS] for start in range(0, len(text), PIECE_LETTERS)]
        return [
            f"{MARK}:{job}:failure:{self.rank}:{number}/{len(pieces)}:{piece}"
            for number, piece in enumerate(pieces, start=1)
        ]


def report_failure(error: BaseException, rank: int, exit_code: int, with_traceback: bool, host: str = "") -> None:
    """Tells the launcher why a rank ends; does nothing without a launcher that listens.

    Args:
        rank: its number; this process', unless it speaks for one that cannot.
        with_traceback: for a bug; without it the message says everything.
        host: of the rank; empty: this one.
    """
    _failures.append(error)
    job = os.environ.get(JOB)
    if not job:
        return
    text = "".join(traceback.format_exception(error)) if with_traceback else f"{type(error).__name__}: {error}"
    text = text if len(text) < 20_000 else f"{text[:10_000]}\n...\n{text[-10_000:]}"
    failure = Failure(rank, host or socket.gethostname(), time.time(), type(error).__name__, text.rstrip(), exit_code)
    sys.stderr.flush()
    for _ in range(2):  # twice: in the output of many ranks a line may get torn
        for line in failure.lines(job):
            os.write(2, f"{line}\n".encode())
            time.sleep(0.002)  # so that the launcher reads line by line


def ended_well() -> bool:
    """Whether this process has met nothing so far that ends it: no failure was reported, no exception left uncaught."""
    return not _failures and getattr(sys, "last_value", None) is None


def report_uncaught(rank: Callable[[], int], environ: Mapping[str, str] = os.environ) -> None:
    """From now on an exception that nobody catches is also told to the launcher, if one listens."""
    if JOB not in environ or getattr(sys.excepthook, "is_ringtrains", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            report_failure(error.with_traceback(trace), rank(), 1, with_traceback=True)

    hook.is_ringtrains = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report_process(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tells the launcher which process trains, where the rank's command is a script or program that has started it.

    In a namespace of its own a process has another number than the launcher's host has for it, and tells nothing.

    Args:
        environ: names the job and the process of the command; what this process starts is not told the latter.
    """
    first = environ.pop(FIRST_PROCESS, "")
    if environ.get(JOB) and first in _ancestors():
        sys.stderr.flush()
        for _ in range(2):  # as failures
            os.write(2, f"{MARK}:{environ[JOB]}:process:{first}:{os.getpid()}:{socket.gethostname()}\n".encode())
            time.sleep(0.002)


def _ancestors() -> Iterator[str]:
    """The processes that have started this one, from the nearest on, as /proc has them."""
    process = str(os.getppid())
    with contextlib.suppress(OSError):
        while process != "0":
            yield process
            status = Path("/proc", process, "status").read_text(errors="replace")
            process = status.partition("\nPPid:")[2].split()[0]


def report_recovery(environ: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher that the ranks go on, so that what was reported before is no reason for their end any more."""
    if environ.get(JOB):
        sys.stderr.flush()
        os.write(2, f"{MARK}:{environ[JOB]}:recovery:\n".encode())


def report_run(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher what the run is called, so that it can be given to the next start; by rank 0."""
    if environ.get(JOB):
        text = base64.b64encode(name.encode()).decode()
        sys.stderr.flush()
        for _ in range(2):  # as failures
            os.write(2, f"{MARK}:{environ[JOB]}:run:{text}:\n".encode())
            time.sleep(0.002)
