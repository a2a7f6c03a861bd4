"""Reports of a rank to its launcher on standard error: its process, its run, its failure."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ringtrain.errors import RingtrainError, exit_code_of
from ringtrain.protocol.env import FIRST_PROCESS, JOB, MARK
from ringtrain.protocol.launchers import launched_rank

PIECE_LETTERS = 600  # launchers split longer lines
CONSEQUENCE = re.compile(
    r"Horovod has been shut down|(UnknownError|HorovodInternalError)\b.*Horovod|grpc_status:14\b", re.DOTALL
)
MAX_LINE = 500
"""characters of a line that is printed last"""
FOLDERS = "|".join(map(re.escape, [sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])]))
LIBRARIES = re.compile(rf"({FOLDERS})/|.*/(site|dist)-packages/|<frozen ")
"""files whose frames in a traceback are not the user's"""
THREADS_S = 8.0
STYLE = re.compile(r"\x1b\[[0-9;]*m")
_failures: list[BaseException] = []


@dataclass(frozen=True)
class Failure:
    rank: int
    host: str
    time_s: float
    """Unix time by its host's clock"""
    kind: str
    """class name of the exception"""
    text: str
    """one line, or the traceback"""
    exit_code: int = 1
    last: str = ""
    """with a traceback: its frame in the user's own code, and the exception in one line"""

    @property
    def is_consequence(self) -> bool:
        """Whether this is a follow-up error, which says only that another rank exited before."""
        return bool(CONSEQUENCE.search(self.text))

    @property
    def has_traceback(self) -> bool:
        return self.text.startswith("Traceback (most recent call last):")

    @property
    def where(self) -> list[str]:
        """Kind and frames of the traceback, equal for ranks that fail alike; without one, the text."""
        frames = [line for line in self.text.splitlines() if line.startswith("  File ")]
        return [self.kind, *frames] if frames else [self.text]

    def lines(self, job: str) -> list[str]:
        """Failure as short lines for standard error."""
        text = base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode(), 9)).decode()
        pieces = [text[start : start + PIECE_LETTERS] for start in range(0, len(text), PIECE_LETTERS)]
        start = f"{MARK}:{job}:failure:{self.rank}:"
        return [f"{start}{number}/{len(pieces)}:{piece}" for number, piece in enumerate(pieces, start=1)]


def report_failure(error: BaseException, rank: int, exit_code: int, with_traceback: bool, host: str = "") -> None:
    """Reports to the launcher, if there is one, why a rank exits; with a traceback for bugs. `host` "": this one."""
    _failures.append(error)
    job = os.environ.get(JOB)
    if not job:
        return
    _write(failure_of(error, rank, exit_code, with_traceback, host).lines(job))
    if not host:  # Python waits for threads, and other ranks wait for this one
        end = threading.Timer(THREADS_S, _end, (exit_code,))
        end.daemon = True
        end.start()


def _end(exit_code: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed pipe
        sys.stdout.flush()
    os._exit(exit_code)


def failure_of(error: BaseException, rank: int, exit_code: int, with_traceback: bool, host: str = "") -> Failure:
    kind = type(error).__name__
    text, last = f"{kind}: {error}", ""
    if with_traceback:
        text = last = printed(error).rstrip()
        if not isinstance(error, RingtrainError):
            last = f"{_users_frame(error)}{_in_one_line(error)}"
    text = text if len(text) < 20_000 else f"{text[:10_000]}\n...\n{text[-10_000:]}"
    return Failure(rank, host or socket.gethostname(), time.time(), kind, text.rstrip(), exit_code, last)


def printed(error: BaseException) -> str:
    """What a rank prints of an uncaught exception: the traceback, but of a RingtrainError the user's frame only."""
    if isinstance(error, RingtrainError):
        return f"{_users_frame(error)}{type(error).__name__}: {error}\n"
    return "".join(traceback.format_exception(error))


def _users_frame(error: BaseException) -> str:
    """Innermost frame of a traceback in the user's own code, as Python prints it; "" if there is none."""
    chosen = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        is_generated = code.co_filename == "<string>" and frame.f_globals.get("__name__") != "__main__"
        if not LIBRARIES.match(code.co_filename) and not is_generated:
            chosen = traceback.FrameSummary(code.co_filename, line, code.co_name)
    return "".join(traceback.format_list([chosen])) if chosen else ""


def _in_one_line(error: BaseException) -> str:
    """Class and message of an exception, without the indented lines in which libraries tell of their own code."""
    message = STYLE.sub("", str(error)).splitlines()
    told = " ".join(line.strip() for line in message if line and not line[0].isspace())
    return shortened(f"{type(error).__name__}: {told}".removesuffix(": "))


def shortened(line: str) -> str:
    """A line with at most MAX_LINE characters."""
    if len(line) <= MAX_LINE:
        return line
    half = MAX_LINE // 2 - 3
    return f"{line[:half]} ... {line[-half:]}"


def _write(lines: Sequence[str], times: int = 2) -> None:
    """Writes lines, twice because mixed with the output of many ranks a line may arrive incomplete."""
    sys.stderr.flush()
    for line in [*lines] * times:
        os.write(2, f"{line}\n".encode())
        time.sleep(0.002)  # so that the launcher reads line by line


def ended_well() -> bool:
    """Returns whether this process has reported no failure and left no exception uncaught so far."""
    return not _failures and getattr(sys, "last_value", None) is None


def report_uncaught(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Installs an excepthook that also reports uncaught exceptions of this rank to the launcher, if there is one."""
    if JOB not in environ:
        return
    before, process = getattr(sys.excepthook, "before", sys.excepthook), os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # the launcher prints what has stopped the job
        # The report first, so that the launcher knows what the following lines belong to. A process that the rank has
        # forked is not the rank, which lives.
        if os.getpid() == process:
            report_failure(error.with_traceback(trace), rank, exit_code_of(error), with_traceback=True)
        if before is not sys.__excepthook__:
            before(kind, error, trace)
        else:  # line by line: launchers mix parts of lines of several ranks
            for line in printed(error).splitlines(keepends=True):
                sys.stderr.write(line)

    hook.before = before  # type: ignore[attr-defined]
    sys.excepthook = hook


def report_uncaught_from_start(environ: Mapping[str, str] = os.environ) -> None:
    """`report_uncaught` before hvd.init(), if this is surely the process of a rank and none that a rank has started."""
    rank = launched_rank(environ)
    if rank is not None and environ.get(FIRST_PROCESS) == str(os.getpid()):
        report_uncaught(rank, environ)


def report_process(environ: MutableMapping[str, str] = os.environ) -> None:
    """Reports this process as the one that trains, if the rank's command is a script or program that started it."""
    first = environ.pop(FIRST_PROCESS, "")  # so that child processes do not report
    # In a PID namespace of its own it reports nothing: the launcher's host has another ID for it.
    if environ.get(JOB) and first in map(str, ancestors(os.getppid())):
        report("process", first, os.getpid(), socket.gethostname(), times=2, environ=environ)


def report(kind: str, *fields: str | int, times: int = 1, environ: Mapping[str, str] = os.environ) -> None:
    """Reports a fact to the launcher, if there is one: a kind and its fields, as `reader.Reader` takes them."""
    if environ.get(JOB):
        _write([":".join(map(str, (MARK, environ[JOB], kind, *fields)))], times)


def report_run(name: str) -> None:
    """Reports the name of the run, which the next attempt resumes. Called by rank 0."""
    report("run", base64.b64encode(name.encode()).decode(), "")


def ancestors(process: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """IDs of a process on this host and of its ancestors, nearest first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process:
            yield process
            process = int((proc / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
