"""Keeps TensorFlow's start-up chatter off the terminal, and everything else on it; all of it goes to the rank's log."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import select
import signal
import sys
from pathlib import Path
from typing import IO

from ringtrain.protocol.reader import Lines

MARK = b"\0ringtrain:"  # between what was written and what the watcher shall do
END = b"end\n"
LOG_ONLY = b"log only\n"
TO_LOG = b"to log: "
SILENT = 3
"""exit code of a watcher that was told to leave the terminal alone"""
CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog"
    rb"|E\d{4} .*(Unable to register|failed call to cuInit)"
    rb"|[IW]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\] "  # absl: I0000 00:00:1795168715.773533  4855 port.cc:153]
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [IW] \S+:\d+\] "  # TensorFlow's own, before it took up absl
    rb"|To enable the following instructions: "
    rb"|/job:worker/replica:\d+/task:\d+\s*$"  # the second line of a message about workers that are waited for
    rb"|Improper call to JPEG library|Corrupt JPEG data: |Premature end of JPEG file"  # without the file's name
)


# srun signals all processes of a rank; the rank itself may save before it ends, and has something to say then.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def watch() -> None:
    """Keeps TensorFlow's log lines off the terminal; everything else on standard error still reaches it.

    C++ writes them to file descriptor 2 before any setting takes hold, so the descriptor becomes a pipe. A process of
    its own reads it: what a rank says while it crashes is not lost. Call it before anything starts threads. Calls nest:
    at exit each one gives the descriptor back as it found it, also when its watcher was killed.
    """
    source, sink = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)  # until the watcher is deaf to them
    watcher = os.fork()
    if watcher == 0:
        for number in DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(sink)
        os._exit(0 if _pass_on(source) else SILENT)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(source)
    before_watch = os.dup(2)
    os.dup2(sink, 2)
    os.close(sink)

    own = os.getpid()

    def finish() -> None:
        if os.getpid() != own:
            return  # a child that has inherited this
        # What Python cannot write before it ends would turn its exit code into 120, after all that the rank has done.
        with contextlib.suppress(BrokenPipeError):  # the watcher was killed
            sys.stderr.flush()
            os.write(2, MARK + END)
        if os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]) == SILENT:  # what C++ writes later stays unseen, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), before_watch)
        os.dup2(before_watch, 2)
        os.close(before_watch)

    atexit.register(finish)


def log_to(path: Path, first_line: str) -> None:
    """From now on standard error is also kept in a file, with all that was written to it since watch.

    Args:
        path: of the file; its folder is made if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(first_line + "\n", encoding="utf-8")
    sys.stderr.flush()
    os.write(2, MARK + os.fsencode(path.absolute()) + b"\n")


def log_only() -> None:
    """From now on nothing of this process reaches the terminal, only its log."""
    sys.stderr.flush()
    os.write(2, MARK + LOG_ONLY)


def to_log(line: str) -> None:
    """Writes a line to this process' log alone, after `watch`: it is on the terminal already."""
    with contextlib.suppress(BrokenPipeError):  # the watcher was killed
        os.write(2, MARK + TO_LOG + line.encode(errors="replace") + b"\n")


def _pass_on(source: int) -> bool:
    """Runs the watcher, until it is told to end or no process is left that can write to the pipe.

    Returns:
        Whether the terminal still is to show what is written.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    log: IO[bytes] = io.BytesIO()  # until there is a file
    shown = True
    lines, is_open = Lines(MARK), True
    while is_open:
        if select.select([source], [], [], Lines.WAIT_S if lines.unfinished else None)[0]:
            data = os.read(source, 65536)
            is_open = bool(data)
            found = lines.add(data) if data else lines.rest()
        else:
            found = []
        for line in [*found, *lines.late()]:
            text, _, command = line.partition(MARK)
            if text and shown and not CHATTER.match(text):
                os.write(2, text)
            with contextlib.suppress(OSError):  # a full disk must not silence the terminal
                log.write(text + command.removeprefix(TO_LOG) * command.startswith(TO_LOG))
            if command == END:
                return shown
            if command == LOG_ONLY:
                shown = False
            elif command.startswith(b"/") and isinstance(log, io.BytesIO):
                with contextlib.suppress(OSError):
                    so_far = log.getvalue()
                    log = open(command[:-1], "ab", buffering=0)  # noqa: SIM115 - as long as the process lives
                    log.write(so_far)
    return shown
