"""Simulated jobs on hosts that fail: closed forms, parts that add up, the launcher's policy, and what a reader sees."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtrain import cli
from ringtrain.cluster import launch, restart
from ringtrain.cluster.agents import HostsLost
from ringtrain.cluster.elastic import AGAIN_S
from ringtrain.cluster.exit_cause import JobResult
from ringtrain.cluster.host_agent import LEASE_S
from ringtrain.cluster.hosts import Host, take
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.restart import ANSWER_S
from ringtrain.lab.simulate import cases, costs, hosts, job
from ringtrain.lab.simulate.cases import Variant, plan_of
from ringtrain.lab.simulate.costs import CostOptions, Costs
from ringtrain.lab.simulate.job import Case
from ringtrain.lab.simulate.training import Schedule, Training
from ringtrain.monitor.goodput import cheapest_interval_s

COSTS = Costs(step_s=1.0, save_s=10.0, start_s=60.0, restore_s=20.0, detect_s=30.0, detect_elastic_s=75.0)
DAY_S = 86400.0
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def make_case(
    num_hosts=4, num_spares=0, slots=1, num_steps=20_000, per_save=1000, repair_s=0.0, elastic=False, **options
):
    listed = tuple(Host(f"host{number}", slots) for number in range(num_hosts + num_spares))
    options = LaunchOptions(command=("python", "own.py"), elastic=elastic, **{"max_restarts": 10_000, **options})
    schedule = Schedule(num_steps, per_save, COSTS.step_s, COSTS.save_s)
    return Case(listed, num_hosts * slots, options, schedule, COSTS, repair_s)


def outcomes(case, mtbf_s, num_jobs=100):
    found = []
    for number in range(num_jobs):
        found.append(job.simulate(case, hosts.failures(len(case.hosts), mtbf_s, (0, number))))
    return found


def seconds_of(case, *failures):
    """Parts that are not 0 of a job whose hosts fail at these times."""
    outcome = job.simulate(case, iter(failures))
    assert outcome.reason == ""
    return {part: seconds for part, seconds in outcome.seconds.items() if seconds}


# ---- exact times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("num_steps", "num_saves"), [(20_000, 20), (20_001, 21), (999, 1), (1, 1)])
def test_without_failures_times_add_up_exactly(elastic, num_steps, num_saves):
    case = make_case(num_steps=num_steps, elastic=elastic)
    assert seconds_of(case) == {"steps": num_steps, "save": 10 * num_saves, "start": 60}


def test_a_failure_costs_what_was_not_saved_and_a_start():
    # 60 s of start, 1000 steps, a save, and 130 steps that are made again.
    parts = seconds_of(make_case(num_steps=3000), (60 + 1000 + 10 + 130, 2))
    expected = {"steps": 3000, "save": 30, "repeated": 130, "start": 120, "restore": 20, "restart": 30}
    assert parts == pytest.approx(expected)


def test_a_checkpoint_under_way_is_lost():
    parts = seconds_of(make_case(num_steps=3000), (60 + 1000 + 10 + 1000 + 4, 2))
    assert (parts["repeated"], parts["save"], parts["restore"]) == pytest.approx((1000, 34, 20))


def test_a_failure_before_the_first_checkpoint_restores_nothing():
    parts = seconds_of(make_case(num_steps=3000), (60 + 500, 2))
    assert "restore" not in parts and parts["repeated"] == pytest.approx(500)
    parts = seconds_of(make_case(num_steps=3000), (40, 2))
    assert (parts["start"], parts["steps"]) == pytest.approx((100, 3000)) and "repeated" not in parts


def test_a_spare_host_takes_the_place_of_a_lost_one():
    case = make_case(num_spares=1, repair_s=math.inf)
    parts = seconds_of(case, (500, 1))
    assert "fewer" not in parts
    assert parts["restart"] == pytest.approx(30), "the lost host is not waited for"
    # The second loss is one too many: 3 ranks are left, which take 4 / 3 of the time.
    parts = seconds_of(case, (500, 1), (2000, 2))
    assert parts["fewer"] == pytest.approx((20_000 - 1000) / 3)
    assert parts["restart"] == pytest.approx(2 * 30 + ANSWER_S)


def test_a_lost_rank_0_is_waited_for_until_its_lease_is_over():
    case = make_case(num_spares=1, repair_s=math.inf)
    assert seconds_of(case, (500, 0))["restart"] == pytest.approx(30 + LEASE_S)
    # Rank 0 is on the next host then.
    assert seconds_of(case, (500, 0), (2000, 1))["restart"] == pytest.approx(2 * (30 + LEASE_S) + ANSWER_S)


def test_a_spare_host_may_have_failed_itself():
    case = make_case(num_spares=1, repair_s=math.inf)
    assert seconds_of(case, (400, 4), (500, 0))["fewer"] > 0


def test_a_host_that_is_back_is_used_again():
    case = make_case(repair_s=10.0)
    assert "fewer" not in seconds_of(case, (500, 0))


def test_a_host_that_failed_twice_is_left_out_unless_it_is_kept():
    failures = (500, 0), (2000, 0)
    assert seconds_of(make_case(), *failures)["fewer"] > 0
    assert "fewer" not in seconds_of(make_case(keep_hosts=True), *failures)
    assert "fewer" not in seconds_of(make_case(min_np=4), *failures), "--min-np needs it"


def test_a_job_ends_as_the_launcher_ends_it():
    assert job.simulate(make_case(max_restarts=0), iter([(500, 0)])).reason == "not asked for"
    ended = job.simulate(make_case(max_restarts=1), iter([(500, 0), (2000, 1)]))
    assert (ended.reason, ended.num_restarts, ended.num_failures) == ("it was restarted once already", 1, 2)
    ended = job.simulate(make_case(min_np=4, max_restarts=3, repair_s=math.inf), iter([(500, 0)]))
    assert ended.reason == "it was restarted 3 times already", "the lost host was waited for"


def test_an_elastic_job_loses_a_step_at_most_and_goes_on_with_fewer_ranks():
    parts = seconds_of(make_case(elastic=True, num_steps=3000, repair_s=math.inf), (60 + 500.25, 2))
    assert parts["repeated"] == pytest.approx(0.25)
    assert parts["resize"] == pytest.approx(75)
    assert parts["fewer"] == pytest.approx(2500 / 3)  # 2500 steps on 3 of 4 hosts
    assert "restart" not in parts and "restore" not in parts


def test_an_elastic_job_takes_a_host_that_is_back():
    parts = seconds_of(make_case(elastic=True, repair_s=600.0), (60 + 500, 2))
    assert parts["resize"] == pytest.approx(75 + 60), "all wait until it has started"
    assert parts["fewer"] == pytest.approx((600 - 75) / 4), "of 525 s on 3 of 4 hosts"
    # At once is after the lease of its agent and its slots' exclusion.
    parts = seconds_of(make_case(elastic=True, blacklist_cooldown=(1, 1)), (60 + 500, 2))
    assert LEASE_S + AGAIN_S < 75 and "fewer" not in parts
    parts = seconds_of(make_case(elastic=True, blacklist_cooldown=(0, 0), num_steps=3000), (60 + 500, 2))
    assert parts["fewer"] == pytest.approx(2500 / 3), "0 0: never"


def test_an_elastic_job_waits_for_its_least_ranks_until_horovod_gives_up():
    case = make_case(elastic=True, min_np=4, repair_s=300.0)
    assert seconds_of(case, (560, 2))["wait"] == pytest.approx(300 - 75)
    case = make_case(elastic=True, min_np=4, repair_s=1000.0, max_restarts=0)
    ended = job.simulate(case, iter([(560, 2)]))
    assert ended.reason == "not asked for" and ended.seconds["wait"] == job.GIVE_UP_S


def test_an_elastic_job_uses_a_spare_host_at_once():
    parts = seconds_of(make_case(elastic=True, num_spares=1, repair_s=math.inf), (560, 2))
    assert "fewer" not in parts and parts["resize"] == pytest.approx(75 + 60)


# ---- closed forms ----------------------------------------------------------------------------------------------------


def expected_s(case, job_mtbf_s, delay_s):
    """Mean clock of a job by Daly 2006: each interval is begun again until it passes without a failure."""
    schedule = case.schedule

    def until_passed_s(seconds):
        return (job_mtbf_s + delay_s) * math.expm1(seconds / job_mtbf_s)

    num_full, rest = divmod(schedule.num_steps, schedule.steps_per_save)
    intervals_s = [schedule.steps_per_save * schedule.step_s + schedule.save_s] * num_full
    if rest:
        intervals_s.append(rest * schedule.step_s + schedule.save_s)
    again = math.exp((case.costs.start_s + case.costs.restore_s) / job_mtbf_s)
    first_s = until_passed_s(case.costs.start_s + intervals_s[0])
    return first_s + again * sum(until_passed_s(seconds) for seconds in intervals_s[1:])


def deviation(per_save, job_mtbf_s, num_jobs=150):
    """Mean clock of simulated jobs minus the expected one, in standard errors of the mean."""
    case = make_case(num_steps=100_500, per_save=per_save, keep_hosts=True)
    found = outcomes(case, job_mtbf_s * len(case.hosts), num_jobs)
    num_failures = sum(outcome.num_failures for outcome in found)
    # From a failure to the next start: mostly the costs' 30 s and a second, more after failures without new steps.
    delay_s = sum(outcome.seconds["restart"] for outcome in found) / num_failures
    clocks_s = np.array([outcome.total_s for outcome in found])
    standard_error_s = clocks_s.std(ddof=1) / math.sqrt(num_jobs)
    return (clocks_s.mean() - expected_s(case, job_mtbf_s, delay_s)) / standard_error_s


@pytest.mark.parametrize("job_mtbf_s", [3000.0, 20_000.0])
@pytest.mark.parametrize("per_save", [200, 700, 5000])
def test_the_mean_clock_is_that_of_the_closed_form(per_save, job_mtbf_s):
    assert abs(deviation(per_save, job_mtbf_s)) < 4


def keep_half(training):
    """A failure that loses half of the steps since the checkpoint."""
    training.seconds["repeated"] += training.unsaved_s / 2
    training.now_s -= training.unsaved_s / 2
    training.unsaved, training.unsaved_s = 0.0, 0.0


def start_early(simulated):
    """A start that takes 0.8 of its time."""
    simulated.training.spend("start", 0.8 * COSTS.start_s)
    simulated.training.spend("restore", simulated.restore_s)


def skip_some(num_hosts, mtbf_s, seed, failures=hosts.failures):
    """Failures of which each tenth is missing."""
    for place, failure in enumerate(failures(num_hosts, mtbf_s, seed)):
        if place % 10:
            yield failure


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (Training, "lose_unsaved", keep_half),
        (job.Job, "start", start_early),
        (hosts, "failures", skip_some),
    ],
)
def test_a_defect_would_be_noticed(owner, name, defect, monkeypatch):
    monkeypatch.setattr(owner, name, defect)
    assert max(abs(deviation(per_save, 3000.0)) for per_save in (200, 700)) > 4


def test_youngs_interval_costs_least_in_the_simulation_too():
    job_mtbf_s = 20_000.0
    best = round(cheapest_interval_s(COSTS.save_s, job_mtbf_s))
    clocks_s = []
    for per_save in (best // 4, best, 4 * best):
        found = outcomes(make_case(num_steps=100_000, per_save=per_save, keep_hosts=True), 4 * job_mtbf_s)
        clocks_s.append(np.mean([outcome.total_s for outcome in found]))
    assert clocks_s[1] < min(clocks_s[0], clocks_s[2])


def test_hosts_fail_at_exponential_times_and_all_alike():
    failures = hosts.failures(5, 100.0, (3,))
    first = [next(failures) for _ in range(20_000)]
    gaps_s = np.diff([0.0, *(time_s for time_s, _ in first)])
    standard_error_s = 20.0 / math.sqrt(len(gaps_s))
    assert abs(gaps_s.mean() - 20.0) < 4 * standard_error_s
    assert abs(gaps_s.std() - 20.0) < 4 * standard_error_s * math.sqrt(2)  # mean and deviation are equal
    counts = np.bincount([host for _, host in first])
    assert abs(counts - 4000).max() < 4 * math.sqrt(4000)
    again = hosts.failures(5, 100.0, (3,))
    assert [next(again) for _ in range(1000)] == first[:1000]


# ---- the launcher decides as the simulated one does ---------------------------------------------------------------


class RecordedRestarts(restart.Restarts):
    """Notes each attempt's hosts and ranks, what happened to it, and the wait after it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.attempts, self.waits_s = [], []

    def without(self, silent):
        self.attempts.append((names(take(self.hosts, self.num_ranks)), self.num_ranks, tuple(silent)))
        return super().without(silent)

    def after(self, result):
        if result.text != job.SILENT:  # else the launcher makes this result itself
            self.attempts.append((names(take(self.hosts, self.num_ranks)), self.num_ranks, result))
        return super().after(result)

    def delay_s(self, first_host=""):
        self.waits_s.append(super().delay_s(first_host))
        return self.waits_s[-1]


