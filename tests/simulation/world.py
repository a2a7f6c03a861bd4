"""Processes of several hosts in one process, in virtual time: one runs at a time, and a seed decides which.

The code under test is the production code. Its modules get `Threading` and `Clock` in place of `threading` and `time`,
so that it changes places with others only where it waits, and waiting takes no time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock


class Gone(BaseException):
    """Ends a task of a host that has died: as after SIGKILL, none of its code has an effect any more."""


class Host:
    """A host with one process, whose tasks are its threads.

    Attributes:
        clock_rate: Seconds of its clock per second.
        clock_offset_s: By which its clock has jumped forward.
        frozen_until_s: Virtual time until which its process is stopped, as by SIGSTOP.
        facts: What the tested code has in global variables of a process.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.clock_rate, self.clock_offset_s = 1.0, 0.0
        self.frozen_until_s = 0.0
        self.is_dead = False
        self.facts: dict[str, Any] = {}

    def die(self) -> None:
        self.is_dead = True
        self.world.note(self.name, "dies")

    def freeze(self, seconds: float) -> None:
        self.frozen_until_s = self.world.now_s + seconds
        self.world.note(self.name, f"is frozen for {seconds:.0f} s")


class Task:
    """A thread of a host. One runs at a time: the one that waits looks whose turn it is, and passes it on."""

    def __init__(self, host: Host, name: str, target: Callable[[], None]) -> None:
        self.host, self.name, self._target = host, name, target
        self.is_done = False
        self.error: BaseException | None = None
        self.interruption: BaseException | None = None
        """what its code gets where it waits, as from a signal's handler"""
        self.wakeup = 0
        """number of the event that wakes it; earlier ones are out of date"""
        self.is_so: Callable[[], bool] | None = None
        """what it waits for; None: for a time only"""
        self.was_so = False
        """what `is_so` was last"""
        self.limit_s: float | None = None
        """until when it waits"""
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            if not self.host.is_dead:
                self._target()
        except Gone:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        world = self.host.world
        world.wake_waiting()
        world.give_turn(world.next_task())

    def resume(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()

    def wait(self) -> None:
        """Lets the world go on until this task is woken; called by the task."""
        world = self.host.world
        following = world.next_task()
        if following is not self:
            world.give_turn(following)
            self._turn.acquire()
        world.current = self
        if self.host.is_dead:
            raise Gone
        if self.interruption:
            interruption, self.interruption = self.interruption, None
            raise interruption


class World:
    """Virtual time, its tasks, and what has happened.

    Args:
        seed: Of every choice.
        is_traced: Keep a line of each event in `trace`.
    """

    def __init__(self, seed: int, is_traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.hosts: list[Host] = []
        self.tasks: list[Task] = []
        self.trace: list[str] = []
        self.current: Task | None = None
        self._turn = threading.Lock()
        self._turn.acquire()
        self._until_s = 0.0
        self._error: BaseException | None = None
        """of an event, for the caller of `run`"""
        self._is_traced = is_traced
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, float, int, Any]] = []
        self._waiting: dict[Task, None] = {}

    # ---- what happens ------------------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        self.hosts.append(Host(self, name))
        return self.hosts[-1]

    def start(self, host: Host, name: str, target: Callable[[], None]) -> Task:
        task = Task(host, name, target)
        self.tasks.append(task)
        self._wake(task, 0)
        return task

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Calls an action at a time, or at once if it has passed. It must not wait."""
        heapq.heappush(self._events, (max(time_s, self.now_s), self.random.random(), next(self._numbers), action))

    def run(self, until_s: float) -> None:
        """Lets everything happen up to a time, or until nothing more would."""
        self._until_s = until_s
        self._let_run(self.next_task())

    def next_task(self) -> Task | None:
        """Lets events happen until it is a task's turn; None: that of the caller of `run`."""
        self.current = None
        try:
            while self._events and self._events[0][0] <= self._until_s:
                self.now_s, _, number, subject = heapq.heappop(self._events)
                if not isinstance(subject, Task):
                    subject()
                elif subject.wakeup == number and self._is_turn(subject):
                    return subject
        except BaseException as error:
            self._error = error
        return None

    def _is_turn(self, task: Task) -> bool:
        host = task.host
        if task.is_done or host.is_dead:
            return False
        if host.frozen_until_s > self.now_s:
            self._wake(task, host.frozen_until_s - self.now_s)
            return False
        self._waiting.pop(task, None)
        if task.is_so is None or task.interruption:
            return True
        self.current = task
        task.was_so = task.is_so()
        self.current = None
        is_late = task.limit_s is not None and self.now_s >= task.limit_s
        if not task.was_so and not is_late:
            self._add_waiting(task)
            return False
        return True

    def give_turn(self, task: Task | None) -> None:
        """Lets a task run, or the caller of `run`."""
        self.current = task
        if task:
            task.resume()
        else:
            self._turn.release()

    def end(self) -> None:
        """Ends all tasks, so that no thread is left."""
        self._until_s = -1.0
        for host in self.hosts:
            host.is_dead = True
        for task in self.tasks:
            if not task.is_done:
                self._let_run(task)
            task._thread.join()
        self._events.clear()  # what would have happened later refers to the world

    def _let_run(self, task: Task | None) -> None:
        """Lets a task run, and those after it."""
        self.give_turn(task)
        self._turn.acquire()
        if self._error:
            error, self._error = self._error, None
            raise error

    # ---- for tasks ---------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Lets time pass for the current task; without an effect after `end`, as in the code that Gone passes."""
        task = self._task()
        self._wake(task, max(0.0, seconds))
        task.wait()

    def wait_for(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits until something is so, or for some seconds; returns whether it is."""
        task = self._task()
        if is_so():
            return True
        task.limit_s = None
        if seconds is not None:
            task.limit_s = self.now_s + seconds
            if seconds <= 0:
                return False
        task.is_so = is_so
        self._add_waiting(task)
        try:
            task.wait()
        finally:
            task.is_so = None
        return task.was_so

    def _add_waiting(self, task: Task) -> None:
        task.wakeup = 0
        self._waiting[task] = None
        if task.limit_s is not None:
            self._wake(task, task.limit_s - self.now_s)

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raises an error where a task waits or sleeps."""
        task.interruption = error
        self._wake(task, 0)

    def wake_waiting(self) -> None:
        """Lets all tasks look again at what they wait for."""
        waiting, self._waiting = self._waiting, {}
        for task in waiting:
            self._wake(task, 0)

    def note(self, who: str, what: str) -> None:
        if self._is_traced:
            self.trace.append(f"{self.now_s:9.2f} s  {who:<8} {what}")

    @property
    def current_host(self) -> Host:
        """Host of the task that runs; without one, the first."""
        return self.current.host if self.current else self.hosts[0]

    def _task(self) -> Task:
        task = self.current
        if task is None or task.host.is_dead:
            raise Gone
        return task

    def _wake(self, task: Task, seconds: float) -> None:
        task.wakeup = next(self._numbers)
        event = self.now_s + seconds, self.random.random(), task.wakeup, task
        heapq.heappush(self._events, event)


class Clock:
    """`time` of a module, for the host whose task runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        task = self._world.current
        if task is None:
            return self._world.now_s
        return self._world.now_s * task.host.clock_rate + task.host.clock_offset_s

    time = perf_counter = monotonic

    def time_ns(self) -> int:
        return int(self.monotonic() * 1e9) + next(self._world._numbers)

    def sleep(self, seconds: float) -> None:
        task = self._world.current
        rate = task.host.clock_rate if task else 1.0
        self._world.sleep(seconds / rate)


class Threading:
    """`threading` of a module."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Thread(
        self, target: Callable[..., None], name: str = "thread", daemon: bool = False, args: Sequence[Any] = ()
    ) -> _Thread:
        return _Thread(self._world, name, partial(target, *args) if args else target)

    def Event(self) -> _Event:
        return _Event(self._world)

    def Lock(self) -> _Lock:
        return _Lock(self._world)


class _Thread:
    ident = 0

    def __init__(self, world: World, name: str, target: Callable[[], None]) -> None:
        self._world, self._name, self._target = world, name, target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._world.start(self._world._task().host, self._name, self._target)

    def join(self, timeout: float | None = None) -> None:
        self._world.wait_for(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done


class _Event:
    def __init__(self, world: World) -> None:
        self._world, self._is_set = world, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._world.wake_waiting()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.wait_for(self.is_set, timeout)


class _Lock:
    def __init__(self, world: World) -> None:
        self._world, self._is_taken = world, False

    def __enter__(self) -> None:
        self._world.wait_for(lambda: not self._is_taken)
        self._is_taken = True

    def __exit__(self, *_: object) -> None:
        self._is_taken = False
        self._world.wake_waiting()


@contextlib.contextmanager
def in_place(world: World, *modules: ModuleType) -> Iterator[None]:
    """Gives modules the world's time and threads."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in (("time", Clock(world)), ("threading", Threading(world))):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield
