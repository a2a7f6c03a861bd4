"""One simulated job, from its start to its last checkpoint.

What a failure leads to is decided by the launcher's own policy, `cluster.restart.Restarts`. The launching machine does
not fail, nor does the storage of the checkpoints.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ringtrain.cluster.elastic import AGAIN_S
from ringtrain.cluster.exit_cause import HOST_LOST, JobResult
from ringtrain.cluster.host_agent import LEASE_S
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.restart import ANSWER_S, Restarts
from ringtrain.lab.simulate.costs import Costs
from ringtrain.lab.simulate.hosts import Failure, Outages
from ringtrain.lab.simulate.training import Schedule, Training

MAX_TIMES = 5
"""times of the time without failures after which a simulated job is given up"""
TOO_LONG = f"it took more than {MAX_TIMES} times as long as without failures"
SILENT = "hosts do not answer"
"""text of a failure before ranks have started"""
GIVE_UP_S = 600.0
"""after which Horovod's driver ends an elastic job that waits for --min-np"""


@dataclass(frozen=True)
class Case:
    """A job, its hosts and how it is launched.

    Attributes:
        hosts: All hosts in the launcher's order; those behind the first num_ranks slots are spare.
        num_ranks: Number of ranks with which the job is as fast as planned.
        options: Of the launcher. `elastic` decides how the job is run.
        schedule: Its steps and checkpoints.
        repair_s: Seconds until a failed host answers again; inf: never.
    """

    hosts: tuple[Host, ...]
    num_ranks: int
    options: LaunchOptions
    schedule: Schedule
    costs: Costs
    repair_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A simulated job.

    Attributes:
        seconds: By part of the clock; see `training.PARTS`.
        num_failures: Failures that ended an attempt of the job, or cost an elastic job ranks.
        num_restarts: Restarts, as --max-restarts counts them.
        reason: Why the job ended before its last step; "": it is complete.
    """

    seconds: dict[str, float]
    num_failures: int
    num_restarts: int
    reason: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Fraction of the clock in steps that count, at the speed of all ranks."""
        return self.seconds["steps"] / self.total_s if self.total_s else 0.0


def simulate(case: Case, failures: Iterator[Failure]) -> Outcome:
    """Simulates a job on hosts with these failures."""
    if case.options.elastic:
        return ElasticJob(case, failures).run()
    return Job(case, failures).run()


class Ended(Exception):
    """The launcher ends the job without asking whether it is restarted."""


@dataclass(frozen=True)
class UsedHosts:
    """Numbers of hosts up to the last one, without those that are left out."""

    last: int
    left_out: set[int]

    def __contains__(self, host: object) -> bool:
        return isinstance(host, int) and host <= self.last and host not in self.left_out


