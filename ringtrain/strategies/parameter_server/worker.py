"""Rank other than the coordinator: it supervises the process of a parameter server or a worker.

The rank itself only waits, so that a worker may die without its rank: launchers end a job when a rank dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

from ringtrain.config.sections import Config
from ringtrain.strategies.parameter_server import server
from ringtrain.strategies.parameter_server.cluster import POLL_S, SIGNALS, RankGroup

EXIT_TIMEOUT_S = 5.0


def supervise(config: Config, group: RankGroup) -> int:
    """Supervises this rank's process until the coordinator stops the rank, and returns the coordinator's exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A dead worker of ps-async is restarted if it was ready before.
    replaceable = group.roles.of(group.rank)[0] == "worker" and config.strategy.name == "ps-async"
    served: _Served | None = _Served(config, group, 0)
    while True:
        received = group.receive(0)
        if received is not None:
            _, (word, number) = received
            if word == "signal":
                if served is not None:
                    os.kill(served.process.pid, number)
                continue
            if served is not None:
                served.end()
            group.send(0, "ended")
            group.finish()
            return int(number)
        if served is None:
            time.sleep(POLL_S)
            continue
        message = served.message()
        if message:
            served.ready = served.ready or message[0] == "ready"
            if message[0] == "failed" and served.number:  # the other workers continue without it
                served.why = f"cannot begin again: {message[2]}"
                served.end()
            else:
                group.send(0, *message)
            continue
        code = served.process.exitcode
        if code is not None:
            if not replaceable or (not served.number and not served.ready):
                _exit_as(code)  # as the process did, and the launcher ends the job
            group.send(0, "lost", served.why or _exit_text(code), served.ready)
            served = _Served(config, group, served.number + 1) if served.ready else None


class _Served:
    """Supervised process and its messages."""

    def __init__(self, config: Config, group: RankGroup, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit MPI's state
        self.messages, sender = context.Pipe(duplex=False)
        lifeline, self.lifeline = context.Pipe(duplex=False)
        self.ready, self.number, self.why = False, number, ""
        task = server.Task(config, group.roles, group.rank, number)
        self.process: Any = context.Process(target=server.main, args=(task, sender, lifeline))
        self.process.start()
        sender.close()
        lifeline.close()

    def message(self) -> Any:
        """Next message within POLL_S, also from before the process exited; None if there is none."""
        try:
            if self.messages.poll(POLL_S):
                return self.messages.recv()
            return None
        except (EOFError, OSError):
            time.sleep(POLL_S)  # the caller sees the exit code
            return None

    def end(self) -> None:
        """Stops the process by closing its pipe, which also happens if this rank dies, or kills it."""
        self.lifeline.close()
        self.process.join(EXIT_TIMEOUT_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def _exit_text(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _exit_as(code: int) -> None:
    """Ends this rank with the signal or exit code of its process."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code or 1)
