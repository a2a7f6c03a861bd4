"""Reports of a rank to its launcher on standard error: its process, its run, its failure."""

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
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ringtrain.errors import exit_code_of
from ringtrain.protocol.env import FIRST_PROCESS, JOB, MARK

PIECE_LETTERS = 600  # launchers split longer lines
CONSEQUENCE = re.compile(
    r"Horovod has been shut down|(UnknownError|HorovodInternalError)\b.*Horovod|grpc_status:14\b", re.DOTALL
)
REDUCING = "call ringtrain.fit in place of model.fit, or compile with ringtrain.hvd.DistributedOptimizer(optimizer)"
"""advice for ranks that train models of their own"""
READ_WHEN_LOADED = re.compile("(TF_(?!CONFIG|NUM_)|XLA_|KERAS_|KMP_|OMP_|MKL_|OPENBLAS_|CUDA_(?!VISIBLE))[A-Z0-9_]*")
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

    @property
    def is_consequence(self) -> bool:
        """Whether this is a follow-up error, which says only that another rank exited before."""
        return bool(CONSEQUENCE.search(self.text))

    def lines_for_a_person(self) -> list[str]:
        """Lines in which the rank itself prints the failure, without indentation; not those of a traceback."""
        said = f"ringtrain: {self.text.removeprefix(f'{self.kind}: ')}"
        return [line.strip() for line in said.splitlines()]

    def lines(self, job: str) -> list[str]:
        """Failure as short lines for standard error."""
        text = base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode(), 9)).decode()
        pieces = [text[start : start + PIECE_LETTERS] for start in range(0, len(text), PIECE_LETTERS)]
        start = f"{MARK}:{job}:failure:{self.rank}:"
        return [f"{start}{number}/{len(pieces)}:{piece}" for number, piece in enumerate(pieces, start=1)]


def report_failure(error: BaseException, rank: int, exit_code: int, with_traceback: bool, host: str = "") -> None:
    """Reports to the launcher, if there is one, why a rank exits; with a traceback for bugs. host "": this one."""
    _failures.append(error)
    job = os.environ.get(JOB)
    if job:
        _write(failure_of(error, rank, exit_code, with_traceback, host).lines(job))


def failure_of(error: BaseException, rank: int, exit_code: int, with_traceback: bool, host: str = "") -> Failure:
    if with_traceback:
        text = "".join(traceback.format_exception(error))
    else:
        text = f"{type(error).__name__}: {error}"
    text = text if len(text) < 20_000 else f"{text[:10_000]}\n...\n{text[-10_000:]}"
    return Failure(rank, host or socket.gethostname(), time.time(), type(error).__name__, text.rstrip(), exit_code)


def _write(lines: Sequence[str], times: int = 2) -> None:
    """Writes lines, twice because mixed with the output of many ranks a line may arrive incomplete."""
    sys.stderr.flush()
    for line in [*lines] * times:
        os.write(2, f"{line}\n".encode())
        time.sleep(0.002)  # so that the launcher reads line by line


def ended_well() -> bool:
    """Whether this process has reported no failure and left no exception uncaught so far."""
    return not _failures and getattr(sys, "last_value", None) is None


def report_uncaught(rank: Callable[[], int], environ: Mapping[str, str] = os.environ) -> None:
    """Installs an excepthook that also reports uncaught exceptions to the launcher, if there is one."""
    if JOB not in environ or getattr(sys.excepthook, "is_ringtrains", False):
        return
    before, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        # A process that the rank has forked is not the rank, which lives.
        if not issubclass(kind, KeyboardInterrupt) and os.getpid() == process:
            report_failure(error.with_traceback(trace), rank(), exit_code_of(error), with_traceback=True)

    hook.is_ringtrains = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report_process(environ: MutableMapping[str, str] = os.environ) -> None:
    """Reports this process as the one that trains, if the rank's command is a script or program that started it.

    In a PID namespace of its own it reports nothing, since the launcher's host has another ID for it. Removes the ID of
    the first process from environ, so that child processes do not report.
    """
    first = environ.pop(FIRST_PROCESS, "")
    if environ.get(JOB) and first in map(str, ancestors(os.getppid())):
        _write([f"{MARK}:{environ[JOB]}:process:{first}:{os.getpid()}:{socket.gethostname()}"])


def report_init(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Reports that this rank has called hvd.init(), and the variables that its script has set before."""
    job = environ.get(JOB)
    if not job:
        return
    changed = changed_variables(environ)
    if changed:
        text = base64.b64encode(json.dumps(changed).encode()).decode()
        _write([f"{MARK}:{job}:variables:{text}:"])
    _write([f"{MARK}:{job}:init:{rank}"], times=1)


def changed_variables(environ: Mapping[str, str], start: Path = Path("/proc/self/environ")) -> dict[str, str]:
    """Variables that TensorFlow and Keras read when they are loaded, and that this process did not start with."""
    with contextlib.suppress(OSError):
        given = {*start.read_bytes().decode(errors="replace").split("\0")}
        changed = {name: value for name, value in environ.items() if f"{name}={value}" not in given}
        return {name: value for name, value in changed.items() if READ_WHEN_LOADED.fullmatch(name)}
    return {}


def report_no_init(environ: Mapping[str, str] = os.environ) -> None:
    """Reports that this process exits, and could have called hvd.init(), but never has."""
    if environ.get(JOB):
        _write([f"{MARK}:{environ[JOB]}:no-init:{os.getpid()}"], times=1)


def report_left(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Reports that a rank exits by itself, while others may still wait for it."""
    if environ.get(JOB):
        _write([f"{MARK}:{environ[JOB]}:left:{rank}"], times=1)


def report_cut(rank: int, number: int, environ: Mapping[str, str] = os.environ) -> None:
    """Reports that a signal has killed the ssh of a rank, which may live on."""
    if environ.get(JOB):
        _write([f"{MARK}:{environ[JOB]}:cut:{rank}:{number}:"])


def report_weights(rank: int, checksum: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Reports weights that this rank has trained without the others' gradients; returns whether there is a launcher."""
    if environ.get(JOB):
        _write([f"{MARK}:{environ[JOB]}:weights:{rank}:{checksum}:"])
    return bool(environ.get(JOB))


def ancestors(process: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """IDs of a process on this host and of its ancestors, nearest first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process:
            yield process
            process = int((proc / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def report_recovery(environ: Mapping[str, str] = os.environ) -> None:
    """Reports that the ranks continue, so that failures reported before are no exit cause any more."""
    if environ.get(JOB):
        _write([f"{MARK}:{environ[JOB]}:recovery:"], times=1)


def report_run(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Reports the name of the run, which the next attempt resumes. Called by rank 0."""
    if environ.get(JOB):
        _write([f"{MARK}:{environ[JOB]}:run:{base64.b64encode(name.encode()).decode()}:"])
