"""The monitors of two ranks over real sockets, each in a thread, that stall or progress."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import standalone

from ringtrain.monitor import diagnosis, heartbeat
from ringtrain.monitor.heartbeat import Monitor

LIMIT_S = 60  # far above what anything here takes
TIMEOUT_S = 0.3


class Activity:
    """A rank that stays where it is, or progresses."""

    def __init__(self, is_stuck: bool = True, **fields: Any) -> None:
        self.fields = lambda: fields
        self.beats = itertools.count()
        self.num_beats = 0
        self.is_stuck = is_stuck

    def progress(self) -> Any:
        self.num_beats = next(self.beats)
        return 0 if self.is_stuck else self.num_beats


class Exited(BaseException):
    pass


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that would have ended their process; a heartbeat takes 20 ms."""
    ended: list[str] = []

    def end() -> None:
        ended.append(threading.current_thread().name)
        raise Exited

    monkeypatch.setattr(heartbeat, "_exit", end)
    for module in (heartbeat, diagnosis):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "REPORT_FIRST_S", 0.1)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    return ended


def monitors(*activities: Activity) -> tuple[list[Monitor], list[tuple[Any, ...]]]:
    """The monitors of all ranks, and the events that they write: rank, event, facts."""
    first: list[Any] = []
    events: list[tuple[Any, ...]] = []

    def broadcast(value: Any) -> Any:
        first.append(value)
        return first[0]

    made = []
    for rank, activity in enumerate(activities):
        monitor = Monitor(
            rank,
            len(activities),
            activity,
            TIMEOUT_S if rank == 0 else 0.0,  # rank 0's is every rank's
            broadcast,
            write_event=lambda event, rank=rank, **facts: events.append((rank, event, facts)),
        )
        monitor._thread.name = f"rank {rank}"
        made.append(monitor)
    return made, events


def until(condition: Callable[[], bool]) -> None:
    standalone.wait_for(condition, LIMIT_S, "what the monitors are to find")


AT_RANK_0 = {"phase": "reduce", "step": 20, "own_steps": 20}
AT_RANK_1 = {**AT_RANK_0, "phase": "input"}


def test_a_stall_ends_all_ranks_with_one_report(exits: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    ranks, events = monitors(Activity(**AT_RANK_0), Activity(**AT_RANK_1))
    for monitor in ranks:
        monitor.start()
    until(lambda: len(exits) == 2)
    assert sorted(exits) == ["rank 0", "rank 1"]
    told = [(rank, event, facts["of_ranks"]) for rank, event, facts in events]
    assert sorted(told) == [(0, "stall", [1]), (1, "stall", [1])]
    assert all("rank 1 on " in facts["text"] for _, _, facts in events)
    assert events[0][2]["text"] in capfd.readouterr().err


def test_a_rank_that_progresses_ends_nothing(exits: list[str]) -> None:
    progressing = Activity(is_stuck=False, **AT_RANK_1)
    ranks, events = monitors(Activity(**AT_RANK_0), progressing)
    for monitor in ranks:
        monitor.start()
    until(lambda: progressing.num_beats > 4 * TIMEOUT_S / heartbeat.HEARTBEAT_S)
    assert exits == [] and events == []
    for monitor in ranks:
        monitor.stop()
        monitor._thread.join(LIMIT_S)
        assert not monitor._thread.is_alive()
