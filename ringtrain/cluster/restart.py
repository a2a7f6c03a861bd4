"""Rules of restarts: whether a failed job runs again, when, and on which of its hosts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ringtrain.cluster.exit_cause import HOST_LOST, JobResult
from ringtrain.cluster.host_agent import LEASE_S
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.protocol import as_main
from ringtrain.protocol.attempt import Attempt

FAILURES_OF_A_HOST, RECENT = 2, 5  # a host with 2 of the job's last 5 failures is excluded
ANSWER_S = 20.0  # for a host to answer before the job restarts without it
ASKED_TO_STOP = (129, 130, 138, 143)  # 128 + SIGHUP, SIGINT, SIGUSR1, SIGTERM: the job saved and exited
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0  # before a restart after no new steps; doubled for each such failure
NOT_FOUND = (126, 127)
NO_MEMORY = re.compile(
    r"ResourceExhausted|MemoryError|out of memory|OUT_OF_MEMORY|\bOOM\b|std::bad_alloc", re.IGNORECASE
)
MAX_CAUSES, MAX_CAUSE_CHARACTERS = 20, 500  # reported to restarted ranks


class Restarts:
    """Policy after failures of one job: whether it runs again, on which hosts. No clock, network or processes."""

    def __init__(self, hosts: Sequence[Host], num_ranks: int, options: LaunchOptions) -> None:
        self.results: list[JobResult] = []
        """of all attempts that have failed"""
        self.hosts = list(hosts)
        """of the next attempt"""
        self.num_ranks = num_ranks
        """of the next attempt; 0: too few slots are left"""
        self._options = options
        self._all_hosts, self._all_ranks = tuple(hosts), num_ranks
        self._silent: frozenset[str] = frozenset()
        """hosts that were lost, or do not answer"""

    def after(self, result: JobResult) -> str:
        """Decides after a failure; returns the reason why the job is not restarted, "" if it is."""
        reason = why_not(result, self.results, self._options)
        self.results.append(result)
        if reason:
            return reason
        # Lost hosts are tried again only if the others have too few slots.
        self._silent = frozenset(result.hosts if result.kind == HOST_LOST else ())
        self._choose()
        if self.num_ranks < self._all_ranks:
            self._silent = frozenset()
            self._choose()
        if not self.num_ranks:
            return f"{num_slots(self.hosts)} slots are too few for --min-np {self._options.min_np}"
        return ""

    def without(self, silent: Iterable[str]) -> bool:
        """Leaves out hosts that do not answer; returns whether the others have enough slots."""
        self._silent |= {*silent}
        self._choose()
        return self.num_ranks > 0

    def delay_s(self, first_host: str = "") -> float:
        """Seconds to wait before the next attempt. first_host: That of rank 0 in the last one, which writes the run."""
        furthest_step, in_vain = -1, 0
        for result in self.results:
            in_vain = in_vain + 1 if result.global_step <= furthest_step else 0
            furthest_step = max(furthest_step, result.global_step)
        delay_s = 0.0
        if in_vain:
            doublings = min(in_vain - 1, 6)  # more exceed MAX_DELAY_S, and thousands any number
            delay_s = min(FIRST_DELAY_S * 2**doublings, MAX_DELAY_S)
        # Until a rank 0 that may still run can no longer write there.
        return max(delay_s, LEASE_S) if first_host in self.results[-1].not_cleaned_up else delay_s

    def _choose(self) -> None:
        """Leaves out hosts that do not answer, and hosts that fail often unless --min-np needs them."""
        options = self._options
        failures = Counter(host for result in self.results[-RECENT:] for host in result.hosts)
        answering = [host for host in self._all_hosts if host.name not in self._silent]
        used = [host for host in answering if failures[host.name] < FAILURES_OF_A_HOST]
        for host in sorted(answering, key=lambda host: (failures[host.name], host.name)):
            if host not in used and num_slots(used) < max(1, options.min_np):
                used.append(host)
        self.hosts = [host for host in self._all_hosts if host in used]
        if options.oversubscribe and not options.elastic and used:
            self.num_ranks = self._all_ranks
        else:
            has_batch_per_rank = not takes_any_number(options.command)
            self.num_ranks = ranks_on(num_slots(used), self._all_ranks, options.min_np, has_batch_per_rank)


def next_attempt(results: Sequence[JobResult], last: Attempt) -> Attempt:
    """Attempt after the last one, whose result is the last of `results`."""
    return replace(last, number=len(results), causes=causes_of(results), run_name=results[-1].run_name or last.run_name)


def why_not(result: JobResult, before: Sequence[JobResult], options: LaunchOptions) -> str:
    """Reason why a job is not restarted; "" if it is. before: Results of earlier attempts."""
    if result.stopped:
        return "it was stopped"
    if len(before) >= options.max_restarts:
        return f"it was restarted {times(options.max_restarts)} already" if options.max_restarts else "not asked for"
    if result.exit_code in ASKED_TO_STOP:
        return "a rank was asked to stop, and all have stopped"
    if result.out_of_memory or NO_MEMORY.search(result.text):
        return "out of memory, as the next attempt would be: reduce the batch or the model"
    if result.kind == "NonFiniteLoss":
        return "the loss would become NaN or infinite again"
    if result.kind != HOST_LOST and result.exit_code == 2:
        return (
            "exit code 2 is a configuration, data or set-up error, which a restart does not fix: see the message above"
        )
    if result.exit_code in NOT_FOUND:
        return "the command cannot be run"
    last = before[-1] if before else None
    if last and result.where == last.where and result.kind != HOST_LOST:
        return f"it failed at the same step twice ({result.where_in_words})"
    return ""


def takes_any_number(command: tuple[str, ...]) -> bool:
    """Returns whether a job may continue with any number of ranks: a configured run has a batch size per rank."""
    # Another program may start a configured run.
    return as_main.is_python(command) and not any("ringtrain.train" in word for word in command)


def ranks_on(slots: int, num_ranks: int, min_ranks: int = 1, has_batch_per_rank: bool = False) -> int:
    """Number of ranks for a restart, up to `num_ranks`; 0 if below `min_ranks`."""
    for number in range(min(slots, num_ranks), max(1, min_ranks) - 1, -1):
        # Only with a divisor of `num_ranks` can the global batch stay the same.
        if not has_batch_per_rank or num_ranks % number == 0:
            return number
    return 0


def causes_of(results: Sequence[JobResult]) -> tuple[str, ...]:
    """Causes of the latest failures, short enough for one environment variable: Linux's limit is 128 KiB."""
    return tuple(result.in_a_line[:MAX_CAUSE_CHARACTERS] for result in results[-MAX_CAUSES:])


def num_slots(hosts: Iterable[Host]) -> int:
    return sum(host.slots for host in hosts)


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