def names(listed):
    return [host.name for host in listed]


FAILURES = st.lists(st.tuples(st.floats(1, 30_000), st.integers(0, 6)), max_size=12)


@given(FAILURES, st.sampled_from([0.0, 50.0, 3000.0, math.inf]), st.integers(1, 8), st.booleans(), st.integers(0, 9))
def test_the_launcher_takes_the_same_hosts_after_the_same_failures(failures, repair_s, min_np, keep_hosts, most):
    options = {"min_np": min_np, "keep_hosts": keep_hosts, "max_restarts": most}
    case = make_case(num_spares=2, slots=2, repair_s=repair_s, **options)
    with mock.patch.object(job, "Restarts", RecordedRestarts):
        simulated = job.Job(case, iter(sorted(failures)))
        outcome = simulated.run()
    recorded = list(simulated.restarts.attempts)
    waits_s = []

    def run(supervised, planner):
        attempt = supervised.job
        if not recorded:
            return JobResult(0)
        used, num_ranks, happened = recorded.pop(0)
        assert (names(attempt.hosts), attempt.num_ranks) == (used, num_ranks)
        if isinstance(happened, JobResult):
            return happened
        raise HostsLost(happened, job.SILENT)

    def supervisor_of(attempt, *args):
        return SimpleNamespace(job=attempt, was_signaled=False)

    work = launch.Launch(case.options, case.hosts, case.num_ranks, lambda attempt: None, supervisor=supervisor_of)
    with (
        mock.patch.object(launch.supervisor, "run", run),
        mock.patch.object(launch.processes, "say", lambda text: None),
        mock.patch.object(launch.time, "sleep", waits_s.append),
    ):
        code = launch.run_attempts(work)
    assert (code == 0) == (not outcome.reason) or outcome.reason == job.TOO_LONG
    assert not recorded and waits_s == simulated.restarts.waits_s


