"""Ranks that freeze, hang, die and lose their network, and the monitor that names those that block the others.

The production code is `Monitor` of each rank in a thread of its own, with the rule for stalls and its reports.
Modeled are the training (steps of parts that end in a collective of all ranks), what a rank sees of another process in
/proc, and the heartbeats' transport: messages of a connection arrive in order, late, or in a burst after an
interruption; a connection that is reset loses some, and others arrive after those of the next one.

Not promised, and left out: which of two ranks is at fault if the network between them is lost; a cause before one
whose rank sends no heartbeat, which is named first.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from simulation.world import Gone, World, in_place

from ringtrain.monitor import diagnosis, heartbeat
from ringtrain.monitor.diagnosis import (
    FIRST_STEPS_S,
    HEARTBEAT_S,
    MIN_WARNING_S,
    REPORT_FIRST_S,
    SILENT_S,
    TIMES_MEDIAN,
    Times,
)
from ringtrain.monitor.heartbeat import Monitor

KINDS = ("freeze", "hang", "die", "cut", "deaf", "reset", "late", "clock", "suspend", "ring")
CHAOS_S, END_S = 100.0, 350.0
CONNECT_S = 2.0
LOOK_S = 5.0
SLACK_S = 20.0
"""to ask for stacks, to be silent, and for other ranks to report first"""
TOLD_S = 3.0
"""in which a heartbeat tells of progress"""
NAMED = re.compile(r"rank (\d+) on \S+ has (?:made no progress|left training)")
ALL_WAIT = "all wait in a collective"
OWN = 0.9
"""fraction of a limit before which a report is too early: ranks measure their idle time by clocks of their own"""


class Rank:
    """A process: its training, which is the `Activity` that its monitor reports, and what disturbs it.

    Attributes:
        faulty_s: Time until which it may be named.
        running_s: Since when its process runs without a pause.
    """

    def __init__(self, run: Run, number: int, machine: str) -> None:
        self.run, self.world, self.number, self.machine = run, run.world, number, machine
        self.process = run.world.host(f"rank{number}")
        self.process.facts["rank"] = self
        self.process.clock_rate = run.world.random.uniform(0.99, 1.01)
        self.faulty_s = self.running_s = self.progress_s = 0.0
        self.hangs_until_s = self.cut_until_s = self.deaf_until_s = 0.0
        self.has_left = False
        self.lost_s = 0.0
        """when others cannot hear of it any more"""
        self.latency_s = 0.005
        self.step, self.phase, self.changes = 0, "start", 0
        self.num_steps = run.num_steps
        self.parts: list[tuple[float, float, float, float]] = []
        self.times = Times()
        self.before = 0.0, "start"
        """time and phase of its progress before the last one"""
        self.monitor: Monitor

    # ---- its activity ------------------------------------------------------------------------------------------------

    def progress(self) -> Any:
        return self.step, self.changes

    def fields(self) -> dict[str, Any]:
        return {"step": self.step, "own_steps": self.step, "phase": self.phase, "times": self.times}

    def enter(self, phase: str) -> None:
        self.before = self.progress_s, self.phase
        self.phase, self.changes = phase, self.changes + 1
        self.progress_s = self.run.progress_s = self.world.now_s
        if not self.is_faulty and not self.run.ranks[0].is_faulty:
            self.run.known_s.append(self.world.now_s)

    def work(self, phase: str, seconds: float) -> float:
        """A part of a step, in which it hangs for as long as it is to."""
        begin_s = self.world.now_s
        self.enter(phase)
        self.world.sleep(seconds)
        while self.hangs_until_s > self.world.now_s:
            self.world.sleep(min(5.0, self.hangs_until_s - self.world.now_s))
        return self.world.now_s - begin_s

    def train(self) -> None:
        run, draw = self.run, self.world.random
        self.monitor = run.make_monitor(self)
        with self.monitor:
            while self.step < self.num_steps:
                first_s = draw.uniform(0, 20) if self.step < 2 else 0.0
                input_s = self.work("input", run.step_s * draw.uniform(0.05, 0.1))
                compute_s = self.work("compute", run.step_s * draw.uniform(0.5, 0.8) + first_s)
                begin_s = self.world.now_s
                self.enter("reduce")
                run.reduce(self.step)
                wait_s = self.world.now_s - begin_s
                self.step += 1
                callbacks_s = self.work("callbacks", run.step_s * draw.uniform(0.01, 0.1))
                self.parts.append((input_s, compute_s, callbacks_s, wait_s))
                self.times = Times.of(self.parts[-diagnosis.WINDOW_STEPS :])
            self.has_left = True
        self.world.note(self.process.name, "has trained")

    # ---- what disturbs it --------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return not self.process.is_dead

    @property
    def blocked_s(self) -> float:
        """Time until which it does not take part in a collective."""
        return max(self.process.frozen_until_s, self.cut_until_s) if self.is_alive else float("inf")

    @property
    def is_faulty(self) -> bool:
        return not self.is_alive or self.has_left or self.world.now_s <= self.faulty_s

    def is_slow(self, seconds: float) -> bool:
        """Whether it has made no progress for so long, and the others wait for it."""
        then_s = self.world.now_s - TOLD_S
        since_s, phase = (self.progress_s, self.phase) if self.progress_s < then_s else self.before
        return phase != "reduce" and then_s > since_s + seconds - TOLD_S

    def disturbed(self, seconds: float) -> None:
        """It may be named meanwhile, and until others have heard of it again."""
        self.lost_s = self.world.now_s
        self.run.forget_untold()
        self.faulty_s = max(self.faulty_s, self.world.now_s + seconds + SILENT_S + 2 * self.latency_s + 4.0)

    def freeze(self, seconds: float) -> None:
        self.running_s = max(self.running_s, self.world.now_s + seconds)
        self.process.freeze(self.running_s - self.world.now_s)
        self.disturbed(seconds)


class Link:
    """A connection of a rank to rank 0, with the messages that are under way."""

    def __init__(self, near: Wire, far: Wire) -> None:
        self.ends = (near, far)
        self.is_open = True
        self._last_s = [0.0, 0.0]

    def send(self, sender: Wire, message: Any) -> None:
        side = self.ends.index(sender)
        receiver, world = self.ends[1 - side], sender.world
        ranks = [end.rank for end in self.ends]
        latency_s = world.random.uniform(0.5, 1.0) * max(rank.latency_s for rank in ranks)
        arrival_s = max(self._last_s[side], world.now_s + latency_s)
        self._last_s[side] = arrival_s
        world.at(arrival_s, lambda: self._arrive(side, receiver, message))

    def _arrive(self, side: int, receiver: Wire, message: Any) -> None:
        world = receiver.world
        blocked_s = _blocked_s(*[end.rank for end in self.ends])
        if not receiver.rank.is_alive:
            return
        if not self.is_open and world.random.random() < 0.5:
            return  # lost with the connection
        if blocked_s > world.now_s:
            if self.is_open:
                # TCP sends again after times that double.
                again_s = max(self._last_s[side], blocked_s + world.random.uniform(0, 2.0))
                self._last_s[side] = receiver.run.delayed_s = again_s
                world.at(again_s, lambda: self._arrive(side, receiver, message))
            return
        receiver.received.append(message)


def _blocked_s(*ranks: Rank) -> float:
    """Time until which no heartbeat passes between two ranks."""
    blocked_s = max(rank.deaf_until_s for rank in ranks)
    if len({rank.machine for rank in ranks}) > 1:
        blocked_s = max(blocked_s, *(rank.cut_until_s for rank in ranks))
    return blocked_s


class Wire:
    """`transport.Wire`."""

    def __init__(self, run: Run, token: str, listens: bool = False) -> None:
        self.run, self.world, self.token = run, run.world, token
        self.rank: Rank = run.current
        self.port = 1
        self.links: list[Link] = []
        self.received: list[Any] = []
        if listens:
            run.listener = self

    @property
    def is_connected(self) -> bool:
        return any(link.is_open for link in self.links)

    def connect(self, addresses: Sequence[str], port: int, message: Any) -> bool:
        first = self.run.listener
        if _blocked_s(self.rank, first.rank) > self.world.now_s:
            self.world.sleep(CONNECT_S)
            return False
        self.world.sleep(self.rank.latency_s)
        if not first.rank.is_alive or first.rank.process.frozen_until_s > self.world.now_s:
            self.world.sleep(CONNECT_S)
            return False
        link = Link(self, first)
        self.links.append(link)
        first.links.append(link)
        link.send(self, message)
        return True

    def exchange(self, message: Any, seconds: float) -> list[Any]:
        for link in self.links:
            if link.is_open:
                link.send(self, message)
        self.world.sleep(seconds)
        received, self.received = self.received, []
        return received

    def wake(self) -> None: ...

    def close(self) -> None:
        for link in self.links:
            link.is_open = False


class Run:
    """A job of some ranks.

    Attributes:
        violation: What did not hold, first.
        progress_s: When any rank has made progress last.
    """

    def __init__(self, world: World) -> None:
        draw = world.random
        self.world, self.violation = world, ""
        self.timeout_s = draw.choice([5.0, 20.0, 60.0])
        self.step_s, self.num_steps = draw.choice([0.5, 2.0, 6.0]), 200
        self.progress_s = 0.0
        self.suspended: list[tuple[float, float]] = []
        """times in which no process runs, which do not count, except for a heartbeat's interval"""
        self.known_s = [0.0]
        """times of progress of which heartbeats tell at once"""
        self.delayed_s = 0.0
        """when a heartbeat has arrived that an interruption has delayed: what it tells counts as new"""
        self.ring_until_s = 0.0
        self.listener: Wire
        self.ranks: list[Rank] = []
        num_machines = draw.randint(1, 3)
        for number in range(draw.randint(2, 5)):
            self.ranks.append(Rank(self, number, f"host{number % num_machines}"))
        self.first: Any = None
        """what rank 0's monitor sends to all"""
        self.reported_s, self.is_reported_by_rank_0 = float("inf"), False
        self._arrived: dict[int, int] = {}
        self._reduced: set[int] = set()

    @property
    def current(self) -> Rank:
        rank: Rank = self.world.current_host.facts["rank"]
        return rank

    def start(self) -> None:
        for rank in self.ranks:
            self.world.start(rank.process, rank.process.name, rank.train)
        self.world.at(LOOK_S, self._look)

    def make_monitor(self, rank: Rank) -> Monitor:
        def broadcast(value: Any) -> Any:
            if rank.number == 0:
                self.first = value
                self.world.wake_waiting()
            self.world.wait_for(lambda: self.first is not None)
            return self.first

        size = len(self.ranks)
        return Monitor(rank.number, size, rank, self.timeout_s, broadcast, descriptor=rank.number)

    def reduce(self, step: int) -> None:
        """A collective of all ranks."""
        self._arrived[step] = self._arrived.get(step, 0) + 1
        if self._arrived[step] == len(self.ranks):
            self._complete(step)
        self.world.wait_for(lambda: step in self._reduced)

    def _complete(self, step: int) -> None:
        blocked_s = max(self.ring_until_s, *(rank.blocked_s for rank in self.ranks))
        if blocked_s == float("inf"):
            return
        if blocked_s > self.world.now_s:
            self.world.at(blocked_s + self.world.random.uniform(0, 2.0), lambda: self._complete(step))
            return
        self._reduced.add(step)
        self.world.wake_waiting()

    # ---- faults ------------------------------------------------------------------------------------------------------

    def forget_untold(self) -> None:
        """Drops progress of which no heartbeat may have told yet."""
        while len(self.known_s) > 1 and self.known_s[-1] > self.world.now_s - TOLD_S:
            self.known_s.pop()

    def disturb(self, kind: str) -> None:
        draw, now_s = self.world.random, self.world.now_s
        rank = draw.choice(self.ranks)
        seconds = draw.choice([2.0, 10.0, 40.0, 200.0]) * draw.uniform(0.5, 1.0)
        if not rank.is_alive or self.reported_s < float("inf"):
            return
        self.world.note(rank.process.name, f"{kind} for {seconds:.0f} s")
        if kind == "freeze":
            rank.freeze(seconds)
        elif kind == "hang":
            rank.hangs_until_s = now_s + seconds
            rank.disturbed(seconds + 2 * self.step_s)
        elif kind == "die":
            rank.process.die()
            rank.disturbed(END_S)
        elif kind == "clock":
            rank.process.clock_offset_s += seconds * draw.choice([1, 50])
        elif kind == "suspend":
            before_s = max([now_s, *(end_s for _, end_s in self.suspended)])  # a time counts once
            self.suspended.append((before_s, max(before_s, now_s + seconds)))
            for one in self.ranks:
                one.freeze(seconds)
        elif kind == "ring":
            self.ring_until_s = now_s + seconds
        else:
            self._disturb_network(rank, kind, seconds)

    def _disturb_network(self, rank: Rank, kind: str, seconds: float) -> None:
        until_s = self.world.now_s + seconds
        if kind == "cut":
            for one in self.ranks if len({one.machine for one in self.ranks}) > 1 else ():
                if one.machine == rank.machine:
                    one.cut_until_s = max(one.cut_until_s, until_s)
                    one.disturbed(seconds + 4.0)
        elif kind == "deaf":
            rank.deaf_until_s = max(rank.deaf_until_s, until_s)
            rank.disturbed(seconds + 4.0)
        elif kind == "reset":
            for link in self.listener.links:
                if rank in [end.rank for end in link.ends]:
                    link.is_open = False
            rank.disturbed(0.0)
        else:
            rank.latency_s = self.world.random.choice([1.0, 6.0])
            rank.disturbed(END_S)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def limit_s(self, median_s: float) -> float:
        """Seconds without progress after which the job ends, as docs/troubleshooting.md has it."""
        if max(rank.step for rank in self.ranks) < 2:
            return max(self.timeout_s, FIRST_STEPS_S)
        return max(self.timeout_s, TIMES_MEDIAN * median_s)

    def warning_s(self, median_s: float) -> float:
        return min(self.limit_s(median_s) / 2, max(MIN_WARNING_S, TIMES_MEDIAN * median_s))

    def _medians_s(self) -> list[float]:
        """Median steps of the ranks that live, of which some may have had one step more."""
        steps = [map(sum, rank.parts) for rank in self.ranks if rank.is_alive and rank.parts]
        return [statistics.median(step_s) for step_s in steps] or [0.0]

    def on_print(self, text: str) -> None:
        self.world.note(self.current.process.name, f"prints: {text}")
        if "no longer monitored" in text:
            self.violated(text)
        elif "cannot connect" not in text and "blocks" not in text and self.reported_s == float("inf"):
            self._check_named(text, self.warning_s(min(self._medians_s())), "a warning")

    def on_report(self, error: BaseException, rank: int) -> None:
        """A rank reports a stall to the launcher, which takes the first report."""
        self.world.note(self.current.process.name, f"ends the job: {error}")
        is_told = self.is_reported_by_rank_0 and self._is_told(self.current)
        if is_told and max(rank.latency_s for rank in self.ranks) < SILENT_S / 2:
            self.violated(f"rank {self.current.number} reports, too: {error}")
        if self.reported_s == float("inf"):
            self.is_reported_by_rank_0 = self.current.number == 0
            self.reported_s = self.world.now_s
            self._check_named(str(error), self.limit_s(min(self._medians_s())), "a report")
            if self.is_reported_by_rank_0:
                latest_s = self.world.now_s + REPORT_FIRST_S + max(rank.latency_s for rank in self.ranks)
                self.world.at(latest_s + SILENT_S, self._check_ended)

    def _check_named(self, text: str, limit_s: float, what: str) -> None:
        """Only ranks that are disturbed are named, and only if none has made progress for long enough."""
        now_s = self.world.now_s
        least_s = OWN * limit_s - TOLD_S
        named = [self.ranks[int(number)] for number in NAMED.findall(text)]
        faulty = [rank for rank in self.ranks if rank.is_faulty or rank.is_slow(least_s)]
        before_s = max(time_s for time_s in self.known_s if time_s <= max(0.0, now_s - TOLD_S))
        if self.current.number:
            before_s = min(before_s, self.current.progress_s)  # it hears of no other rank
        lengths_s = [end_s - begin_s for begin_s, end_s in self.suspended if begin_s >= before_s]
        suspended_s = sum(max(0.0, length_s - HEARTBEAT_S) for length_s in lengths_s)
        if now_s - TOLD_S - before_s - suspended_s < least_s:
            self.violated(f"{what} after {now_s - before_s:.1f} s without progress, not {limit_s:.0f}: {text}")
        wrong = [rank.number for rank in named if rank not in faulty]
        is_cut = self.current.cut_until_s > now_s - SILENT_S or self.current.is_faulty
        if wrong and not is_cut:
            self.violated(f"{what} names ranks {wrong}, which nothing has disturbed: {text}")
        hanging = [rank for rank in faulty if rank.hangs_until_s > now_s or rank.process.is_dead]
        if not named and hanging and ALL_WAIT in text:
            self.violated(f"{what} names none, but rank {hanging[0].number} blocks the others")
        if len(faulty) == 1 and named and named[0] is not faulty[0] and not is_cut:
            self.violated(f"{what} names rank {named[0].number} first, not {faulty[0].number}: {text}")

    def _look(self) -> None:
        """A stall is reported in time, by rank 0 or, if it is lost, by another one."""
        now_s = self.world.now_s
        if self.reported_s == float("inf") and not self.violation:
            self.world.at(now_s + LOOK_S, self._look)
            first = self.ranks[0]
            # The time in which a rank was frozen is none of its idle time.
            thawed_s = [rank.running_s for rank in self.ranks if rank.running_s <= now_s]
            for rank in self.ranks[:2]:
                since_s = max(self.progress_s, self.delayed_s, rank.running_s, *thawed_s)
                if rank.number and first.is_alive and first.process.frozen_until_s <= now_s:
                    continue
                if rank.number:
                    since_s = max(since_s, first.lost_s)
                idle_s = now_s - since_s
                if rank.is_alive and not rank.has_left and idle_s > self.timeout_s and idle_s > self._latest_s():
                    self.violated(f"no report after {idle_s:.0f} s without progress")

    def _latest_s(self) -> float:
        """Seconds without progress after which a report is too late."""
        return self.limit_s(max(self._medians_s())) * (2 - OWN) + SLACK_S

    def _is_told(self, rank: Rank) -> bool:
        """Whether a rank hears of rank 0's report."""
        return not rank.is_faulty and _blocked_s(rank, self.ranks[0]) <= self.reported_s

    def _check_ended(self) -> None:
        for rank in self.ranks:
            if self._is_told(rank):
                self.violated(f"rank {rank.number} has not ended after the report of a stall")

    def violated(self, what: str) -> None:
        self.world.note("", f"VIOLATED: {what}")
        self.violation = self.violation or what


