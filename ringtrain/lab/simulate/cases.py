"""Variants of a planned job, over the same failures: checkpoint intervals, spare hosts, options of launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.errors import LaunchError
from ringtrain.lab.simulate.costs import Costs
from ringtrain.lab.simulate.hosts import failures
from ringtrain.lab.simulate.job import Case, Outcome, simulate
from ringtrain.lab.simulate.training import Schedule
from ringtrain.lab.stats import Spread
from ringtrain.monitor.goodput import cheapest_interval_s

SPARES = (0, 1, 2)
"""numbers of spare hosts that are compared"""
NONE = "none"
"""words of a variant without options of launch"""
MANY = 10_000
"""restarts of a simulated job if --max-restarts is not given"""


@dataclass(frozen=True)
class Plan:
    """A job that a user plans.

    Attributes:
        hosts: Hosts that its ranks fill, without spare hosts.
        spares: Hosts that the user has beyond these.
        options: Options of launch, as they were given.
        work_s: Seconds of steps that count, with all ranks.
        mtbf_s: Mean seconds between two failures of one host.
        repair_s: Seconds until a failed host answers again.
        num_jobs: Number of simulated jobs; job k of every case has the same failures.
    """

    hosts: tuple[Host, ...]
    spares: tuple[Host, ...]
    num_ranks: int
    options: LaunchOptions
    costs: Costs
    work_s: float
    mtbf_s: float
    repair_s: float
    num_jobs: int
    seed: int

    @property
    def job_mtbf_s(self) -> float:
        """Mean seconds between two failures of any host that ranks run on."""
        return self.mtbf_s / len(self.hosts)

    @property
    def best_interval_s(self) -> float:
        """Seconds of steps between two checkpoints by Young's formula, to whole minutes from 2 on."""
        interval_s = cheapest_interval_s(self.costs.save_s, self.job_mtbf_s)
        if interval_s >= 120:
            interval_s = 60.0 * round(interval_s / 60)
        return min(max(interval_s, self.costs.step_s), self.work_s)

    def hosts_with(self, num_spares: int) -> tuple[Host, ...]:
        """Its hosts and some spare ones: the user's own, then made-up ones like its last host."""
        spares = list(self.spares[:num_spares])
        names = {host.name for host in (*self.hosts, *self.spares)}
        number = 0
        while len(spares) < num_spares:
            number += 1
            if f"spare{number}" not in names:
                spares.append(Host(f"spare{number}", self.hosts[-1].slots))
        return (*self.hosts, *spares)


def plan_of(hosts: Sequence[Host], options: LaunchOptions, **others: object) -> Plan:
    """Plan of a job on the hosts of a launch. Raises LaunchError for too few slots, or more ranks than slots."""
    slots = sum(host.slots for host in hosts)
    if options.elastic:
        num_ranks = options.max_np or slots
    else:
        num_ranks = options.np or slots
    if num_ranks > slots:
        raise LaunchError(
            f"got {num_ranks} ranks, but hosts with {slots} slots: ask for fewer ranks, or name more hosts"
        )
    if not 1 <= options.min_np <= num_ranks:
        raise LaunchError(f"got --min-np {options.min_np}, expected 1 to {num_ranks}, the number of ranks")
    num_used, slots = 0, 0
    while slots < num_ranks:
        slots += hosts[num_used].slots
        num_used += 1
    return Plan(tuple(hosts[:num_used]), tuple(hosts[num_used:]), num_ranks, options, **others)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Variant:
    """Checkpoint interval, spare hosts and options of launch with which a planned job is simulated."""

    interval_s: float
    """seconds of steps between two checkpoints"""
    num_spares: int
    elastic: bool
    keep_hosts: bool

    @property
    def words(self) -> str:
        """Option of launch, as a user writes it."""
        if self.elastic:
            return "--elastic"
        if self.keep_hosts:
            return "--keep-hosts"
        return NONE