# ---- what always holds -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(1, 30_000), st.integers(0, 5)), max_size=12),
    st.booleans(),
    st.sampled_from([0.0, 50.0, 3000.0, math.inf]),
    st.sampled_from([{}, {"min_np": 3}, {"min_np": 4}, {"keep_hosts": True}, {"max_restarts": 2}]),
    st.integers(0, 2),
    st.sampled_from([1, 170, 1000, 30_000]),
)
def test_parts_add_up_to_the_clock(failures, elastic, repair_s, options, num_spares, per_save):
    case = make_case(num_spares=num_spares, elastic=elastic, repair_s=repair_s, per_save=per_save, **options)
    kind = job.ElasticJob if elastic else job.Job
    simulated = kind(case, iter(sorted(failures)))
    outcome = simulated.run()
    assert outcome.total_s == pytest.approx(simulated.training.now_s)
    assert min(outcome.seconds.values()) >= -1e-6
    if not outcome.reason:
        assert outcome.seconds["steps"] == pytest.approx(case.schedule.num_steps)
        assert outcome.seconds["save"] >= COSTS.save_s * math.ceil(20_000 / per_save) - 1e-6
    assert 0 <= outcome.goodput <= 1
    if elastic and not outcome.num_restarts and not outcome.reason:
        assert outcome.seconds["repeated"] <= COSTS.step_s * outcome.num_failures / 0.25 + 1e-6
    if not failures:
        assert outcome.num_failures == 0 and outcome.reason == ""