def disturb(run: Run, kinds: Sequence[str] = KINDS) -> None:
    """Draws what disturbs which ranks."""
    draw = run.world.random
    chosen = draw.sample(kinds, draw.randint(1, min(3, len(kinds))))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        run.world.at(draw.uniform(5.0, CHAOS_S), lambda: run.disturb(draw.choice(chosen)))


def simulate(seed: int, is_traced: bool = False, directed: Callable[[Run], None] = disturb) -> Run:
    """Runs one schedule, to the report of a stall or for a while."""
    world = World(seed, is_traced)
    run = Run(world)
    with _of_production(run):
        directed(run)
        run.start()
        while world.now_s < END_S and world.now_s < run.reported_s + 2 * REPORT_FIRST_S + LOOK_S:
            until_s = world.now_s + LOOK_S
            world.run(until_s)
            world.now_s = max(world.now_s, until_s)
        for task in world.tasks:
            if task.error:
                run.violated(f"{task.name}: {task.error!r}")
        world.end()
    return run


@contextlib.contextmanager
def _of_production(run: Run) -> Iterator[None]:
    """Gives the tested module the simulated time, network and processes."""
    world = run.world

    def leave() -> None:
        world.note(world.current_host.name, "exits")
        world.current_host.die()
        raise Gone

    def look_at(process: int, descriptor: int) -> dict[str, Any]:
        rank = run.ranks[descriptor]
        if not rank.is_alive:
            return {"state": ""}
        is_frozen = rank.process.frozen_until_s > world.now_s
        return {"state": "T" if is_frozen else "S", "step": rank.step, "phase": rank.phase}

    transport = SimpleNamespace(
        Wire=lambda *args, **named: Wire(run, *args, **named), own_addresses=lambda: ["10.0.0.1"]
    )
    reports = SimpleNamespace(report_failure=lambda error, rank, **_: run.on_report(error, rank))
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place(world, heartbeat))
        for name, value in [
            ("transport", transport),
            ("failures", reports),
            ("status", SimpleNamespace(look_at=look_at)),
            ("socket", SimpleNamespace(gethostname=lambda: run.current.machine)),
            ("os", SimpleNamespace(getpid=lambda: run.current.number)),
            ("stacks", lambda number: "in a stack"),
            ("_print", run.on_print),
            ("_exit", leave),
        ]:
            stack.enter_context(mock.patch.object(heartbeat, name, value))
        yield
