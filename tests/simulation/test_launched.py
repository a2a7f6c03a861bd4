"""The launcher in virtual time: schedules of seeds, schedules that found defects, and planted defects."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from simulation.cluster import Machine
from simulation.launched import Run, disturb, fail_host, simulate
from simulation.launcher_defects import DEFECTS, schedules_to_find
from simulation.transitions import never, taken

NUM_SCHEDULES = 300
FIRST_SEEDS = {
    "the last failure is reported": 80,
    "a restart does not wait for a lost rank 0": 190,
    "the exit code of a follow-up error": 0,
    "a signal before ranks start is forgotten": 20,
    "a lost host is not noticed": 100_001,
}
"""near one that finds it, for the time that the tests take"""
COUNT = 100
"""schedules in which a planted defect is found"""


def check(seed: int, num_hosts: int = 0, directed: Callable[[Run], None] = disturb) -> Run:
    run = simulate(seed, num_hosts, directed=directed)
    assert not run.violation, f"seed {seed}: {run.violation}"
    return run


def test_what_must_hold_does_and_every_transition_is_taken() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        counts += taken(check(seed))
    for directed in (own_agent_killed, interrupted_before_a_restart):
        for seed in (0, 1):
            counts += taken(check(seed, num_hosts=4, directed=directed))
    assert never(counts) == []


def test_many_hosts() -> None:
    check(1, num_hosts=30)
    check(5, num_hosts=300)


@pytest.mark.parametrize("seed", [3, 77])
def test_a_seed_is_one_schedule(seed: int) -> None:
    assert simulate(seed, is_traced=True).world.trace == simulate(seed, is_traced=True).world.trace


# ---- schedules that found defects -----------------------------------------------------------------------------------


def calm(run: Run, **options: object) -> None:
    """Hosts that answer at once, ranks that catch signals and work for 200 s, and given options."""
    for name, value in {"grace": 8.0, "start_timeout": 30.0, "max_restarts": 0, **options}.items():
        object.__setattr__(run.options, name, value)
    for machine in run.cluster.machines.values():
        machine.latency_s = 0.01
    run.cluster.slowest_s = 0.01
    run.cluster.daemons_stay = True
    run.cluster.work_s = 200.0


def when_ranks_run(run: Run, then: Callable[[], None], after_s: float = 2.0, attempt: int = 0) -> None:
    """Calls something a while after the launcher has told mpirun's daemons to start ranks."""
    on_launch = run.cluster.on_launch

    def launched(mpirun: object) -> None:
        on_launch(mpirun)  # type: ignore[arg-type]
        if len(run.cluster.attempts) == attempt + 1:
            run.world.at(run.world.now_s + after_s, then)

    run.cluster.on_launch = launched


def once_at_clean_up(run: Run, then: Callable[[], None]) -> None:
    """Calls something when the first clean-up begins."""

    def act() -> None:
        run.on_clean_up = lambda: None
        then()

    run.on_clean_up = act


def second(run: Run) -> Machine:
    return run.cluster.machines["host2"]


def stopped_while_ranks_start(run: Run) -> None:
    """SIGTERM when mpirun has just started: it starts ranks for up to 2 s more, where agents have cleaned up."""
    calm(run)
    run.world.at(0.1, lambda: _when_supervised(run, lambda: run.signal(signal.SIGTERM)))


def killed_while_ranks_start(run: Run) -> None:
    """The same with SIGKILL: the agents see the end of their input."""
    calm(run)
    run.world.at(0.1, lambda: _when_supervised(run, lambda: run.launcher_dies(None)))


def _when_supervised(run: Run, then: Callable[[], None]) -> None:
    if run.supervised:
        run.world.at(run.world.now_s + 0.05, then)
    else:
        run.world.at(run.world.now_s + 0.05, lambda: _when_supervised(run, then))