def means(case, mtbf_s):
    found = outcomes(case, mtbf_s)
    lost = [outcome.seconds["repeated"] for outcome in found]
    return np.mean(lost), np.mean([outcome.total_s for outcome in found])


@pytest.mark.parametrize("elastic", [False, True])
def test_more_failures_cost_more(elastic):
    case = make_case(elastic=elastic, repair_s=600.0, slots=4)
    found = [means(case, mtbf_s) for mtbf_s in (math.inf, 4 * DAY_S, 2 * DAY_S, DAY_S, DAY_S / 2)]
    assert [lost for lost, _ in found] == sorted(lost for lost, _ in found)
    assert [clock for _, clock in found] == sorted(clock for _, clock in found)


def test_more_spare_hosts_and_cheaper_saves_cost_less():
    clocks_s = []
    for num_spares in (0, 1, 2):
        case = make_case(num_spares=num_spares, repair_s=3600.0, num_steps=100_000)
        # The same failures for all, of 6 hosts.
        found = [job.simulate(case, hosts.failures(6, DAY_S, (0, number))) for number in range(100)]
        clocks_s.append(np.mean([outcome.total_s for outcome in found]))
    assert clocks_s == sorted(clocks_s, reverse=True)
    case = make_case()
    cheap = dataclasses.replace(case, schedule=dataclasses.replace(case.schedule, save_s=1.0))
    assert means(cheap, DAY_S)[1] < means(case, DAY_S)[1]


