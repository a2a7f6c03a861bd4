"""Time limits of the launcher, with a clock that advances only while it waits."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringtrain.cluster import supervisor
from ringtrain.cluster.agents import HostAgent, HostsLost
from ringtrain.cluster.hosts import Host
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.supervisor import CLEAN_UP_S, LOST_S, TICK_S, Stopped, Supervisor
from ringtrain.protocol.placement import RankPlacement

JOB = Job(("true",), 2, (Host("host1", 2),), here=frozenset(), id="time-limits")
LAUNCHER = Plan((), ("sleep", "600"))
ENOUGH_S = 10_000.0
"""seconds after which the launcher's command exits by itself"""
EXACTLY_S = 4 * TICK_S


class Waiting:
    """Selector that receives nothing, and the clock that its waits advance."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.end: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def select(self, timeout_s: float) -> list[Any]:
        self.now_s += timeout_s
        if self.now_s > 1000 + ENOUGH_S:
            self.end()
        return []

    def register(self, *_: object) -> None: ...

    def unregister(self, *_: object) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    clock = Waiting()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(supervisor.selectors, "DefaultSelector", lambda: clock)
    return clock


@pytest.fixture
def supervised(clock: Waiting) -> Iterator[Callable[..., Supervisor]]:
    """Makes a supervisor of two ranks, of which the given number have started."""
    made: list[Supervisor] = []

    def make(num_started: int = 2, **options: float) -> Supervisor:
        made.append(Supervisor(JOB, LaunchOptions(**options)))  # type: ignore[arg-type]
        for rank in range(num_started):
            made[0].reports.ranks.append(RankPlacement(rank, 2, "host1", rank, process=2**22 + rank))

        def end() -> None:
            process: Any = made[0]._process
            process.kill()
            process.wait()

        clock.end = end
        return made[0]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("grace_s", [0.5, 8.0, 600.0])
def test_ranks_are_killed_when_the_grace_is_over_and_not_before(supervised, clock, grace_s, number) -> None:
    watch = supervised(grace=grace_s)
    watch._receive(number, None)
    with pytest.raises(Stopped):
        watch.supervise(LAUNCHER)
    assert grace_s < clock.now_s - 1000 <= grace_s + EXACTLY_S
    assert watch.conclude(-number).exit_code == 128 + number


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGUSR1])
def test_the_grace_begins_with_a_signal_that_is_not_sent_again(supervised, clock, first) -> None:
    """A notebook server interrupts a kernel right before it kills it."""
    watch = supervised(grace=8.0)
    watch._receive(first, None)
    watch._receive(signal.SIGTERM, None)
    with pytest.raises(Stopped):
        watch.supervise(LAUNCHER)
    assert 8 < clock.now_s - 1000 <= 8 + EXACTLY_S


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_postpone_it_and_ends_them_at_once(supervised, clock, first) -> None:
    watch = supervised(grace=600.0)
    watch._receive(first, None)
    watch._receive(first, None)
    with pytest.raises(Stopped):
        watch.supervise(LAUNCHER)
    assert clock.now_s - 1000 <= EXACTLY_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_after_a_signal_that_may_be_sent_again_ranks_have_no_limit(supervised, clock, number) -> None:
    watch = supervised(grace=0.5)
    watch._receive(number, None)
    assert watch.supervise(LAUNCHER) == -signal.SIGKILL, "ended by itself"
    assert clock.now_s - 1000 > ENOUGH_S


@pytest.mark.parametrize("num_started", [0, 1])
@pytest.mark.parametrize("timeout_s", [0.5, 60.0, 900.0])
def test_ranks_have_the_start_timeout_to_start_and_no_longer(supervised, clock, timeout_s, num_started) -> None:
    watch = supervised(num_started, start_timeout=timeout_s)
    with pytest.raises(HostsLost, match=f"{2 - num_started} of 2 ranks did not start within {timeout_s:g} s"):
        watch.supervise(LAUNCHER)
    assert timeout_s < clock.now_s - 1000 <= timeout_s + EXACTLY_S


def test_ranks_that_have_started_have_no_limit(supervised, clock) -> None:
    assert supervised(start_timeout=0.5).supervise(LAUNCHER) == -signal.SIGKILL
    assert clock.now_s - 1000 > ENOUGH_S


@pytest.mark.parametrize(("command", "limit_s"), [("true", LOST_S), ("false", CLEAN_UP_S)])
def test_the_launcher_waits_for_an_agent_that_does_not_answer(supervised, clock, command: str, limit_s: float) -> None:
    """Longer after success: a slow host must not turn a complete run into a failure."""
    watch, clock.end = supervised(), lambda: None
    watch.supervise(Plan((), (command,)))
    process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    watch.agents.members.append(HostAgent("host1", process, ready=True))
    before_s = clock.now_s
    watch.end()
    waited_s = round(clock.now_s - before_s, 6)  # the first command takes any number of ticks
    assert limit_s <= waited_s <= limit_s + EXACTLY_S
    assert watch.lost_hosts == ["host1"] and process.poll() is not None
