"""Elastic jobs in virtual time: schedules of seeds, schedules that found defects, and planted defects."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from simulation.cluster import Machine
from simulation.elastic import Run, simulate
from simulation.elastic_defects import DEFECTS, schedules_to_find
from simulation.elastic_faults import disturb, members_of
from simulation.launched import fail_host
from simulation.transitions import taken

NUM_SCHEDULES = 20
FIRST_SEEDS = {
    "rank 0 gives its state, not the one that is furthest": 0,
    "a failed sync leaves half of a state": 130,
    "a step that failed is not undone": 19,
    "an agreed stop is forgotten": 13,
    "an epoch that has ended stays open": 0,
    "journals are not written before a change": 3,
    "commits do not ask for hosts": 12,
    "local ranks have gaps": 16,
    "a lost host stays listed": 25,
    "a host is used again where ranks are left": 40,
}
"""near one that finds it, for the time that the tests take"""
COUNT = 2
"""schedules in which a planted defect is found"""


def last(run: Run) -> Machine:
    return [*run.cluster.machines.values()][-1]


def check(seed: int, num_hosts: int = 0, directed: Callable[[Run], None] = disturb) -> Run:
    run = simulate(seed, num_hosts, directed=directed)
    assert not run.violation, f"seed {seed}: {run.violation}"
    return run


def test_what_must_hold_does() -> None:
    for seed in range(NUM_SCHEDULES):
        check(seed)


def test_a_seed_is_one_schedule() -> None:
    assert simulate(3, is_traced=True).world.trace == simulate(3, is_traced=True).world.trace


# ---- schedules that found defects -----------------------------------------------------------------------------------


def calm(run: Run, **options: object) -> None:
    """Hosts that answer at once, and given options."""
    for name, value in {"max_restarts": 0, "max_np": None, **options}.items():
        object.__setattr__(run.options, name, value)
    run.cluster.step_s, run.cluster.load_s = 1.0, 2.0
    run.cluster.cooldown_share = 0.5


def a_slot_comes_back_before_the_ranks_go_on(run: Run) -> None:
    """One of two ranks is killed where --min-np is 2: the other waits for the slot, whose rank must start again."""
    calm(run, min_np=2, blacklist_cooldown=(5, 20))
    run.world.at(8.0, lambda: members_of(run)[0].end(-signal.SIGKILL))


def killed_before_the_journals_are_open(run: Run) -> None:
    """A rank is killed between the agreement on a generation and the first line of it in the journals."""
    calm(run, min_np=1)
    run.kills["ringtrain_hosts"] = 1


def a_rank_fails_while_slots_are_awaited(run: Run) -> None:
    """Too few slots are left for --min-np, another rank is killed, and Horovod gives up: the job ends."""
    calm(run, min_np=sum(run.cluster.listing.values()), blacklist_cooldown=(0, 0))
    run.world.at(8.0, lambda: kill(run))
    run.world.at(20.0, lambda: kill(run))


def a_host_leaves_while_ranks_start(run: Run) -> None:
    """Host discovery leaves a host out before any rank listens: the ranks leave it after their first commit."""
    calm(run, min_np=1, hosts=None, host_discovery="list-hosts")
    run.cluster.load_s = 15.0
    machine = last(run)

    def check_left() -> None:
        left = [member.number for member in members_of(run) if member.machine is machine]
        if left and run.code is None:
            run.violated(f"{machine.name} is not listed, and ranks {left} are still there")

    run.world.at(2.0, lambda: run.cluster.listing.pop(machine.name))
    run.world.at(27.0 + run.commit_s, check_left)


def a_host_boots_while_ranks_start(run: Run) -> None:
    """A host boots again, and its rank starts before the launcher notices that the agent is gone."""
    calm(run, min_np=1, start_timeout=30.0)
    run.faults.append((1.6, "reboot"))
    run.world.at(1.6, lambda: fail_host(run, last(run), "reboot", 8.0))


def kill(run: Run) -> None:
    run.faults.append((run.world.now_s, "killed"))
    members_of(run, is_started=False)[0].end(-signal.SIGKILL)


SCHEDULES = {
    "a rank fails while slots are awaited": (
        a_rank_fails_while_slots_are_awaited,
        "an exit is noted while ranks are assigned",
        1,
    ),
    "a slot comes back before the ranks go on": (
        a_slot_comes_back_before_the_ranks_go_on,
        "a slot whose process has exited stays empty",
        1,
    ),
    "a host leaves while ranks start": (a_host_leaves_while_ranks_start, "a change is announced only once", 7),
    "killed before the journals are open": (
        killed_before_the_journals_are_open,
        "a generation is noted before its journal is open",
        0,
    ),
    "a host boots while ranks start": (
        a_host_boots_while_ranks_start,
        "a host that has booted again is not cleaned up",
        22,
    ),
}


def killed_twice(run: Run) -> None:
    """A process fails while the driver waits for its slot, which then gets a new one."""
    calm(run, min_np=2, blacklist_cooldown=(15, 600))
    for time_s in (8.0, 16.0):
        run.world.at(time_s, lambda: kill(run))


def test_an_exit_does_not_count_for_the_next_process() -> None:
    assert [check(seed, 2, killed_twice).code for seed in (0, 4)] == [0, 0]
    with DEFECTS["an exit is noted while ranks are assigned"].planted():
        assert simulate(0, 2, directed=killed_twice).code


def own_agent_killed(run: Run) -> None:
    """The agent of the launching host is killed: nothing would clean up there, so the job ends."""
    calm(run)
    run.faults.append((20.0, "agent"))
    run.world.at(20.0, lambda: fail_host(run, run.here, "agent", 0.0))


def test_the_job_ends_without_the_agent_of_its_own_host() -> None:
    assert taken(check(1, 2, own_agent_killed), "elastic")["this host's agent is lost"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_that_found_a_defect(name: str) -> None:
    directed, defect, seed = SCHEDULES[name]
    check(seed, num_hosts=2, directed=directed)
    with DEFECTS[defect].planted():
        assert simulate(seed, 2, directed=directed).violation


# ---- planted defects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIRST_SEEDS])
def test_planted_defect_is_found(name: str) -> None:
    assert schedules_to_find(name, FIRST_SEEDS[name], COUNT)