# ---- plans -----------------------------------------------------------------------------------------------------------


def make_plan(**changes):
    given = {"costs": COSTS, "work_s": 72_000.0, "mtbf_s": DAY_S, "repair_s": 600.0, "num_jobs": 20, "seed": 1}
    options = LaunchOptions(command=("train",), max_restarts=cases.MANY, **changes.pop("options", {}))
    listed = changes.pop("hosts", [Host(f"host{number}", 2) for number in range(6)])
    return plan_of(listed, options, **{**given, **changes})


def test_hosts_behind_the_ranks_are_spare():
    plan = make_plan(options={"np": 7})
    assert [host.name for host in plan.hosts] == ["host0", "host1", "host2", "host3"]
    assert [host.name for host in plan.spares] == ["host4", "host5"]
    assert [host.name for host in plan.hosts_with(3)][4:] == ["host4", "host5", "spare1"]
    assert make_plan(options={"elastic": True, "np": 2}).num_ranks == 12, "an elastic job takes all slots"
    assert make_plan(options={"elastic": True, "max_np": 8}).num_ranks == 8


def test_the_used_hosts_are_those_that_the_launcher_fills():
    listed = [Host("a", 2), Host("b", 4), Host("c", 1), Host("d", 4)]
    case = Case(tuple(listed), 6, LaunchOptions(command=("x",), max_restarts=9), make_case().schedule, COSTS)
    simulated = job.Job(case, iter(()))
    assert [host for host in range(4) if host in simulated.used_hosts()] == [0, 1]
    simulated.restarts.without(["a"])
    assert [host for host in range(4) if host in simulated.used_hosts()] == [1, 2, 3]
    simulated.restarts.without(["b"])  # 5 slots, 3 ranks
    assert [host for host in range(4) if host in simulated.used_hosts()] == [2, 3]


