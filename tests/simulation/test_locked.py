"""Starts of one run on hosts that share its folder, with schedules that a seed chooses; see locked.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from simulation.locked import NFS4, Launch, Machine, Run, simulate
from simulation.planted import Defect, seeds_to_find, text
from simulation.transitions import never, taken

from ringtrain.run import run_folder
from ringtrain.run.run_folder import RunLock

NUM_SCHEDULES, COUNT = 150, 120
FIRST_SEEDS = {"a holder that is not known is on this host": 430, "a restart does not wait": 2300}
"""near one that finds it, for the time that the tests take"""


def test_what_must_hold_does() -> None:
    for seed in range(NUM_SCHEDULES):
        violation = simulate(seed).violation
        assert not violation, f"python tests/simulation/run.py locked --seed {seed} --trace: {violation}"


def nothing(*_: Any) -> bool:
    return False


DEFECTS = {
    "the lock is not asked for": Defect(run_folder, "_lock", nothing),
    "a process whose lock was taken over goes on": Defect(RunLock, "_look", nothing),
    "a restart takes over the lock of another job": Defect(
        run_folder, "_is_earlier_attempt", lambda holder, same_job: same_job
    ),
    "an attempt takes over the lock of a later one": text(
        run_folder, "_is_earlier_attempt", ('number <= process["attempt"]', "True")
    ),
    "a start takes over the lock of a later requeue": text(
        run_folder, "_of_same_scheduled_job", ("_requeues(holder) < _requeues(process)", "True")
    ),
    "a second holder gets the rest of the first one's time": text(
        RunLock, "take", ("if holder != known:", "if known is None:")
    ),
    "time in which a process was frozen counts": text(
        RunLock, "take", ("min(now_s - looked_s, MAX_PAUSE_S)", "now_s - looked_s")
    ),
    "a lock that was taken over before its holder wrote its name counts": text(
        RunLock, "_locked", ("self._other(path) is not None", "False")
    ),
    "a holder that is not known is on this host": text(run_folder, "_is_elsewhere", ("not holder or any", "any")),
    "what names the holder is not flushed": text(RunLock, "_locked", ("os.fsync(file.fileno())", "pass")),
    "a lock of a file that was removed counts": text(RunLock, "_locked", ("if not is_same:", "if False:")),
    "a file that is removed meanwhile is an error": text(
        RunLock, "_locked", ("contextlib.suppress(FileNotFoundError)", "contextlib.nullcontext()")
    ),
    "the lock of a lost host is not taken over": text(RunLock, "take", ("elif earlier and elsewhere:", "elif False:")),
    "a start does not wait for a lost host": text(RunLock, "take", ("wait_s = EXPIRY_S", "wait_s = 0.0")),
    "a restart does not wait": text(RunLock, "take", ("wait_s = LEASE_S", "wait_s = 0.0")),
}


# ---- schedules that found defects -----------------------------------------------------------------------------------


def directed(run: Run, *takes: tuple[str, str, float]) -> None:
    """Three hosts at a quick server; operations of some processes take long, once.

    takes: process, operation and seconds; negative: its host is frozen meanwhile.
    """
    run.shared.kind, run.shared.latency_s = NFS4, 0.001
    run.machines[:] = [Machine(run.world, f"host{number}") for number in range(1, 4)]
    due = list(takes)

    def pause(what: str) -> None:
        process = run.world.current_host
        for one in [one for one in due if one[:2] == (process.name, what)]:
            due.remove(one)
            if one[2] < 0:
                run.disturbed_s[process] = run.world.now_s
                process.facts["machine"].freeze(-one[2])
                run.world.sleep(0)
            else:
                run.world.sleep(one[2])

    run.shared.pause = pause


def starts(run: Run, *which: tuple[float, Launch, int, int]) -> None:
    """Starts attempts: time, job, attempt and host."""

    def start(launch: Launch, number: int, host: int) -> None:
        launch.number = number
        run.start(launch, host)

    for time_s, launch, number, host in which:
        run.world.at(time_s, partial(start, launch, number, host))


def frozen_before_its_name_is_written(run: Run) -> None:
    """Its lock expires meanwhile, and another job has the folder when it wakes."""
    directed(run, ("a.0", "flush", -150.0))
    starts(run, (0.0, Launch("a", False, 0, False), 0, 0), (1.0, Launch("b", False, 0, False), 0, 1))


def two_restarts_at_a_lost_host(run: Run) -> None:
    """The earlier one removes the file, and then finds that of the later one, without a name yet."""
    job = Launch("a", False, 0, False)
    directed(run, ("a.2", "flush", 1.0))
    starts(run, (0.0, job, 0, 0), (10.0, job, 1, 1), (20.0, job, 2, 2))
    run.world.at(5.0, lambda: run.machines[0].freeze(1000.0))
    _slow_after_removal(run, "a.1")


def frozen_while_it_waits(run: Run) -> None:
    """The process for which it waited has ended meanwhile, and another job has the lock, without a name yet."""
    job = Launch("a", False, 0, False)
    directed(run, ("b.0", "flush", 1.5))
    starts(run, (0.0, job, 0, 0), (10.0, job, 1, 1), (44.5, Launch("b", False, 0, False), 0, 2))
    run.world.at(12.0, lambda: run.machines[1].freeze(33.0))
    run.world.at(44.0, lambda: run.end(run.machines[0].processes[0]))
    _slow_after_removal(run, "a.1", 2.0)


def removed_before_it_is_locked(run: Run) -> None:
    """A file that another job has opened is removed by a restart, and then its holder dies."""
    job = Launch("a", False, 0, False)
    directed(run)
    starts(run, (0.0, job, 0, 0), (10.0, job, 1, 1), (39.5, Launch("b", False, 0, False), 0, 2))
    run.world.at(5.0, lambda: run.machines[0].freeze(1000.0))
    run.world.at(40.1, lambda: run.end(run.machines[0].processes[0]))
    _slow_after_removal(run, "a.1")
    pause = run.shared.pause

    def slowly(what: str) -> None:
        if run.world.current_host.name == "b.0" and what == "lock" and 39.9 < run.world.now_s < 40.1:
            run.world.sleep(0.3)
        pause(what)

    run.shared.pause = slowly


def _slow_after_removal(run: Run, slow: str, seconds: float = 0.8) -> None:
    """A process opens the file a while after it has removed it."""
    unlink = run.shared.unlink

    def removed() -> None:
        unlink()
        pause = run.shared.pause

        def then(what: str) -> None:
            if run.world.current_host.name == slow and what == "open":
                run.shared.pause = pause
                run.world.sleep(seconds)
            pause(what)

        run.shared.pause = then

    run.shared.unlink = removed  # type: ignore[method-assign]


SCHEDULES: dict[str, tuple[Callable[[Run], None], str]] = {
    "frozen before its name is written": (
        frozen_before_its_name_is_written,
        "a lock that was taken over before its holder wrote its name counts",
    ),
    "two restarts at a lost host": (
        two_restarts_at_a_lost_host,
        "a second holder gets the rest of the first one's time",
    ),
    "frozen while it waits": (frozen_while_it_waits, "time in which a process was frozen counts"),
    "removed before it is locked": (removed_before_it_is_locked, "a lock of a file that was removed counts"),
    "removed while it is locked": (removed_before_it_is_locked, "a file that is removed meanwhile is an error"),
}


def test_every_transition_is_taken() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        counts += taken(simulate(seed, is_traced=True), "locked")
    for schedule, _ in SCHEDULES.values():
        counts += taken(simulate(1, is_traced=True, directed=schedule), "locked")
    assert never(counts, "locked") == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_that_found_a_defect(name: str) -> None:
    schedule, defect = SCHEDULES[name]
    assert not simulate(1, directed=schedule).violation
    with DEFECTS[defect].planted():
        assert simulate(1, directed=schedule).violation


@pytest.mark.parametrize("name", [name for name in DEFECTS if name not in {defect for _, defect in SCHEDULES.values()}])
def test_a_planted_defect_is_found(name: str) -> None:
    assert seeds_to_find(DEFECTS[name], simulate, FIRST_SEEDS.get(name, 0), COUNT)
