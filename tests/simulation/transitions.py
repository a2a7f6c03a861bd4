"""Transitions of the launcher's supervisor, and which of them a schedule has taken."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any


def printed(pattern: str) -> Callable[[Any], int]:
    """Number of lines of the launcher that match."""
    return lambda run: len(re.findall(pattern, run.cluster.output.decode()))


def spares(run: Any) -> int:
    """Attempts that take a host which no earlier one had."""
    known: set[str] = set()
    count = 0
    for mpirun in run.cluster.attempts:
        hosts = {host.name for host in mpirun.job.hosts}
        count += bool(known) and not hosts <= known
        known |= hosts
    return count


def smaller(run: Any) -> int:
    """Attempts with fewer ranks than the first one."""
    attempts = run.cluster.attempts
    return sum(mpirun.job.num_ranks < attempts[0].job.num_ranks for mpirun in attempts)


TRANSITIONS: dict[str, Callable[[Any], int]] = {
    "an attempt starts": lambda run: len(run.cluster.attempts),
    "the job is complete": lambda run: run.code == 0,
    "complete after restarts": printed("complete; restarted"),
    "restarted at once": printed(r"restart \d+ of \d+,"),
    "restarted after a delay": printed(r"restart \d+ of \d+ in"),
    "a spare host is taken": spares,
    "fewer ranks": smaller,
    "continues without hosts that do not answer": printed("continues without"),
    "gave up: restarted often enough": printed("not restarted: it was restarted"),
    "gave up: exit code 2": printed("not restarted: exit code 2"),
    "gave up: out of memory": printed("not restarted: out of memory"),
    "gave up: the same failure twice": printed("not restarted: it failed at the same step twice"),
    "gave up: a rank was asked to stop": printed("not restarted: a rank was asked to stop"),
    "a rank is named": printed("failed first|exited first|was killed by"),
    "a follow-up error is named": printed("this is a follow-up error"),
    "a host is lost while the job runs": printed(r"lost host\d"),
    "this host's agent is lost": printed("lost the host agent of this host"),
    "a host does not answer at the start": printed("does not answer"),
    "ranks do not start in time": printed("did not start within"),
    "ranks are missing at the end": printed("did not start although"),
    "a signal is forwarded": printed("SIG[A-Z0-9]+: ranks may save and exit"),
    "stopped by a signal": printed("stopped by SIG"),
    "a host gives notice": printed("is taken away soon"),
    "stopped by a notice": printed("stopped by a notice"),
    "interrupted between attempts": lambda run: run.was_interrupted,
    "a host does not confirm its clean-up": lambda run: any(result.not_cleaned_up for _, result in run.results),
    "the launcher is killed": lambda run: run.was_killed,
    "ranks that stood by begin": lambda run: run.begun is not None,
    "ranks that stood by are given up": lambda run: len(run.standing_by),
    "ranks that stood by could not all begin": lambda run: any(one.was_told for one in run.standing_by),
    "no ranks could stand by": printed("no ranks stand by"),
}


def taken(run: Any) -> Counter[str]:
    """How often a schedule has taken each transition."""
    return Counter({name: int(count(run)) for name, count in TRANSITIONS.items()})


def never(counts: Counter[str]) -> list[str]:
    return [name for name in TRANSITIONS if not counts[name]]