@dataclass(frozen=True)
class Result:
    """Simulated jobs of one variant."""

    variant: Variant
    num_hosts: int
    outcomes: Sequence[Outcome]

    @property
    def complete(self) -> Sequence[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.reason]

    @property
    def goodput(self) -> Spread:
        """Of all jobs, also of those that ended early."""
        return Spread.of([outcome.goodput for outcome in self.outcomes])

    @property
    def hours(self) -> Spread:
        """Hours of the clock until the job was complete, or had ended early."""
        return Spread.of([outcome.total_s / 3600 for outcome in self.outcomes])

    @property
    def restarts(self) -> Spread:
        return Spread.of([outcome.num_restarts for outcome in self.outcomes])

    @property
    def repeated_hours(self) -> Spread:
        return Spread.of([outcome.seconds["repeated"] / 3600 for outcome in self.outcomes])

    @property
    def host_hours(self) -> float:
        """Median hours of all hosts, spare ones and those that are down among them."""
        return self.num_hosts * self.hours.median

    @property
    def most_restarts(self) -> int:
        return max(outcome.num_restarts for outcome in self.outcomes)

    def is_faster(self, other: Result) -> bool:
        """Returns whether the median job takes at least 1 % fewer hours, and as many jobs complete."""
        if len(self.complete) < len(other.complete):
            return False
        return self.hours.median < 0.99 * other.hours.median

    def is_cheaper(self, other: Result) -> bool:
        """Returns whether more jobs complete, or equally many in at least 1 % fewer host-hours."""
        if len(self.complete) != len(other.complete):
            return len(self.complete) > len(other.complete)
        return self.host_hours < 0.99 * other.host_hours


def run(plan: Plan, variant: Variant) -> Result:
    """Simulates all jobs of a variant."""
    hosts = plan.hosts_with(variant.num_spares)
    options = replace(plan.options, elastic=variant.elastic, keep_hosts=variant.keep_hosts)
    costs = plan.costs
    steps_per_save = max(1, round(variant.interval_s / costs.step_s))
    num_steps = max(1, math.ceil(plan.work_s / costs.step_s))
    schedule = Schedule(num_steps, steps_per_save, costs.step_s, costs.save_s)
    case = Case(hosts, plan.num_ranks, options, schedule, costs, plan.repair_s)
    # The same hosts fail at the same times in all variants, those that one of them does not have are skipped.
    most_hosts = len(plan.hosts) + max(*SPARES, len(plan.spares))
    outcomes = []
    for number in range(plan.num_jobs):
        outcomes.append(simulate(case, failures(most_hosts, plan.mtbf_s, (plan.seed, number))))
    return Result(variant, len(hosts), outcomes)


@dataclass(frozen=True)
class Comparison:
    """Results side by side.

    Attributes:
        by_hosts: Of several numbers of spare hosts and options of launch, with Young's checkpoint interval.
        by_interval: Of several checkpoint intervals, with the best of these hosts and options.
        given: That of the hosts and options as they were given, one of by_hosts.
        best: That of the best hosts, elastic or not as it was given; it is in both lists.
        interval_s: The user's checkpoint interval; 0.0: none is known.
    """

    by_hosts: Sequence[Result]
    by_interval: Sequence[Result]
    given: Result
    best: Result
    interval_s: float

    @property
    def best_interval(self) -> Result:
        """Highest goodput, to whole percents; of equals Young's."""
        return max(self.by_interval, key=lambda result: (round(result.goodput.median, 2), result is self.best))

    @property
    def fastest(self) -> Result:
        """Least hours, elastic or not as it was given, whatever its spare hosts cost."""
        fastest = self.best
        for result in self.by_hosts:
            if result.variant.elastic == self.given.variant.elastic and result.is_faster(fastest):
                fastest = result
        return fastest

    @property
    def best_otherwise(self) -> Result:
        """Best of the elastic jobs, or of the others if an elastic one was given."""
        others = [result for result in self.by_hosts if result.variant.elastic != self.given.variant.elastic]
        return cheapest(others)


def cheapest(results: Sequence[Result]) -> Result:
    """First result, or a later one that is cheaper."""
    best, *others = results
    for result in others:
        if result.is_cheaper(best):
            best = result
    return best


def compare(plan: Plan, interval_s: float = 0.0) -> Comparison:
    """Simulates a plan in all variants. interval_s: The user's checkpoint interval; 0.0: none is known."""
    options, young_s = plan.options, plan.best_interval_s
    given = run(plan, Variant(young_s, len(plan.spares), options.elastic, options.keep_hosts))
    by_hosts = []
    for num_spares in sorted({*SPARES, len(plan.spares)}):
        for elastic, keep_hosts in ((False, False), (False, True), (True, False)):
            if options.keep_hosts and not elastic and not keep_hosts:
                continue
            variant = Variant(young_s, num_spares, elastic, keep_hosts or options.keep_hosts)
            by_hosts.append(given if variant == given.variant else run(plan, variant))

    best = cheapest([given, *(result for result in by_hosts if result.variant.elastic == options.elastic)])
    by_interval = [best]
    # By whole seconds: the user's own may be one of the others.
    others = {round(other_s): other_s for other_s in (young_s / 2, 2 * young_s, interval_s) if other_s}
    others.pop(round(young_s), None)
    for other_s in others.values():
        by_interval.append(run(plan, replace(best.variant, interval_s=other_s)))
    by_interval.sort(key=lambda result: result.variant.interval_s)
    return Comparison(by_hosts, by_interval, given, best, interval_s)
