"""What a rank does that is not the chief: it keeps a process that is a parameter server or a worker.

The rank itself only waits, so that a worker may die without its rank: launchers end a job with the first rank that dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from ringtrain.config import Config
from ringtrain.strategies import server
from ringtrain.strategies.roles import POLL_S, SIGNALS, Crew

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

END_S = 5.0


def keep(config: Config, crew: Crew) -> int:
    """Serves until the chief lets this rank end.

    A worker of ps-async that dies is started again, as long as it had been ready; where any other process dies, this
    rank ends in the same way, and the launcher ends the job.

    Args:
        config: the resolved configuration.
        crew: all ranks.

    Returns:
        The exit code that the chief gives.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    role, _ = crew.roles.of(crew.rank)
    kept, number = _Kept(config, crew, 0), 0
    while True:
        if kept.news.poll(POLL_S):
            message = _received(kept.news)
            if message:
                kept.ready = kept.ready or message[0] == "ready"
                crew.tell(0, *message)
        if (found := crew.heard(0)) is not None:
            _, (_, exit_code) = found
            kept.end()
            return int(exit_code)
        if kept.process.exitcode is not None and not kept.news.poll():
            code = kept.process.exitcode
            if role != "worker" or config.strategy.name != "ps-async" or (not number and not kept.ready):
                _end_as(code)
            if not kept.ready:
                crew.tell(0, "lost", f"for good, as it could not be started again ({_how(code)})")
                kept.news, kept.ready = multiprocessing.Pipe(duplex=False)[0], True
                kept.process = _Gone()
                continue
            crew.tell(0, "lost", _how(code))
            number += 1
            kept = _Kept(config, crew, number)


class _Kept:
    """A process, and what it tells."""

    def __init__(self, config: Config, crew: Crew, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take MPI along
        self.news, told = context.Pipe(duplex=False)
        ends, self.held = context.Pipe(duplex=False)
        self.ready = False
        place = server.Place(config, crew.roles, crew.rank, number)
        self.process: Any = context.Process(target=server.main, args=(place, told, ends))
        self.process.start()
        told.close()
        ends.close()

    def end(self) -> None:
        """It ends when nobody holds its pipe any more, whatever became of this rank."""
        self.held.close()
        self.process.join(END_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


class _Gone:
    """In place of a process that is not there any more."""

    exitcode = None

    def join(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    kill = join


def _received(news: Connection) -> Any:
    try:
        return news.recv()
    except (EOFError, OSError):
        time.sleep(POLL_S)  # its end is noticed by its exit code
        return None


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end_as(code: int) -> None:
    """Ends this rank as its process has ended."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code or 1)
