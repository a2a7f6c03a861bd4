"""Transitions of the production code in each scenario, and which of them a schedule has taken."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any


def printed(pattern: str) -> Callable[[Any], int]:
    """Number of lines of the launcher that match."""
    return lambda run: len(re.findall(pattern, run.cluster.output.decode()))


def noted(pattern: str) -> Callable[[Any], int]:
    """Number of lines of the trace that match."""
    return lambda run: sum(bool(re.search(pattern, line)) for line in run.world.trace)


def sizes(run: Any) -> list[int]:
    """Numbers of ranks of an elastic job, one after the other."""
    return [len(group.members) for group in run.agreed]


def grows(run: Any) -> bool:
    return any(before < after for before, after in pairwise(sizes(run)))


def shrinks(run: Any) -> bool:
    return any(before > after for before, after in pairwise(sizes(run)))


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


LAUNCHED: dict[str, Callable[[Any], int]] = {
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
    "interrupted between attempts": lambda run: run.was_interrupted,
    "a host does not confirm its clean-up": lambda run: any(result.not_cleaned_up for _, result in run.results),
    "the launcher is killed": lambda run: run.was_killed,
}


ELASTIC: dict[str, Callable[[Any], int]] = {
    "ranks begin": lambda run: len(run.agreed),
    "ranks begin again": lambda run: len(run.agreed) > 1,
    "ranks begin with a checkpoint": noted(r"begins after step \d+ of "),
    "more ranks than before": grows,
    "fewer ranks than before": shrinks,
    "a rank is removed": noted("has been removed"),
    "the job is complete": lambda run: run.code == 0,
    "restarted": printed(r"restart \d+ of \d+"),
    "complete after restarts": printed("complete; restarted"),
    "gave up": printed("not restarted: "),
    "a stop is known after a restart": lambda run: len(run.stopped_at),
    "a host is lost": printed(r"lost host\d+: .*; continues without"),
    "this host's agent is lost": printed("lost the host agent of this host"),
    "a host does not answer": printed("excluded until it does"),
    "too few hosts answer": printed("too few hosts answered"),
    "no rank starts in time": printed("no rank started within"),
    "hosts cannot be listed": printed("the list of hosts is unchanged"),
    "a signal is forwarded": printed("SIG[A-Z0-9]+: ranks may save and exit"),
    "stopped by a signal": printed("stopped by SIG"),
    "a host does not confirm its clean-up": lambda run: any(result.not_cleaned_up for _, result in run.results),
}
SCENARIOS = {"launched": LAUNCHED, "elastic": ELASTIC}
"""with a trace; of a launched job, the output is enough"""


def taken(run: Any, scenario: str = "launched") -> Counter[str]:
    """How often a schedule has taken each transition."""
    return Counter({name: int(count(run)) for name, count in SCENARIOS[scenario].items()})


def never(counts: Counter[str], scenario: str = "launched") -> list[str]:
    return [name for name in SCENARIOS[scenario] if not counts[name]]