def test_all_variants_are_compared_over_the_same_failures():
    plan = make_plan(options={"np": 8})
    compared = cases.compare(plan, interval_s=3600.0)
    variants = [(result.variant.num_spares, result.variant.words) for result in compared.by_hosts]
    assert variants == [(spares, words) for spares in (0, 1, 2) for words in ("none", "--keep-hosts", "--elastic")]
    young_s = plan.best_interval_s
    intervals_s = [result.variant.interval_s for result in compared.by_interval]
    assert intervals_s == sorted([young_s / 2, young_s, 2 * young_s, 3600.0])
    assert compared.given.variant == Variant(young_s, 2, elastic=False, keep_hosts=False)
    assert not compared.best.variant.elastic and compared.best_otherwise.variant.elastic
    assert not compared.given.is_cheaper(compared.best)
    again = cases.compare(plan, interval_s=3600.0)
    assert again.best.outcomes == compared.best.outcomes
    twice = cases.compare(plan, interval_s=2 * young_s)
    assert len(twice.by_interval) == 3


# ---- costs of a run --------------------------------------------------------------------------------------------------

EVENTS = [
    {"event": "start", "time_s": 110, "spent_s": {"start": 4}, "begun_s": 100, "global_step": 0},
    {"event": "training", "time_s": 120, "spent_s": {"start": 5, "step": 9}, "global_step": 0},
    {"event": "save", "time_s": 140, "spent_s": {"start": 5, "step": 27, "save": 2}, "global_step": 10},
    {"event": "time", "time_s": 150, "spent_s": {"start": 5, "step": 37, "save": 2}, "global_step": 15},
    {"event": "start", "time_s": 170, "spent_s": {"start": 3}, "begun_s": 160, "run_start": 1, "process": 2}
    | {"restore_s": 4.0, "resumed_from": "c", "global_step": 10},
    {"event": "training", "time_s": 172, "spent_s": {"start": 3, "step": 2}, "global_step": 10, "process": 2},
    {"event": "save", "time_s": 196, "spent_s": {"start": 3, "step": 22, "save": 4}, "global_step": 20, "process": 2},
    {"event": "end", "time_s": 196, "spent_s": {"start": 3, "step": 22, "save": 4}, "global_step": 20, "process": 2},
]