def signal_during_the_clean_up(run: Run) -> None:
    """A host is lost, and SIGTERM comes while the others are awaited: the job must not start again."""
    calm(run, max_restarts=3)
    run.faults.append((0.0, "die"))
    once_at_clean_up(run, lambda: run.world.at(run.world.now_s + 1.0, lambda: run.signal(signal.SIGTERM)))
    when_ranks_run(run, second(run).die)


def daemon_of_a_frozen_host(run: Run) -> None:
    """Open MPI 5 gives up a host that is frozen for 13 s and exits with 0; then the host answers again."""
    calm(run)
    run.cluster.is_open_mpi_5, run.cluster.lost_rate = True, 1.0
    when_ranks_run(run, lambda: second(run).freeze(13.0))


def agent_killed_in_the_clean_up(run: Run) -> None:
    """An agent is killed before the order to clean up arrives, which the launcher cannot know yet."""
    calm(run, grace=60.0)
    run.cluster.program.ignores, run.cluster.program.catches = True, False
    second(run).latency_s = run.cluster.slowest_s = 0.8
    when_ranks_run(run, lambda: fail_host(run, run.cluster.machines["host3"], "ssh", 0.0), after_s=6.0)
    once_at_clean_up(run, lambda: fail_host(run, second(run), "agent", 0.0))


def agent_killed_where_ssh_is_slow(run: Run) -> None:
    """An agent is killed, and a second one connects when the launcher has exited: it still cleans up."""
    calm(run, grace=60.0)
    run.cluster.program.ignores, run.cluster.program.catches = True, False

    def kill() -> None:
        run.cluster.connect_s["host2"] = 20.0
        run.faults.append((run.world.now_s, "agent"))
        fail_host(run, second(run), "agent", 0.0)

    when_ranks_run(run, kill)


def own_agent_killed(run: Run) -> None:
    """The agent of the launching host."""
    calm(run)
    run.faults.append((0.0, "agent"))
    when_ranks_run(run, lambda: fail_host(run, run.here, "agent", 0.0))


def interrupted_before_a_restart(run: Run) -> None:
    """Ctrl-C in the pause before a restart."""
    calm(run, max_restarts=3)

    def kill() -> None:
        _first_rank(run).fail("killed", -signal.SIGKILL)

    when_ranks_run(run, kill)
    when_ranks_run(run, kill, attempt=1)
    when_ranks_run(run, kill, attempt=2)

    def interrupt() -> None:
        if run.code is None and not (b"restart 2 of 3 in" in run.cluster.output and run.supervised is None):
            run.world.at(run.world.now_s + 0.05, interrupt)
        else:
            run.signal(signal.SIGINT)

    run.world.at(0.0, interrupt)


def _first_rank(run: Run) -> Any:
    assert run.cluster.mpirun
    return run.cluster.mpirun.ranks[0]


SCHEDULES: dict[str, tuple[Callable[[Run], None], str]] = {
    "stopped while ranks start": (stopped_while_ranks_start, "mpirun starts ranks where agents have cleaned up"),
    "killed while ranks start": (killed_while_ranks_start, ""),
    "a signal during the clean-up": (signal_during_the_clean_up, "a signal during the clean-up is forgotten"),
    "an agent killed in the clean-up": (
        agent_killed_in_the_clean_up,
        "an agent killed in the clean-up is not replaced",
    ),
    "an agent killed where ssh is slow": (
        agent_killed_where_ssh_is_slow,
        "a second agent that connects slowly is ended",
    ),
    "a daemon of a frozen host": (daemon_of_a_frozen_host, "exit code 0 after a lost daemon"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_that_found_a_defect(name: str) -> None:
    directed, defect = SCHEDULES[name]
    check(2, num_hosts=4, directed=directed)
    if defect:
        with DEFECTS[defect].planted():
            assert simulate(2, 4, directed=directed).violation


# ---- planted defects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DEFECTS if name not in {defect for _, defect in SCHEDULES.values()}])
def test_planted_defect_is_found(name: str) -> None:
    assert schedules_to_find(name, FIRST_SEEDS.get(name, 200_001), COUNT)
