"""Where the time of a run went: parts that add up to the clock, whatever has happened."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtrain.lab import report
from ringtrain.lab.runs import Run
from ringtrain.monitor import goodput


def event(kind: str, time_s: float, spent: dict[str, float], process: int = 1, **facts: Any) -> dict[str, Any]:
    return {"event": kind, "time_s": time_s, "rank": 0, "host": "h", "process": process, "spent_s": spent, **facts}


def killed_and_restarted() -> list[dict[str, Any]]:
    """A run that is killed after step 30, 20 s after its checkpoint of step 10, restarted, and launched once more."""
    spent = {"start": 5.0, "step": 36.0, "callbacks": 3.0, "save": 1.0}
    of_steps = {"input": 1.0, "compute": 6.0, "reduce": 3.0}
    resumed = {"begun_s": 160.0, "run_start": 1, "restore_s": 2.0, "resumed_from": "c"}
    return [
        event("start", 110.0, {"start": 4.0}, begun_s=100.0, run_start=0, hosts=["a", "b", "b"], global_step=0),
        event("training", 120.0, {"start": 5.0, "step": 9.0}, global_step=1),
        event("save", 131.0, {"start": 5.0, "step": 18.0, "callbacks": 1.0, "save": 1.0}, global_step=11),
        event("time", 151.0, spent, of_steps_s=of_steps, global_step=31),
        event("start", 170.0, {"start": 3.0}, 2, **resumed, global_step=11),
        event("training", 172.0, {"start": 3.0, "step": 2.0}, 2, global_step=12),
        event("end", 202.0, {"start": 3.0, "step": 22.0, "evaluate": 10.0}, 2, global_step=32),
        event("start", 312.0, {"start": 3.0}, 3, begun_s=302.0, run_start=0, global_step=32),
        event("training", 314.0, {"start": 3.0, "step": 2.0}, 3, global_step=33),
        event("end", 324.0, {"start": 3.0, "step": 12.0}, 3, global_step=43),
    ]


def test_parts_of_a_run_that_was_killed_and_launched_again():
    found = goodput.of(killed_and_restarted())
    assert found is not None
    assert found.total_s == pytest.approx(324 - 100)
    # Of 30 steps in 27 s, 10 % of them waiting for data, 20 are made again.
    steps_s = 27 * 0.9
    expected = {
        "steps": steps_s * 1 / 3 + 20 + 10,
        "input": 2.7,
        "callbacks": 3.0,
        "evaluate": 10.0,
        "save": 1.0,
        "repeated": steps_s * 2 / 3,
        "start": 20 + 21 + 12,
        "away": 100.0,
    }
    assert found.seconds == pytest.approx(expected)
    assert found.share == pytest.approx(expected["steps"] / 224)
    assert found.host_hours == pytest.approx((2 * 51 + 51 + 22) / 3600)
    # One attempt of three failed; a save took 1 s.
    assert found.best_interval_s == pytest.approx(math.sqrt(2 * 1.0 * 124 / 1))


def test_attempts_without_an_entry_count_since_their_launch():
    """They ended before the run had a folder, or before they opened its journal."""
    events = [
        event("start", 110.0, {}, begun_s=100.0, launched_s=60.0, run_start=1, global_step=0),
        event("end", 120.0, {}, global_step=0),
        event("start", 510.0, {}, 2, begun_s=500.0, launched_s=420.0, run_start=2, global_step=0),
        event("end", 520.0, {}, 2, global_step=0),
        event("start", 540.0, {}, 3, begun_s=535.0, launched_s=420.0, run_start=3, global_step=0),
        event("start", 560.0, {}, 4, begun_s=556.0, launched_s=555.0, run_start=0, global_step=0),
    ]
    found = goodput.of(events)
    assert found is not None
    assert found.total_s == pytest.approx(560 - 60)
    assert found.seconds["start"] == pytest.approx(60 + 100 + 20 + 5)
    assert found.seconds["away"] == pytest.approx(300 + 15)


def test_ranks_that_change_are_a_part():
    events = [
        event("start", 10.0, {"start": 5.0}, begun_s=5.0, global_step=0),
        event("training", 12.0, {"start": 5.0, "step": 2.0}, global_step=1),
        event("commit", 22.0, {"start": 5.0, "step": 12.0}, global_step=11),
        event("resize", 30.0, {"start": 7.0, "step": 18.0}, global_step=11),
        event("training", 31.0, {"start": 7.0, "step": 19.0}, global_step=12),
        event("resize", 40.0, {"start": 30.0}, 2, global_step=12),  # another process is rank 0 now
        event("training", 42.0, {"start": 30.0, "step": 2.0}, 2, global_step=13),
        event("end", 52.0, {"start": 30.0, "step": 12.0}, 2, global_step=23),
    ]
    found = goodput.of(events)
    assert found is not None
    assert found.seconds["start"] == pytest.approx(7 + 9 + 11)
    assert found.seconds["steps"] == pytest.approx(20)
    assert found.total_s == pytest.approx(47)


PHASES = ["start", "step", "callbacks", "reduce", "evaluate", "save", "a wait for gradients of rank 3"]
NUMBERS = st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf) | st.none() | st.just("x")


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "event": st.sampled_from(["start", "training", "save", "time", "resize", "end", "failure"]),
                "time_s": st.floats(0, 1e6),
                "rank": st.just(0),
                "process": st.integers(1, 3),
                "spent_s": st.dictionaries(st.sampled_from(PHASES), NUMBERS),
            },
            optional={
                "of_steps_s": st.dictionaries(st.sampled_from(["input", "compute"]), NUMBERS),
                "global_step": st.integers(0, 50),
                "run_start": st.integers(0, 1),
                "begun_s": NUMBERS,
                "launched_s": NUMBERS,
                "restore_s": NUMBERS,
                "resumed_from": st.sampled_from(["", "c"]),
                "hosts": st.lists(st.sampled_from(["a", "b", {}])) | st.none(),
            },
        )
    )
)
def test_parts_add_up_to_the_clock_and_none_is_negative(events):
    events = sorted(events, key=lambda one: one["time_s"])
    found = goodput.of(events)
    if found is None:
        assert all(one["event"] != "start" for one in events)
        return
    assert all(seconds >= -1e-6 for seconds in found.seconds.values())
    assert 0 <= found.share <= 1 + 1e-9
    first = found.attempts[0].begun_s
    launched_s = goodput._number(next(one for one in events if one["event"] == "start").get("launched_s"))
    if launched_s:
        first = min(first, launched_s)
    latest_s = max(attempt.last_s for attempt in found.attempts)
    assert found.total_s == pytest.approx(latest_s - first, abs=1e-3)


def test_what_a_reader_sees():
    run = Run("", "r", [], [], {}, {}, {}, killed_and_restarted())  # type: ignore[arg-type]
    rows = report.time_cells(run)
    assert rows["between two launches"] == "1 min 40 s (44.6%)"
    assert rows["all"] == "3 min 44 s"
    assert rows["goodput"] == "17.0%"
    assert report.time_use({"r": Run("", "r", [], [], {}, {}, {}, [])}) == []  # type: ignore[arg-type]
