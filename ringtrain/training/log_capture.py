"""Writes standard error to the rank's log and, without TensorFlow's start-up log messages, to the terminal."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import signal
import sys
from pathlib import Path
from typing import IO

from ringtrain.protocol.reader import CHATTER, Lines

MARK = b"\0ringtrain:"  # separates output from commands to the watcher
END = b"end\n"
LOG_ONLY = b"log only\n"
NEW_RUN = b"new run\n"
SILENT = 3
"""Exit code of a watcher after `log_only`."""


# srun signals all processes of a rank. The rank may save and print before it exits, so its watcher must not exit.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


_watched_by: list[int] = []
"""ID of the process whose standard error is captured: one that is forked is not captured itself."""


def watch() -> None:
    """Keeps TensorFlow's log lines, and nothing else, off the terminal. Call it before any thread is started."""
    if is_on():  # another run begins, with a log of its own
        with contextlib.suppress(BrokenPipeError):  # the watcher was killed
            sys.stderr.flush()
            os.write(2, MARK + NEW_RUN)
        return
    _watched_by[:] = [os.getpid()]
    source, sink = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)  # until the watcher ignores them
    watcher = os.fork()  # a process, so that no output of a crashing rank is lost
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

    process = os.getpid()

    def finish() -> None:
        if os.getpid() != process:
            return  # a child process that inherited this handler
        # Python exits with code 120 if it cannot flush standard error, even if all else succeeded.
        with contextlib.suppress(BrokenPipeError):  # the watcher was killed
            sys.stderr.flush()
            os.write(2, MARK + END)
        if os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]) == SILENT:  # hides later output of C++, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), before_watch)
        os.dup2(before_watch, 2)
        os.close(before_watch)

    atexit.register(finish)


def is_on() -> bool:
    """Returns whether this process has called `watch`; in a script, standard error is the script's own."""
    return _watched_by == [os.getpid()]


def log_to(path: Path, first_line: str) -> None:
    """Also writes standard error to a file from now on, including all output since `watch`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(first_line + "\n", encoding="utf-8")
    if is_on():
        sys.stderr.flush()
        os.write(2, MARK + os.fsencode(path.absolute()) + b"\n")


def log_only() -> None:
    """Writes standard error only to the log from now on, not to the terminal."""
    sys.stderr.flush()
    os.write(2, MARK + LOG_ONLY)


def _pass_on(source: int) -> bool:
    """Runs the watcher until it receives END or all writers have closed the pipe; returns False after `log_only`."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    log: IO[bytes] = io.BytesIO()  # until `log_to` names a file
    shown = True
    lines, is_open = Lines(MARK), True
    while is_open:
        wait_s = Lines.WAIT_S if lines.unfinished else None
        if select.select([source], [], [], wait_s)[0]:
            data = os.read(source, 65536)
            is_open = bool(data)
            complete = lines.add(data) if data else lines.rest()
        else:
            complete = []
        for line in [*complete, *lines.late()]:
            text, _, command = line.partition(MARK)
            if text and shown and not CHATTER.match(text):
                with contextlib.suppress(OSError):  # a closed terminal must not silence the log
                    os.write(2, text)
            with contextlib.suppress(OSError):  # a full disk must not silence the terminal
                log.write(text)
            if command == END:
                return shown
            if command == LOG_ONLY:
                shown = False
            elif command == NEW_RUN:
                log.close()
                log = io.BytesIO()
            elif command.startswith(b"/") and isinstance(log, io.BytesIO):
                with contextlib.suppress(OSError):
                    so_far = log.getvalue()
                    log = open(command[:-1], "ab", buffering=0)  # noqa: SIM115 - as long as the process lives
                    log.write(so_far)
    return shown
