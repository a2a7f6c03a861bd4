"""Monitors of ranks that are disturbed as a seed decides; see monitored.py."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from simulation.monitored import Run, disturb, simulate
from simulation.planted import Defect, seeds_to_find, text
from simulation.transitions import never, taken

from ringtrain.monitor import diagnosis
from ringtrain.monitor.diagnosis import Stalls
from ringtrain.monitor.heartbeat import Monitor

NUM_SCHEDULES, COUNT = 20, 30
FIRST_SEEDS = {
    "stalls are not looked for": 5,
    "rank 0 is not supervised": 10,
    "time in which a monitor did not run counts": 26,
    "slow steps have no longer limit": 6,
    "a rank without a heartbeat is not named first": 50,
    "the job goes on after the report": 10,
    "stacks are awaited forever": 5,
    "a lost connection is not made again": 60,
}
"""near one that finds it, for the time that the tests take"""


def test_what_must_hold_does() -> None:
    for seed in range(NUM_SCHEDULES):
        violation = simulate(seed).violation
        assert not violation, f"python tests/simulation/run.py monitored --seed {seed} --trace: {violation}"


def nothing(*_: Any) -> None: ...


DEFECTS = {
    "stalls are not looked for": (Defect(Monitor, "_check_for_stall", nothing), ("hang", "freeze", "die")),
    "rank 0 is not supervised": (Defect(Monitor, "_check_for_rank_0", nothing), ("freeze", "die")),
    "time in which a monitor did not run counts": (
        text(Monitor, "_exchange", ("min(now_s - self._exchanged_s, 2 * HEARTBEAT_S)", "now_s - self._exchanged_s")),
        ("suspend", "clock", "hang"),
    ),
    "the time since the last heartbeat does not count": (
        text(Monitor, "_receive_heartbeats", ("row.silent_s + passed_s", "0.0")),
        ("freeze", "die"),
    ),
    "progress does not count": (
        text(Monitor, "_exchange", ("if progress == self._progress else 0.0", "if True else 0.0")),
        ("hang",),
    ),
    "the first rank that is idle counts": (
        text(diagnosis, "idle_s", ("min((row", "max((row")),
        ("freeze", "deaf"),
    ),
    "first steps have no longer limit": (
        text(diagnosis, "limit_s", ("max(timeout_s, FIRST_STEPS_S)", "timeout_s")),
        ("hang", "freeze"),
    ),
    "slow steps have no longer limit": (
        text(diagnosis, "limit_s", ("TIMES_MEDIAN * ", "0 * ")),
        ("hang", "freeze"),
    ),
    "ranks that wait are named": (
        text(diagnosis, "blocking_ranks", ('[row for row in rows if row.phase != "reduce"]', "rows")),
        ("hang", "ring"),
    ),
    "a rank without a heartbeat is not named first": (
        text(diagnosis, "blocking_ranks", ("if silent:", "if False:")),
        ("freeze", "die"),
    ),
    "the job goes on after the report": (Defect(Monitor, "_end_after", nothing), ("hang",)),
    "stacks are awaited forever": (
        text(Stalls, "look", ("> STACKS_TIMEOUT_S", "> 9e9")),
        ("die", "freeze", "cut"),
    ),
    "a lost connection is not made again": (
        text(Monitor, "_send_heartbeats", ("if not self._transport.is_connected:", "if not self.rows:")),
        ("reset",),
    ),
}
"""with faults among which a few schedules find it"""


COMES_BACK_S = 23.0
"""shortly after the limit, when the monitor has asked for stacks"""


def hangs_for(run: Run, seconds: float) -> None:
    """A rank hangs for a while, in a job with a limit of 20 s."""
    run.timeout_s, run.step_s = 20.0, 0.5
    rank = run.ranks[1]

    def hang() -> None:
        rank.hangs_until_s = run.world.now_s + seconds
        rank.disturbed(seconds)

    run.world.at(60.0, hang)


@pytest.mark.parametrize("seconds", [18.0, 21.5, COMES_BACK_S])
def test_a_rank_that_comes_back_when_stacks_are_asked_for(seconds: float) -> None:
    assert not simulate(1, directed=partial(hangs_for, seconds=seconds)).violation


def test_a_stall_that_has_passed_is_over() -> None:
    defect = text(Stalls, "look", ("self.has_warned, self._asked_s = False, None", "pass"))
    with defect.planted():
        assert simulate(1, directed=partial(hangs_for, seconds=COMES_BACK_S)).violation


def test_a_rank_that_dies_after_few_steps_does_not_delay_the_report() -> None:
    seed = 810365
    assert not simulate(seed).violation
    with text(diagnosis, "_step_s", (" if not row.is_silent", "")).planted():
        assert "no report after" in simulate(seed).violation


def leaves_early(run: Run) -> None:
    """A rank has fewer batches than the others."""
    run.ranks[1].num_steps = 5


def cannot_connect(run: Run) -> None:
    """No heartbeat of a rank gets through at first."""
    run.ranks[1].deaf_until_s = 60.0
    run.ranks[1].disturbed(60.0)


def ring_is_lost(run: Run) -> None:
    """Ranks send heartbeats, but the connections of their collectives are lost."""
    run.timeout_s, run.step_s, run.ring_until_s = 20.0, 0.5, 1000.0


def sends_no_heartbeat(run: Run, is_stopped: bool) -> None:
    """A rank on the host of the others is stopped, or native code holds its Python's lock."""
    run.timeout_s, run.step_s = 20.0, 0.5
    for rank in run.ranks:
        rank.machine = "host0"

    def stop() -> None:
        rank = run.ranks[1]
        if is_stopped:
            rank.freeze(1000.0)
        else:
            rank.deaf_until_s = rank.hangs_until_s = 1000.0
            rank.disturbed(1000.0)

    run.world.at(60.0, stop)


def test_every_transition_is_taken() -> None:
    counts: Counter[str] = Counter()
    hangs = partial(hangs_for, seconds=200.0)
    silent = [partial(sends_no_heartbeat, is_stopped=is_stopped) for is_stopped in (True, False)]
    drawn = [partial(disturb, kinds=(kind,)) for kind in ("freeze", "die", "hang", "reset", "cut")]
    for directed in (leaves_early, cannot_connect, ring_is_lost, hangs, *silent, *drawn):
        for seed in range(4):
            run = simulate(seed, is_traced=True, directed=directed)
            assert not run.violation, f"seed {seed}: {run.violation}"
            counts += taken(run, "monitored")
    assert never(counts, "monitored") == []


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str) -> None:
    defect, kinds = DEFECTS[name]
    assert seeds_to_find(
        defect, partial(simulate, directed=partial(disturb, kinds=kinds)), FIRST_SEEDS.get(name, 0), COUNT
    )
