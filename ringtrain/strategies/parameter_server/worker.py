"""Rank other than the coordinator: it supervises the process of a parameter server or a worker.

The rank itself only waits, so that a worker may die without its rank: launchers end a job when a rank dies.
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
    """Supervises this rank's process until the coordinator stops the rank, and returns the coordinator's exit code.

    A dead worker of ps-async is restarted if it was ready before. If another process dies, this rank exits the same
    way, and the launcher ends the job.
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
            if message[0] == "failed" and kept.number:  # the other workers continue without it
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
    """Supervised process and its messages."""

    def __init__(self, config: Config, crew: RankGroup, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit MPI's state
        self.news, told = context.Pipe(duplex=False)
        ends, self.held = context.Pipe(duplex=False)
        self.ready, self.number, self.why = False, number, ""
        place = server.Place(config, crew.roles, crew.rank, number)
        self.process: Any = context.Process(target=server.main, args=(place, told, ends))
        self.process.start()
        told.close()
        ends.close()

    def message(self) -> Any:
        """Next message within POLL_S, also from before the process exited; None if there is none."""
        try:
            return self.news.recv() if self.news.poll(POLL_S) else None
        except (EOFError, OSError):
            time.sleep(POLL_S)  # the caller sees the exit code
            return None

    def end(self) -> None:
        """Stops the process by closing its pipe, which also happens if this rank dies; kills it after END_S."""
        self.held.close()
        self.process.join(END_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end_as(code: int) -> None:
    """Ends this rank with the signal or exit code of its process."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code or 1)