@pytest.fixture
def run(tmp_path):
    """Folder of a run that failed after step 15, and resumed at step 10."""
    (tmp_path / "digits" / "logs").mkdir(parents=True)
    lines = [json.dumps({"rank": 0, "host": "h", "process": 1, **event}) for event in EVENTS]
    (tmp_path / "digits" / "logs" / "journal-0.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "digits"


def test_costs_are_those_of_a_run_unless_they_are_given(run):
    found, interval_s = costs.costs_of(CostOptions(from_run=str(run)))
    # Starts of 20 and 8 s, saves of 2 and 4 s; 20 steps that count in 18 and 20 s, 5 of the first in 10 s again.
    assert (found.start_s, found.save_s, found.restore_s) == pytest.approx((14, 3, 4))
    steps_s = 18 + 10 + 20
    assert interval_s == pytest.approx(steps_s / 2)
    assert found.step_s == pytest.approx((28 * 10 / 15 + 20) / 20)
    assert found.detect_s == Costs().detect_s
    given, _ = costs.costs_of(CostOptions(from_run=str(run), save_s=7.0, detect_s=5.0))
    assert (given.save_s, given.start_s, given.detect_s, given.detect_elastic_s) == (7, found.start_s, 5, 5)
    assert costs.costs_of(CostOptions()) == (Costs(), 0.0)


# ---- the command -----------------------------------------------------------------------------------------------------

WORDS = ["simulate", "-H", "a:2,b:2,c:2,d:2", "--mtbf", "2d", "--hours", "20", "--jobs", "30"]


def printed(capsys, *words):
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def test_what_a_reader_sees(capsys):
    text = printed(capsys, *WORDS, "--save-every", "1h", "--price", "10")
    assert text == printed(capsys, *WORDS, "--save-every", "1h", "--price", "10"), "a seed is a result"
    assert text != printed(capsys, *WORDS, "--save-every", "1h", "--price", "10", "--seed", "5")
    first, second, *rows = text.splitlines()
    assert first == "4 hosts with 8 ranks, 20 h of steps; a host fails every 2 d, the job every 12 h"
    assert "30 simulated jobs" in second and "as many restarts as it takes" in second
    assert len([row for row in rows if "--elastic" in row and "to" in row]) >= 3
    assert any("(Young)" in row for row in rows) and any("1 h (as given)" in row for row in rows)
    assert "cost" in text and rows[-1].startswith("Save every ")


def test_options_of_launch_hold_in_the_simulation(capsys):
    text = printed(capsys, *WORDS, "--", "--max-restarts", "0", "python", "own.py")
    assert "of 30 jobs end before their last step" in text and "complete" in text
    shown = json.loads(printed(capsys, *WORDS, "--json", "--", "--elastic", "--min-np", "2"))
    assert not any(row["elastic"] is False for row in shown["by_interval"])
    row = shown["by_hosts"][0]
    assert row["complete"] == 30 and row["goodput"]["repeats"] == 30
    assert sum(row["mean_s"].values()) / 3600 == pytest.approx(row["hours"]["median"], rel=0.2)
    assert "cost" not in row and shown["recommendation"].startswith("Save every")


def test_costs_of_a_run_reach_the_command(capsys, run):
    words = [*WORDS, "--from-run", str(run), "--repair", "never", "--jobs", "2", "--json"]
    shown = json.loads(printed(capsys, *words))
    assert shown["costs"]["save_s"] == pytest.approx(3) and shown["repair_s"] is None
    assert 24.0 in [pytest.approx(row["interval_s"]) for row in shown["by_interval"]]


def test_a_plot_is_a_picture(tmp_path, capsys):
    printed(capsys, *WORDS, "--plot", str(tmp_path / "goodput.png"))
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mtbf", "30x"], "got --mtbf 30x, expected a time such as"),
        (["--repair", "soon"], "got --repair soon"),
        (["--hours", "0"], "got --hours 0, expected a number of hours above 0"),
        (["--from-run", "no-such-run"], "no-such-run: nothing of a run in it"),
        (["--", "--launcher", "sbatch"], "got --max-restarts with --launcher sbatch"),
        (["--", "--launcher", "spark"], "got --launcher spark"),
        (["--", "-np", "9"], "got 9 ranks, but hosts with 8 slots"),
        (["--", "--min-np", "9"], "got --min-np 9, expected 1 to 8"),
        (["--", "--elastic", "--host-discovery", "./hosts.sh"], "got --host-discovery"),
        (["--", "--hostfile", "x"], "not allowed with"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert cli.main([*WORDS, *words]) == 2
    errors = capsys.readouterr().err
    assert said in errors and len(errors.splitlines()) == 1


def masked(text):
    """Text without its numbers and spaces."""
    return re.sub(r"[\s─]+", " ", re.sub(r"[\d.,]+", "#", text)).strip()


def test_the_page_shows_the_output_of_its_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("".join(f"host{number}:8\n" for number in range(64)))
    pattern = r"```sh\nringtrain (simulate [^\n]*)\n```\n\n```\n(.*?)```"
    command, output = re.search(pattern, PAGE.read_text(), re.DOTALL).groups()
    assert masked(printed(capsys, *command.split())) == masked(output)
