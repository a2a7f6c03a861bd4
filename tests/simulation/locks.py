"""`threading` of Horovod's driver in virtual time: locks are held while others wait; Python's barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from simulation.world import Task, Threading, World, _Thread

LEAST_S = 0.001
"""that a wait takes: with less, time would not go on"""


class Lock:
    """A lock that its owner may take again, as `threading.RLock`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.owner: Task | None = None
        self.depth = 0

    def acquire(self) -> bool:
        me = self.world._task()
        if self.owner is not me:
            self.world.wait_for(lambda: self.owner is None)
        self.owner = me
        self.depth += 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.free()

    def free(self) -> None:
        self.owner, self.depth = None, 0
        self.world.wake_waiting()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock) -> None:
        self.lock, self.world = lock, lock.world
        self.acquire, self.release = lock.acquire, lock.release
        self._waiters: list[SimpleNamespace] = []

    def __enter__(self) -> bool:
        return self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = SimpleNamespace(is_notified=False)
        self._waiters.append(waiter)
        depth = self.lock.depth
        self.lock.free()
        if timeout is not None:
            timeout = max(timeout, LEAST_S)
        is_notified = self.world.wait_for(lambda: waiter.is_notified, timeout)
        if not is_notified:
            self._waiters.remove(waiter)
        self.lock.acquire()
        self.lock.depth = depth
        return is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        while not predicate():
            if not self.wait(timeout):
                return predicate()
        return True

    def notify_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.is_notified = True
        self.world.wake_waiting()


class Barrier(threading.Barrier):
    """`threading.Barrier` with a condition of the world."""

    def __init__(self, world: World, parties: int, action: Callable[[], None]) -> None:
        super().__init__(parties, action)
        self._cond = Condition(Lock(world))  # type: ignore[assignment]


class Thread(_Thread):
    """A thread whose unexpected error ends it alone, as in Python."""

    daemon = True

    def start(self) -> None:
        super().start()
        assert self._task
        self._task.is_alone = True  # type: ignore[attr-defined]


class LockedThreading(Threading):
    """`threading` of a module."""

    BrokenBarrierError = threading.BrokenBarrierError

    def Thread(self, target: Callable[[], None], name: str = "thread", daemon: bool = True) -> Thread:
        return Thread(self._world, name, target)

    def Lock(self) -> Lock:  # type: ignore[override]
        return Lock(self._world)

    def Condition(self) -> Condition:
        return Condition(Lock(self._world))

    def Barrier(self, parties: int, action: Callable[[], None]) -> Barrier:
        return Barrier(self._world, parties, action)
