"""What a rank does that is not the chief: it keeps a process that is a parameter server or a worker.

The rank itself only waits, so that a worker may die without its rank: launchers end a job with the first rank that
dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

from ringtrain.config import Config
from ringtrain.strategies.parameter_server import server
from ringtrain.strategies.parameter_server.cluster import POLL_S, SIGNALS, RankGroup

END_S = 5.0


def keep(config: Config, crew: RankGroup) -> int:
    """Serves until the chief lets this rank end.

    A worker of ps-async that dies is started again, as long as it had been ready; where any other process dies, this
    rank ends in the same way, and the launcher ends the job.

    Returns:
        The exit code that the chief gives.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    replaceable = crew.roles.of(crew.rank)[0] == "worker" and config.strategy.name == "ps-async"
    kept: _Kept | None = _Kept(config, crew, 0)
    while True:
        if (found := crew.heard(0)) is not None:
            _, (word, number) = found
            if word == "signal":
                os.kill(kept.process.pid, number) if kept is not None else None
                continue
            if kept is not None:
                kept.end()
            crew.tell(0, "ended")
            crew.finish()
            return int(number)
        if kept is None:
            time.sleep(POLL_S)
        elif message := kept.message():
            kept.ready = kept.ready or message[0] == "ready"
            if message[0] == "failed" and kept.number:  # the others go on without
                kept.why = f"cannot begin again: {message[2]}"
                kept.end()
            else:
                crew.tell(0, *message)
        elif (code := kept.process.exitcode) is not None:
            if not replaceable or (not kept.number and not kept.ready):
                _end_as(code)
            crew.tell(0, "lost", kept.why or _how(code), kept.ready)
            kept = _Kept(config, crew, kept.number + 1) if kept.ready else None


class _Kept:
    """A process, and what it tells."""

    def __init__(self, config: Config, crew: RankGroup, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take MPI along
        self.news, told = context.Pipe(duplex=False)
        ends, self.held = context.Pipe(duplex=False)
        self.ready, self.number, self.why = False, number, ""
        place = server.Place(config, crew.roles, crew.rank, number)
        self.process: Any = context.Process(target=server.main, args=(place, told, ends))
        self.process.start()
        told.close()
        ends.close()

    def message(self) -> Any:
        """What it says, if it says something within a moment; what it has said before its end, too."""
        try:
            return self.news.recv() if self.news.poll(POLL_S) else None
        except (EOFError, OSError):
            time.sleep(POLL_S)  # its end shows in its exit code
            return None

    def end(self) -> None:
        """It ends when nobody holds its pipe any more, whatever became of this rank."""
        self.held.close()
        self.process.join(END_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end_as(code: int) -> None:
    """Ends this rank as its process has ended."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code or 1)
