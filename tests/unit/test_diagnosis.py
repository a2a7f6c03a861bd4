"""Who keeps the others waiting, and who is slow, from what the ranks say of themselves."""

from __future__ import annotations

import dataclasses

import pytest

from ringtrain.monitor.diagnosis import (
    FIRST_STEPS_S,
    Row,
    Stalls,
    Times,
    blocking_ranks,
    limit_s,
    report,
    warning_s,
)
from ringtrain.monitor.stragglers import SlowRanks, stragglers


def row(rank: int, phase: str = "reduce", step: int = 20, **more) -> Row:
    return Row(rank, f"host{rank}", phase=phase, step=step, own_steps=20, **{"idle_s": 12.0, **more})


def times(own_ms: float, part: str = "compute", num_steps: int = 50) -> Times:
    own = {f"{part}_s": own_ms / 1000}
    return Times(step_s=0.1, wait_s=0.1 - own_ms / 1000, own_s=own_ms / 1000, num_steps=num_steps, **own)


CASES = {
    "a rank whose beats have stopped": ([row(0), row(1, silent_s=9.0), row(2, "compute")], [1]),
    "one that has left": ([row(0), row(1, "compute"), row(2, "compute", is_done=True)], [2]),
    "one in input, others in reduce": ([row(0), row(1, "input"), row(2)], [1]),
    "rank 0 itself": ([row(0, "save"), row(1), row(2)], [0]),
    "two of three": ([row(0, "input"), row(1, "input"), row(2)], [0, 1]),
    "those who wait in the forward pass wait as well": ([row(0, "compute"), row(1, "callbacks")], [1]),
    "a step behind": ([row(0, "input", step=21), row(1, "compute")], [1]),
    "one that waits a step behind keeps nobody waiting": ([row(0, "input", step=21), row(1)], []),
    "all wait": ([row(0), row(1)], []),
    "alone": ([row(0, "input")], [0]),
}


@pytest.mark.parametrize("case", CASES)
def test_who_keeps_the_others_waiting(case: str) -> None:
    rows, expected = CASES[case]
    assert [one.rank for one in blocking_ranks(rows)] == expected


def test_the_stall_timeout_is_at_least_20_median_steps() -> None:
    steady = [row(0, times=Times(step_s=1.0)), row(1, times=Times(step_s=2.0))]
    assert limit_s(steady, 5) == 40, "20 times the median step"
    assert limit_s(steady, 300) == 300
    first = [dataclasses.replace(one, own_steps=1) for one in steady]
    assert limit_s(first, 5) == FIRST_STEPS_S, "in which graphs are made"
    assert limit_s([first[0], steady[1]], 5) == 40, "a rank that was stopped is not heard of again"
    silent = row(2, times=Times(step_s=9.0), silent_s=9.0)
    assert limit_s([*steady, silent], 5) == 40, "its last steps are not known"
    assert warning_s(steady, 300) == 40
    assert warning_s([row(0, times=Times(step_s=0.01))], 300) == 10
    assert warning_s([row(0, times=Times(step_s=0.01))], 5) == 2.5


def test_the_report_says_who_where_how_long_and_who_waits() -> None:
    rows = [row(0), row(1, "input", stacks="in read"), row(2)]
    assert report(rows, blocking_ranks(rows)) == (
        "rank 1 on host1 has made no progress for 12 s: at step 20, in input; ranks 0, 2 wait for it\nin read"
    )
    assert "all wait in a collective (rank 0 on host0 at step 20, rank 1" in report([row(0), row(1)], [])


def test_a_run_is_warned_about_once_asked_for_stacks_and_ended() -> None:
    def at(seconds: float, stacks: str = "") -> list[Row]:
        return [row(0, idle_s=seconds), row(1, "input", idle_s=seconds, stacks=stacks), row(2, idle_s=seconds)]

    stalls = Stalls(20)
    assert stalls.look(at(9), 0.0) == stalls.look(at(9), 1.0) and stalls.asked(at(9)) is None
    assert stalls.look(at(11), 2.0).warning.startswith("rank 1 on host1 has made no progress for 11 s: at step 20")
    assert not stalls.look(at(12), 3.0).warning, "once"
    assert not stalls.look(at(21), 12.0).stall and stalls.asked(at(21)) == [1], "its stacks come first"
    ended = stalls.look(at(23, "in read"), 14.0)
    assert ended.stall.endswith("\nin read") and [one.rank for one in ended.blocking] == [1]
    assert not stalls.look(at(1), 20.0).stall and stalls.asked(at(1)) is None, "there was progress"
    assert stalls.look(at(11), 30.0).warning, "anew"


@pytest.mark.parametrize(
    ("saw", "words"),
    [
        ({}, "at step 20, last heartbeat in compute of step 17: its host or the network"),
        ({"state": "T", "step": 19, "phase": "save"}, "at step 19, in save; no heartbeat: its process is stopped"),
        ({"state": ""}, "its process has exited"),
        ({"state": "R", "step": 20, "phase": "step"}, "in input, compute or reduce; no heartbeat: its process runs"),
    ],
)
def test_a_rank_that_does_not_answer_is_seen_by_another_of_its_host(saw: dict, words: str) -> None:
    rows = [row(0, saw={"1": saw} if saw else {}), row(1, "compute", step=17, silent_s=9.0, idle_s=0.0)]
    said = report(rows, blocking_ranks(rows))
    assert said.startswith("rank 1 on host1 has made no progress for 9 s: ") and words in said


def test_a_straggler_is_measured_by_its_own_time_against_the_others() -> None:
    rows = [row(0, times=times(20)), row(1, times=times(31, "input"))]
    ((slow, part, factor),) = stragglers(rows, 1.5)
    assert (slow.rank, part) == (1, "input")
    assert factor == pytest.approx(1.55)
    assert stragglers(rows, 1.6) == []
    assert stragglers(rows, 0) == []
    assert stragglers([rows[0], row(1, times=times(31, num_steps=49))], 1.5) == [], "not before 50 steps"
    assert stragglers([row(0, times=times(1)), row(1, times=times(2))], 1.5) == [], "a millisecond is nothing"
    assert stragglers([row(0, times=times(30, "input")), row(1, times=times(20))], 1.4)[0][0].rank == 0
    fast = [row(rank, times=times(10)) for rank in range(3)]
    assert [slow.rank for slow, _, _ in stragglers([*fast, row(3, times=times(20))], 1.5)] == [3]


def test_a_rank_is_named_once_when_it_has_been_slow_for_long_enough() -> None:
    """A minute of steps of 15 ms: slow for three seconds in ten, and at last without a pause."""
    ranks, named = SlowRanks(1.5), []
    for second in range(60):
        is_slow = second % 10 < 3 or second >= 30
        rows = [row(0, times=times(5)), row(1, times=times(10 if is_slow else 5, "callbacks"))]
        rows = [dataclasses.replace(one, own_steps=50 + second * 66) for one in rows]
        named += [(second, found.rank, part) for found, part, _ in ranks.look(rows)]
    ((second, rank, part),) = named
    assert 40 <= second < 50 and (rank, part) == (1, "callbacks")