class Job:
    """A job whose ranks all end when one of them fails."""

    def __init__(self, case: Case, failures: Iterator[Failure]) -> None:
        self.case = case
        self.training = Training(case.schedule)
        self.outages = Outages(failures, len(case.hosts), case.repair_s)
        self.restarts = Restarts(case.hosts, case.num_ranks, case.options)
        self.used = UsedHosts(len(case.hosts), set())
        """hosts of the current attempt"""
        self.num_failures = 0
        self.num_restarts = 0
        self.limit_s = MAX_TIMES * (case.costs.start_s + self.training.time_to_end_s(1.0))
        self.numbers = {host.name: number for number, host in enumerate(case.hosts)}
        self.slots_up_to = list(itertools.accumulate(host.slots for host in case.hosts))
        """slots of a host and all before it, by its number"""

    def run(self) -> Outcome:
        """Simulates attempt after attempt."""
        reason = ""
        try:
            while not reason:
                result = self.attempt()
                if result is None:
                    break
                reason = self.restarts.after(result)
                if not reason:
                    self.num_restarts += 1
                    self.training.spend("restart", self.restarts.delay_s(self.first_host))
                    self.check_time()
        except Ended as ended:
            reason = str(ended)
        self.training.lose_unsaved()  # of a job that has ended early
        return Outcome(self.training.seconds, self.num_failures, self.num_restarts, reason)

    def check_time(self) -> None:
        """Raises Ended for a job that hardly gets on."""
        if self.training.now_s > self.limit_s:
            raise Ended(TOO_LONG)

    def attempt(self) -> JobResult | None:
        """Simulates one attempt; returns its failure, None if the job is complete."""
        training = self.training
        silent = self.leave_out_silent()
        if silent is not None:
            return silent
        failure = self.outages.first(training.now_s + self.start_s, self.used)
        if failure:
            training.spend("start", failure[0] - training.now_s)
            return self.lost(failure[1], global_step=-1)
        self.start()
        speed = self.speed()
        failure = self.outages.first(training.now_s + training.time_to_end_s(speed), self.used)
        if failure is None:
            training.finish(speed)
            return None
        training.train(failure[0] - training.now_s, speed)
        global_step = training.global_step
        training.lose_unsaved()
        return self.lost(failure[1], global_step)

    def leave_out_silent(self) -> JobResult | None:
        """Finds hosts that answer, as the launcher does; returns a failure if too few are left."""
        while True:
            self.outages.pass_until(self.training.now_s)
            self.used = self.used_hosts()
            silent = [host for host in self.outages.down(self.training.now_s) if host in self.used]
            if not silent:
                return None
            self.training.spend("restart", ANSWER_S)
            names = tuple(self.case.hosts[host].name for host in silent)
            if not self.restarts.without(names):
                return JobResult(2, SILENT, HOST_LOST, hosts=names)

    @property
    def start_s(self) -> float:
        """Seconds from the launch of ranks to their first step."""
        return self.case.costs.start_s + self.restore_s

    @property
    def restore_s(self) -> float:
        return self.case.costs.restore_s if self.training.saved else 0.0

    def start(self) -> None:
        """Lets a start pass without a failure."""
        restore_s = self.restore_s
        self.training.spend("start", self.case.costs.start_s)
        self.training.spend("restore", restore_s)

    def speed(self) -> float:
        """Speed of an attempt; ranks that share slots (--oversubscribe) are slower."""
        return min(self.restarts.num_ranks, self.restarts.num_slots) / self.case.num_ranks

    def lost(self, host: int, global_step: int) -> JobResult:
        """Failure of an attempt that has lost a host."""
        self.num_failures += 1
        self.training.spend("restart", self.case.costs.detect_s)
        names = (self.case.hosts[host].name,)
        text = "lost a host while the job ran"
        return JobResult(2, text, HOST_LOST, hosts=names, global_step=global_step, not_cleaned_up=names)

    @property
    def first_host(self) -> str:
        """Name of the host of rank 0."""
        number = 0
        while number in self.used.left_out:
            number += 1
        return self.case.hosts[number].name

    def left_out(self) -> set[int]:
        return {self.numbers[name] for name in self.restarts.left_out}

    def used_hosts(self) -> UsedHosts:
        """Hosts of the next attempt: as many as its ranks need, in the launcher's order; see cluster.hosts.take."""
        left_out = self.left_out()
        num_slots = self.restarts.num_ranks
        last = bisect.bisect_left(self.slots_up_to, num_slots)
        for host in sorted(left_out):
            if host > last:
                break
            num_slots += self.case.hosts[host].slots
            last = bisect.bisect_left(self.slots_up_to, num_slots)
        return UsedHosts(last, left_out)


