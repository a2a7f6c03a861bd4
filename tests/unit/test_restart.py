"""Which results are worth another start, on which hosts, with how many ranks and after what time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtrain.cluster.exit_cause import HOST_LOST, JobResult
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.restart import Restarts, causes_of, num_slots, ranks_on, why_not
from ringtrain.protocol.attempt import Attempt

KILLED = JobResult(137, "rank 1 on host2 was killed by SIGKILL (signal 9)", rank=1, hosts=("host2",), global_step=20)
ONCE = LaunchOptions(command=("python", "own.py"))
THREE = replace(ONCE, max_restarts=3)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (KILLED, ""),
        (JobResult(1, "rank 0 failed first:\nKeyError: 3", "KeyError", rank=0), ""),
        (JobResult(75, "rank 1 keeps the others waiting", "Stalled", rank=0), ""),
        (JobResult(2, "lost host2 while the job ran", HOST_LOST, hosts=("host2",)), ""),
        (JobResult(2, "rank 0 failed first: ConfigError: ...", "ConfigError", rank=0), "a restart does not fix"),
        (JobResult(2, "non-finite loss", "NonFiniteLoss", rank=1), "NaN or infinite again"),
        (JobResult(1, "OOM when allocating", "ResourceExhaustedError", rank=0), "out of memory"),
        (JobResult(137, "rank 0 was killed", rank=0, out_of_memory=True), "out of memory"),
        (JobResult(143, "rank 0 was killed by SIGTERM", rank=0), "asked to stop"),
        (JobResult(127, "sh: training: not found", rank=0), "cannot be run"),
        (JobResult(143, "stopped by SIGTERM", stopped=True), "it was stopped"),
    ],
)
def test_what_is_tried_again(result, reason):
    assert (reason in why_not(result, [], THREE)) and bool(why_not(result, [], THREE)) is bool(reason)


def test_as_often_as_allowed():
    results = [JobResult(137, "killed", rank=1, global_step=step) for step in (1, 2, 3)]
    assert why_not(KILLED, results[:2], THREE) == ""
    assert "3 times already" in why_not(KILLED, results, THREE)
    assert why_not(KILLED, [], ONCE) == "not asked for"


def test_the_same_rank_at_the_same_step_for_the_same_reason_twice():
    assert "same step twice (step 20)" in why_not(KILLED, [KILLED], THREE)
    others = [
        JobResult(137, KILLED.text, rank=1, hosts=("host2",), global_step=21),
        JobResult(137, KILLED.text, rank=0, hosts=("host2",), global_step=20),
        JobResult(1, "another cause", rank=1, hosts=("host2",), global_step=20),
    ]
    for other in others:
        assert why_not(KILLED, [other], THREE) == ""
        assert why_not(KILLED, [KILLED, other], THREE) == "", "only the last one counts"
    lost = JobResult(2, "lost host2", HOST_LOST, hosts=("host2",))
    assert why_not(lost, [lost], THREE) == "", "a host that goes twice is left out instead"


HOSTS = [Host("host1", 4), Host("host2", 4), Host("host3", 4)]


def names(hosts):
    return [host.name for host in hosts]


def after(failures, options=ONCE, hosts=HOSTS, silent=()):
    """Names of the hosts of the next attempt."""
    restarts = Restarts(hosts, num_slots(hosts), replace(options, max_restarts=9))
    for failure in failures:
        assert restarts.after(failure) == ""
    restarts.without(silent)
    return names(restarts.hosts)


def test_a_host_that_failed_twice_is_left_out():
    failures = [JobResult(1, hosts=("host1", "host2")), JobResult(1, hosts=("host2",), global_step=5)]
    assert after(failures) == ["host1", "host3"]
    assert after(failures, replace(ONCE, min_np=9)) == ["host1", "host2", "host3"]
    assert after(failures, silent=["host3"]) == ["host1"]
    failures = [JobResult(1, hosts=("host1",), global_step=step) for step in range(7)]
    assert after(failures, hosts=HOSTS[:1]) == ["host1"], "there is no other"


def test_a_host_is_used_again_once_others_have_failed_since():
    """In a long job every host fails twice some day; a bad one does so in a row."""
    failures = [JobResult(1, hosts=("host1",), global_step=step) for step in (1, 2)]
    later = [JobResult(1, hosts=(name,), global_step=9 + step) for step, name in enumerate(["host2", "", "host3", ""])]
    assert [after([*failures, *later[:number]]) for number in range(4)] == [["host2", "host3"]] * 4
    assert after([*failures, *later]) == ["host1", "host2", "host3"]


def test_of_hosts_that_are_needed_the_one_that_fails_least_is_used():
    failed = ["host1"] * 3 + ["host2"] * 2
    failures = [JobResult(1, hosts=(name,), global_step=step) for step, name in enumerate(failed)]
    assert after(failures, replace(ONCE, min_np=8)) == ["host2", "host3"]


def test_a_lost_host_is_tried_again_if_the_others_have_too_few_slots():
    lost = JobResult(2, "lost host1", HOST_LOST, hosts=("host1",))
    spare = Restarts(HOSTS, 8, THREE)
    assert (spare.after(lost), names(spare.hosts), spare.num_ranks) == ("", ["host2", "host3"], 8)
    none = Restarts(HOSTS, 12, THREE)
    assert (none.after(lost), names(none.hosts), none.num_ranks) == ("", ["host1", "host2", "host3"], 12)
    assert none.without(["host1"]) and none.num_ranks == 8
    for command in ("python -u -m ringtrain.train", "bash -c ringtrain.train", "./train.sh"):
        divided = Restarts(HOSTS, 12, replace(THREE, command=tuple(command.split())))
        assert divided.after(lost) == "" and divided.without(["host1"])
        assert divided.num_ranks == 6, "the largest divisor of 12 on 8 slots: its batch is that of a rank"
    all_needed = Restarts(HOSTS, 12, replace(THREE, min_np=12))
    assert all_needed.after(lost) == "" and not all_needed.without(["host1"])
    assert all_needed.after(lost) == "" and all_needed.num_ranks == 12, "it may be back"


@given(st.integers(0, 64), st.integers(1, 64), st.integers(1, 64))
def test_fewer_ranks_share_the_global_batch_evenly(slots, num_ranks, min_ranks):
    assert ranks_on(slots, num_ranks, min_ranks) in (0, min(slots, num_ranks))
    ranks = ranks_on(slots, num_ranks, min_ranks, has_batch_per_rank=True)
    if ranks:
        assert min_ranks <= ranks <= min(slots, num_ranks) and num_ranks % ranks == 0
    else:
        assert not [n for n in range(min_ranks, min(slots, num_ranks) + 1) if num_ranks % n == 0]
    assert num_ranks > slots or num_ranks < min_ranks or ranks == num_ranks


def test_waits_longer_and_longer_until_there_are_new_steps():
    restarts, waits = Restarts(HOSTS, 12, replace(ONCE, max_restarts=99)), []
    for step in (-1, -1, 20, 20, 18, 30, 31, 31, *[31] * 9):
        restarts.after(JobResult(2, "lost", HOST_LOST, global_step=step))
        waits.append(restarts.delay_s())
    assert waits == [1, 2, 0, 1, 2, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_a_host_may_be_waited_for_as_long_as_restarts_allow():
    restarts = Restarts(HOSTS, 12, replace(ONCE, max_restarts=5000))
    for _ in range(2000):
        assert restarts.after(JobResult(2, "lost", HOST_LOST, hosts=("host1",))) == ""
    assert restarts.delay_s() == 60


def test_long_causes_of_many_restarts_fit_into_the_environment():
    results = [JobResult(1, f"failure {number}: " + "\U0001f600" * 50_000, rank=0) for number in range(40)]
    attempt = Attempt(number=40, causes=causes_of(results), run_name="digits", num_ranks=2)
    assert len(attempt.causes) == 20 and attempt.causes[-1].startswith("failure 39: ")
    text = attempt.to_json()
    assert len(text) < 131_072 - 100
    assert Attempt.from_environment({"RINGTRAIN_ATTEMPT": text}) == attempt


@pytest.mark.parametrize(("lost", "waits_s"), [("host1", 30), ("host2", 0)])
def test_no_second_rank_0_writes_while_the_first_one_may_still_run(lost: str, waits_s: int) -> None:
    """Its host, cut off, ends its part of the job when the lease is over."""
    restarts = Restarts(HOSTS, 12, THREE)
    restarts.after(replace(KILLED, not_cleaned_up=(lost,)))
    assert restarts.delay_s("host1") == waits_s