class ElasticJob(Job):
    """A job that continues with the hosts that are left, and takes hosts that come back.

    Horovod's driver does this, not the launcher. The loss of too many hosts, or of one that starts, ends an attempt.
    """

    def __init__(self, case: Case, failures: Iterator[Failure]) -> None:
        super().__init__(case, failures)
        self.up: set[int] = set()
        """hosts that Horovod may use"""
        self.idle: set[int] = set()
        """of these, hosts that are not needed"""
        self.slots = 0
        """slots of the others"""
        self.away: list[tuple[float, int]] = []
        """heap of the other hosts by the time at which Horovod may use them"""
        self.joined: set[int] = set()
        """hosts that have started at the last change"""
        self.joined_s = 0.0
        """time at which their ranks had started"""
        self.excluded: Counter[int] = Counter()
        """number of times that a host's slots were excluded after a failure"""

    @property
    def num_ranks(self) -> int:
        return min(self.slots, self.case.num_ranks)

    def attempt(self) -> JobResult | None:
        """Simulates one attempt with all of its changes."""
        training = self.training
        self.find_hosts()
        failure = self.outages.first(training.now_s + self.start_s, self.up - self.idle)
        if failure:
            training.spend("start", failure[0] - training.now_s)
            return self.failed("a rank failed while it started", -1)
        self.start()
        while True:
            self.check_time()
            self.add_hosts()
            if self.num_ranks < max(1, self.case.options.min_np):
                if self.wait():
                    continue
                return self.failed("too few slots for --min-np", training.global_step)
            speed = self.num_ranks / self.case.num_ranks
            end_s = training.now_s + training.time_to_end_s(speed)
            change_s = self.away[0][0] if self.away else math.inf
            failure = self.outages.first(min(end_s, change_s), self.up)
            if failure is None and end_s <= change_s:
                training.finish(speed)
                return None
            if failure is None:
                training.train(max(0.0, change_s - training.now_s), speed)
                continue
            time_s, host = failure
            training.train(max(0.0, time_s - training.now_s), speed)
            if host in self.joined and time_s < self.joined_s:
                return self.failed("a rank failed while it started", training.global_step)
            self.remove(host, speed)

    def failed(self, text: str, global_step: int) -> JobResult:
        """Failure of Horovod's driver, which names no host."""
        self.num_failures += 1
        self.training.lose_unsaved()
        self.training.spend("restart", self.case.costs.detect_elastic_s)
        return JobResult(1, text, global_step=global_step)

    def find_hosts(self) -> None:
        """Waits until enough hosts answer. Raises Ended if the launcher would not wait so long."""
        training, options = self.training, self.case.options
        deadline_s = training.now_s + options.start_timeout
        first_ranks = min(options.np or options.min_np, self.restarts.num_ranks)
        while True:
            self.outages.pass_until(training.now_s)
            down = self.outages.down(training.now_s)
            self.up = set(range(len(self.case.hosts))) - set(down)
            self.idle, self.slots, self.joined = set(self.up), 0, set()
            self.excluded.clear()
            self.away = [(self.outages.back_s[host], host) for host in down]
            heapq.heapify(self.away)
            self.take_idle()
            if self.num_ranks >= first_ranks:
                return
            next_s = self.away[0][0] if self.away else math.inf
            training.spend("wait", min(next_s, deadline_s) - training.now_s)
            if next_s > deadline_s:
                raise Ended(f"too few hosts answered within {options.start_timeout:g} s")

    def take_idle(self) -> set[int]:
        """Uses idle hosts while ranks are missing; returns them."""
        taken = set()
        for host in sorted(self.idle):
            if self.slots >= self.case.num_ranks:
                break
            self.slots += self.case.hosts[host].slots
            taken.add(host)
        self.idle -= taken
        return taken

    def add_hosts(self) -> None:
        """Takes hosts that are back; all ranks wait until those that join have started."""
        now_s = self.training.now_s
        while self.away and self.away[0][0] <= now_s:
            _, host = heapq.heappop(self.away)
            back_s = self.outages.back_s.get(host, 0.0)
            if back_s > now_s:  # it has failed again meanwhile
                heapq.heappush(self.away, (back_s, host))
            else:
                self.up.add(host)
                self.idle.add(host)
        taken = self.take_idle()
        if taken:
            self.joined = taken
            self.training.spend("resize", self.case.costs.start_s)
            self.joined_s = self.training.now_s

    def remove(self, host: int, speed: float) -> None:
        """Continues without a host that has failed."""
        is_idle = host in self.idle
        free_s = max(self.case.repair_s, LEASE_S + AGAIN_S)
        if not is_idle:
            self.excluded[host] += 1
            free_s = max(free_s, cooldown_s(self.case.options, self.excluded[host]))
        if math.isfinite(free_s):
            heapq.heappush(self.away, (self.training.now_s + free_s, host))
        self.up.remove(host)
        if is_idle:
            self.idle.remove(host)
            return
        self.slots -= self.case.hosts[host].slots
        self.num_failures += 1
        self.training.lose_step(speed)
        self.training.spend("resize", self.case.costs.detect_elastic_s)

    def wait(self) -> bool:
        """Waits for a host; returns False if Horovod gives up before one is back."""
        back_s = self.away[0][0] if self.away else math.inf
        seconds = back_s - self.training.now_s
        self.training.spend("wait", min(seconds, GIVE_UP_S))
        return seconds <= GIVE_UP_S


def cooldown_s(options: LaunchOptions, times: int) -> float:
    """Mean seconds for which Horovod excludes a slot after its failures; inf: for ever."""
    shortest_s, longest_s = options.blacklist_cooldown
    if not longest_s:
        return math.inf
    return max(shortest_s, min(longest_s, shortest_s * (2**times + 0.5)))
