"""Hosts of a job in virtual time: ssh, host agents, mpirun and ranks, as the launcher sees them.

These are models by observed behavior, not the programs themselves:

- ssh connects in time or late, or is refused; it gives up a silent connection
  after 15 s (mpirun's own after 8 s). TCP keeps the order of data, and sends it again after an interruption.
- The host agent says and takes the lines of the script in host_agent.py. It cleans up at "end", at the end of its
  input, and without an order for LEASE_S. Processes die at once or within half a second; launchers have PATIENCE_S.
- mpirun starts a daemon on each host, and the ranks once all daemons have answered. It names the first rank that fails,
  gives the others SIGTERM and the grace, and exits with that rank's code. It hangs, or loses a host: then it exits with
  205, or with 0 as Open MPI 5 does. Where it is killed, its daemons end their ranks, or leave them.
- A rank reports its placement and its failure by the production code of ringtrain.protocol.failures. If another one
  fails, it may fail by a follow-up error, which may arrive first.
"""

from __future__ import annotations

import itertools
import os
import re
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from simulation.world import World

from ringtrain.cluster.host_agent import ALIVE_COUNT, ALIVE_S, BEAT_S, LEASE_S, PATIENCE_S, SAYS
from ringtrain.cluster.job import Job
from ringtrain.protocol.env import MARK
from ringtrain.protocol.failures import Failure

KEEP_ALIVE_S = ALIVE_S * ALIVE_COUNT
MPIRUN_KEEP_ALIVE_S = 8.0
SWEEP_S = 3 * PATIENCE_S
FOLLOW_UP = "UnknownError: {{function_node __wrapped__HorovodAllreduce}} Horovod has been shut down."
EXITED = (
    "{line}\nmpirun detected that one or more processes exited\n\n  Process name: [[12481,1],{rank}]\n"
    "  Exit code:    {code}\n{line}\n"
)
KILLED = (
    "{line}\nmpirun noticed that process rank {rank} with PID 0 on node {host} exited on signal {number} (Killed).\n"
    "{line}\n"
)
LOST = "ORTE has lost communication with a remote daemon.\n\n  Remote daemon: [[12481,0],1] on node {host}\n"
LINE = "-" * 60


class Machine:
    """A host: its network to the launcher's, its ranks and its agents."""

    def __init__(self, cluster: Cluster, name: str, slots: int) -> None:
        self.cluster, self.world, self.name, self.slots = cluster, cluster.world, name, slots
        self.host = self.world.host(name)
        self.latency_s = self.world.random.uniform(0.001, 0.05)
        self.cut_until_s = {"to": 0.0, "from": 0.0}
        """by direction, as seen from the launcher"""
        self.boot = 0
        self.trouble_s = -1e9
        """until when it was last not reachable"""
        self.trouble_began_s = -1e9
        self.ranks: list[Rank] = []
        self.agents: list[Agent] = []
        self.was_out_of_memory = False
        self.lost_agent_s = float("inf")
        """when its agent was killed, its connection dropped, or a daemon of the job killed"""

    @property
    def blocked_until_s(self) -> float:
        return float("inf") if self.host.is_dead else max(self.host.frozen_until_s, *self.cut_until_s.values())

    @property
    def is_reachable(self) -> bool:
        return self.blocked_until_s <= self.world.now_s

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """An action of one of its processes: later if it is frozen, never if it has died."""
        self.world.at(self.world.now_s + seconds, partial(self._act, self.boot, action))

    def _act(self, boot: int, action: Callable[[], None]) -> None:
        if self.host.is_dead or self.boot != boot:
            return
        if self.host.frozen_until_s > self.world.now_s:
            self.world.at(self.host.frozen_until_s, partial(self._act, boot, action))
        else:
            action()

    # ---- faults ------------------------------------------------------------------------------------------------------

    def die(self) -> None:
        self.host.die()
        self._in_trouble()
        for rank in self.ranks:
            rank.is_alive = False
        self.ranks.clear()
        self.agents.clear()

    def come_back(self) -> None:
        """Boots again: what ran on it is gone, and its old connections are reset."""
        self.note("is back")
        self.trouble_s = self.world.now_s
        self.host.is_dead, self.boot = False, self.boot + 1
        for ssh in self.cluster.processes:
            if isinstance(ssh, Ssh) and ssh.machine is self and ssh.agent and ssh.returncode is None:
                self.world.at(self.world.now_s + self.world.random.uniform(0, 3), ssh.reset)

    def freeze(self, seconds: float) -> None:
        self.host.freeze(max(seconds, self.host.frozen_until_s - self.world.now_s))
        self._in_trouble()

    def cut(self, directions: Sequence[str], seconds: float) -> None:
        self.note(f"has no network {' and '.join(directions)} the launcher for {seconds:.0f} s")
        for direction in directions:
            self.cut_until_s[direction] = max(self.cut_until_s[direction], self.world.now_s + seconds)
        self._in_trouble()

    def _in_trouble(self) -> None:
        """Lets those that are connected to it give up, if it lasts."""
        if self.trouble_s < self.world.now_s:
            self.trouble_began_s = self.world.now_s
        self.trouble_s = max(self.trouble_s, min(self.blocked_until_s, 1e9))
        if self is not self.cluster.here:
            self.cluster.count_on_silence(self)

    def note(self, what: str) -> None:
        self.world.note(self.name, what)


class Stream:
    """One direction of a TCP connection: what is put in arrives in order, after an interruption later."""

    def __init__(self, machine: Machine, direction: str, take: Callable[[Any], None]) -> None:
        self._machine, self._direction, self._take = machine, direction, take
        self._items: deque[tuple[float, Any]] = deque()
        self._boot = machine.boot
        self._is_remote = machine is not machine.cluster.here

    def put(self, item: Any) -> None:
        self._items.append((self._machine.world.now_s + (self._machine.latency_s if self._is_remote else 0.0), item))
        if len(self._items) == 1:
            self._machine.world.at(self._items[0][0], self._arrive)

    def _arrive(self) -> None:
        machine, now_s = self._machine, self._machine.world.now_s
        if machine.host.is_dead or machine.boot != self._boot:
            return
        blocked_s = machine.host.frozen_until_s
        if self._is_remote:
            blocked_s = max(blocked_s, machine.cut_until_s[self._direction])
        if self._direction == "from":  # the launcher's own host takes it
            blocked_s = max(blocked_s, machine.cluster.here.host.frozen_until_s)
        if blocked_s > now_s:
            # TCP sends again after times that double.
            again_s = machine.world.random.uniform(0, (blocked_s - now_s) / 2) if self._is_remote else 0.0
            machine.world.at(blocked_s + again_s, self._arrive)
            return
        while self._items and self._items[0][0] <= now_s:
            self._take(self._items.popleft()[1])
        if self._items:
            machine.world.at(self._items[0][0], self._arrive)


class Pipe:
    """A pipe of the launcher to or from a process that it has started."""

    def __init__(self, cluster: Cluster, write: Callable[[bytes], None] | None = None) -> None:
        self.cluster, self.write = cluster, write
        self.number = next(cluster.numbers)
        self.data = bytearray()
        self.is_at_end = False
        self.selector: Selector | None = None
        cluster.pipes[self.number] = self

    def fileno(self) -> int:
        return self.number

    def put(self, data: bytes) -> None:
        self.data += data
        self._wake()

    def end(self) -> None:
        self.is_at_end = True
        self._wake()

    def _wake(self) -> None:
        if self.selector:
            self.selector.ready[self.number] = None
            self.cluster.world.wake_waiting()

    def close(self) -> None:
        self.cluster.pipes.pop(self.number, None)


class Selector:
    """`selectors.DefaultSelector`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._keys: dict[int, Any] = {}
        self.ready: dict[int, None] = {}

    def register(self, pipe: Pipe, events: int, data: Any) -> None:
        self._keys[pipe.number] = SimpleNamespace(fd=pipe.number, fileobj=pipe, data=data)
        pipe.selector = self
        if pipe.data or pipe.is_at_end:
            self.ready[pipe.number] = None

    def unregister(self, pipe: Pipe) -> None:
        del self._keys[pipe.number]
        self.ready.pop(pipe.number, None)
        pipe.selector = None

    def select(self, timeout: float) -> list[tuple[Any, int]]:
        self._cluster.world.wait_for(lambda: bool(self.ready), timeout)
        return [(self._keys[number], selectors.EVENT_READ) for number in self.ready]


class Process:
    """`subprocess.Popen` of a process on the launcher's host."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.returncode: int | None = None
        self.stdin = Pipe(cluster, self._input)
        self.stdout = self.stderr = Pipe(cluster)
        cluster.processes.append(self)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.world.wait_for(lambda: self.returncode is not None, timeout):
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        if self.returncode is None:
            self.exit(-signal.SIGKILL)

    def terminate(self) -> None:
        if self.returncode is None:
            self.exit(-signal.SIGTERM)

    def exit(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self.stdout.end()
            self.world.wake_waiting()

    def input_ends(self) -> None:
        """The launcher has closed its end of the pipe, or died."""

    def _input(self, data: bytes) -> None:
        raise BrokenPipeError


class Ssh(Process):
    """The process of a host agent: ssh to another host, or on this one the agent itself."""

    def __init__(self, cluster: Cluster, machine: Machine, job: Job, timeout_s: float) -> None:
        super().__init__(cluster)
        self.job = job
        self.machine = machine
        self.agent: Agent | None = None
        self.down = Stream(machine, "to", self._to_agent)
        self.up = Stream(machine, "from", self._from_agent)
        self._early: list[str | None] = []
        self.is_local = machine is cluster.here
        began_s = self.world.now_s
        if self.is_local:
            self._started()
            return
        draw = self.world.random
        after_s = draw.uniform(0.05, 1.0)
        refusal = ""
        if draw.random() < cluster.late_rate:
            after_s = draw.uniform(1.0, 1.2 * timeout_s)
        elif draw.random() < cluster.refused_rate:
            refusal = f"ssh: connect to host {machine.name} port 22: Connection refused"
        after_s = cluster.connect_s.get(machine.name, after_s)
        cluster.had_trouble_to_connect |= {machine.name} if refusal or after_s > 1.0 else set()
        self._connect(after_s, refusal, began_s + int(timeout_s))

    def _connect(self, after_s: float, refusal: str, until_s: float) -> None:
        def arrive() -> None:
            if self.returncode is not None:
                return
            blocked_s = self.machine.blocked_until_s
            if blocked_s > self.world.now_s:  # tries again, once the machine answers
                self.cluster.had_trouble_to_connect.add(self.machine.name)
                self.world.at(min(blocked_s + 0.5, until_s), arrive if blocked_s + 0.5 < until_s else give_up)
            elif refusal:
                self._fail(refusal)
            elif self.world.now_s > until_s:
                give_up()
            else:
                self._started()

        def give_up() -> None:
            if self.returncode is None and not self.agent:
                self._fail(f"ssh: connect to host {self.machine.name} port 22: Connection timed out")

        self.world.at(self.world.now_s + after_s, arrive)

    def _started(self) -> None:
        self.agent = Agent(self)
        self._boot = self.machine.boot
        for order in self._early:
            self.down.put(order)

    def _input(self, data: bytes) -> None:
        if self.returncode is not None:
            raise BrokenPipeError
        for order in data.decode().splitlines():
            if self.agent:
                self.down.put(order)
            else:
                self._early.append(order)

    def exit(self, code: int) -> None:
        was_running = self.returncode is None
        super().exit(code)
        if was_running and self.agent:
            self.down.put(None)

    def input_ends(self) -> None:
        if self.returncode is None and self.agent:
            self.down.put(None)
        elif self.returncode is None:
            self._early.append(None)

    def _to_agent(self, order: str | None) -> None:
        if self.agent and self.agent.is_alive:
            self.agent.take(order)

    def _from_agent(self, item: str | int) -> None:
        if self.returncode is not None:
            return
        if isinstance(item, int):
            self.exit(item)
        else:
            self.stdout.put(f"{item}\n".encode())

    def _fail(self, why: str) -> None:
        if self.returncode is None:
            self.cluster.could_not_connect |= set() if self.agent else {self.machine.name}
            self.machine.note(why)
            self.stdout.put(f"{why}\n".encode())
            self.exit(255)

    def reset(self) -> None:
        self._fail("client_loop: send disconnect: Broken pipe")

    def give_up(self) -> None:
        self._fail(f"Timeout, server {self.machine.name} not responding.")


class Agent:
    """The host agent's script on a host."""

    def __init__(self, ssh: Ssh) -> None:
        self.ssh, self.machine, self.cluster = ssh, ssh.machine, ssh.cluster
        self.job = ssh.job
        self.is_alive, self.is_ready, self.is_sweeping, self.is_busy = True, False, False, False
        self._orders: deque[str | None] = deque()
        self._num_waits = 0
        self.machine.agents.append(self)
        self.machine.later(self.machine.world.random.uniform(0.02, 0.3), self._ready)

    def _ready(self) -> None:
        if self.is_alive:
            self._say("networks 10.0.0.1/8")
            self._say(f"ready {self.machine.name} ")
            self.is_ready = True
            self._next()

    def _say(self, text: str) -> None:
        self.ssh.up.put(f"{SAYS}{text}")

    def take(self, order: str | None) -> None:
        self._orders.append(order)
        if self.is_ready and not self.is_busy:
            self._next()

    def _next(self) -> None:
        """Takes orders, and waits for the next one for LEASE_S."""
        while self._orders and self.is_alive and not self.is_sweeping:
            order = self._orders.popleft()
            if order is None or order.startswith("end"):
                self.sweep(order or "end of input")
            elif order != "beat":
                self._signal(order)
        self._num_waits += 1
        if self.is_alive and not self.is_sweeping and not self.is_busy:
            self.machine.later(LEASE_S, partial(self._expire, self._num_waits))

    def _expire(self, number: int) -> None:
        if self.is_alive and not self.is_sweeping and not self.is_busy and number == self._num_waits:
            self.sweep(f"no heartbeat for {LEASE_S} s")

    def _signal(self, order: str) -> None:
        _, number, *pairs = order.split()

        def act() -> None:
            meant = []
            for rank in list(self.machine.ranks):
                if any(pair.endswith(f":{rank.pid}") for pair in pairs) and rank.job.id == self.job.id:
                    meant.append(rank)
            catching = [rank for rank in meant if rank.catches(int(number))]
            for rank in catching:
                rank.signal(int(number), by_launcher=True)
            if meant:
                self._say(f"taken {len(catching)}")
            self.is_busy = False
            self._next()

        self.is_busy = True
        self.machine.later(self.machine.world.random.uniform(0.01, 0.3), lambda: act() if self.is_alive else None)

    def sweep(self, why: str) -> None:
        self.is_sweeping = True
        if self.machine.ranks or why != "end":
            self.machine.note(f"agent cleans up: {why}")
        self._began_s = self.machine.world.now_s
        self._least_s = 0.0 if why == "end" else self.machine.world.random.uniform(1.5, 2.0) * PATIENCE_S
        self._sweep()

    def _sweep(self) -> None:
        if not self.is_alive:
            return
        world = self.machine.world
        waited_s = world.now_s - self._began_s
        first = [rank for rank in self.machine.ranks if rank.job.id == self.job.id]
        mpirun = self.cluster.mpirun_of(self.job) if self.ssh.is_local else None
        then = [mpirun] if mpirun else []
        if not (first or then or waited_s < self._least_s) or waited_s >= SWEEP_S:
            self._end()
            return
        for rank in first:
            rank.kill_soon()
        if waited_s >= PATIENCE_S:
            for process in then:
                process.kill()
        self.machine.later(0.1, self._sweep)

    def _end(self) -> None:
        for number, step in self.cluster.boxes(self.job, self.machine):
            self._say(f"box {number} {step} train")
        if self.machine.was_out_of_memory:
            self._say("memory")
        self._say("swept")
        self.machine.note("has cleaned up")
        self.die(0)

    def die(self, code: int) -> None:
        """Exits; ssh then exits as well."""
        self.is_alive = False
        if self in self.machine.agents:
            self.machine.agents.remove(self)
        self.ssh.up.put(code)


class Rank:
    """A rank's process."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        self.daemon, self.machine, self.number = daemon, daemon.machine, number
        self.cluster, self.job, self.mpirun = daemon.mpirun.cluster, daemon.mpirun.job, daemon.mpirun
        self.pid = next(self.cluster.numbers)
        self.is_alive, self.is_started, self.is_hanging = True, False, False
        """It stands by."""
        self.exit_code: int | None = None
        self.failure = ""
        """how it failed by itself, not because of another"""
        self.failed_s = self.told_s = float("inf")
        self.step = -1
        self.started_s = self.began_s = self.machine.world.now_s
        self._is_dying = False
        self.is_late = self._is_late()
        self.machine.ranks.append(self)
        self.machine.note(f"rank {number} starts")
        self.cluster.on_rank_start(self)

    def _is_late(self) -> bool:
        """Whether it starts after the agents have cleaned up and gone. The launcher cannot prevent this.

        Its order reached its host after an interruption, when mpirun had ended; or the launching host was frozen for
        longer than the agents wait, while mpirun started ranks.
        """
        here = self.cluster.here
        was_frozen = here.trouble_s - here.trouble_began_s > LEASE_S - BEAT_S
        if was_frozen and self.started_s < here.trouble_s + LEASE_S:
            return True
        return self.mpirun.returncode is not None and self.started_s > self.machine.trouble_s > self.mpirun.launch_s

    def catches(self, number: int) -> bool:
        return self.cluster.program.catches and self.is_started and not self.is_hanging

    def begin(self) -> None:
        if not self.is_alive:
            return
        fault = self.cluster.starting_fault(self)
        if fault == "hangs":
            self.failure, self.is_hanging = "hangs while it starts", True
            self.failed_s = self.machine.world.now_s
        elif fault:
            self.fail(fault, int(fault.split()[-1]))
        else:
            self._report_placement()
            self._work()

    def _report_placement(self) -> None:
        size, host = self.job.num_ranks, self.machine.name
        self.say(f"{MARK}:{self.job.id}:seat:{self.number}:{size}::{self.pid}:{host}")

    def _work(self) -> None:
        world = self.machine.world
        self.is_started, self.step, self.began_s = True, 0, world.now_s
        self.cluster.on_work(self)
        self.machine.later(self.mpirun.work_s + world.random.uniform(0, 1), self._finish)

    def _finish(self) -> None:
        if self.is_alive and not self.is_hanging and not self.mpirun.is_broken:
            self.step = 100
            self.end(0)

    def say(self, line: str) -> None:
        if self.daemon.is_alive:
            self.daemon.up.put(("line", self.number, line))

    def report(self, kind: str, text: str, code: int) -> None:
        failure = Failure(self.number, self.machine.name, self.machine.world.now_s, kind, f"{kind}: {text}", code)
        for line in failure.lines(self.job.id):
            self.say(line)

    def signal(self, number: int, by_launcher: bool = False) -> None:
        """SIGTERM and the like."""
        if not self.is_alive:
            return
        if by_launcher:
            self.told_s = min(self.told_s, self.machine.world.now_s)
        if self.catches(number):
            self.machine.later(self.cluster.program.save_s, lambda: self.end(128 + number))
        elif not self.cluster.program.ignores:
            self.end(-number)

    def kill_soon(self) -> None:
        if not self._is_dying:
            self._is_dying = True
            self.cluster.on_kill(self)
            slow_s = self.machine.world.random.choice([0.0, 0.0, 0.05, 0.5])
            self.machine.later(slow_s, lambda: self.end(-signal.SIGKILL))

    def fail(self, how: str, code: int) -> None:
        """Fails by itself."""
        if self.is_alive:
            self.machine.note(f"rank {self.number} fails: {how}")
            self.failure, self.failed_s = how, self.machine.world.now_s
            self.end(code)

    def end(self, code: int) -> None:
        if not self.is_alive:
            return
        self.is_alive, self.exit_code = False, code
        if code == 0:
            self.failure = ""  # it was about to save and exit, and had completed before
        self.machine.ranks.remove(self)
        if code and not self.failure:
            self.mpirun.is_broken = True
        if self.failure:
            self.failed_s = self.machine.world.now_s
            self.mpirun.follow_up(self)
        if self.daemon.is_alive:
            self.daemon.up.put(("ended", self.number, code))


class Daemon:
    """mpirun's daemon on a host."""

    def __init__(self, mpirun: Mpirun, machine: Machine, numbers: Sequence[int]) -> None:
        self.mpirun, self.machine, self.numbers = mpirun, machine, numbers
        self.is_alive = False
        self.is_connected = False
        self.up = Stream(machine, "from", lambda item: mpirun.take(self, *item))
        self.down = Stream(machine, "to", self._take)

    def start(self) -> None:
        self.is_alive = True
        self.up.put(("connected", 0, 0))

    def _take(self, order: str) -> None:
        if not self.is_alive:
            return
        world = self.machine.world
        if order == "launch" and self.machine is self.mpirun.cluster.here and self.mpirun.returncode is not None:
            return  # mpirun itself starts the ranks of its host
        if order == "launch":
            for number in self.numbers:
                rank = Rank(self, number)
                self.mpirun.ranks[number] = rank
                self.machine.later(world.random.uniform(0.05, self.mpirun.spread_s), rank.begin)
        else:
            for rank in self.ranks():
                rank.signal(signal.SIGTERM)
                if order == "kill":
                    self.machine.later(self.mpirun.job.grace_s, rank.kill_soon)
            if order == "lost":
                self.is_alive = False
                for rank in self.ranks():
                    rank.kill_soon()

    def ranks(self) -> list[Rank]:
        return [rank for rank in self.machine.ranks if rank.daemon is self]


class Mpirun(Process):
    """mpirun of one attempt."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        super().__init__(cluster)
        draw = self.world.random
        self.job, self.index = job, len(cluster.attempts)
        self.ranks: dict[int, Rank] = {}
        self.is_broken = False
        self.first_failed = -1
        self.code = 0
        self.work_s = cluster.work_s or draw.choice([3.0, 20.0, 60.0, 200.0])
        self.spread_s = draw.choice([0.2, 1.0, 5.0])
        self.hangs_at_failure = draw.random() < cluster.hang_rate
        self.daemons: list[Daemon] = []
        self.ended: set[int] = set()
        self.lost: list[Machine] = []
        self.launch_s = -1.0
        self.index = len(self.cluster.attempts)
        self.cluster.mpirun = self
        self.cluster.attempts.append(self)
        numbers = iter(range(job.num_ranks))
        for host in job.hosts:
            machine = cluster.machines[host.name]
            daemon = Daemon(self, machine, list(itertools.islice(numbers, host.slots)))
            self.daemons.append(daemon)
            self._start(daemon, self.world.now_s + draw.uniform(0.05, 1.5), self.world.now_s + 10.0)

    def _start(self, daemon: Daemon, time_s: float, until_s: float) -> None:
        def arrive() -> None:
            machine = daemon.machine
            if self.returncode is not None:
                return
            if machine.blocked_until_s > self.world.now_s and machine is not self.cluster.here:
                if self.world.now_s > until_s:
                    self.stderr.put(b"ORTE was unable to reliably start one or more daemons.\n")
                    self.exit(1)
                else:
                    self._start(daemon, self.world.now_s + 1.0, until_s)
            else:
                machine.later(0.0, daemon.start)

        self.cluster.here.later(time_s - self.world.now_s, arrive)

    def take(self, daemon: Daemon, kind: str, number: int, value: Any) -> None:
        if self.returncode is not None:
            return
        if kind == "connected":
            daemon.is_connected = True
            if all(other.is_connected for other in self.daemons):
                self.launch_s = self.world.now_s
                self.cluster.on_launch(self)
                for other in self.daemons:
                    other.down.put("launch")
        elif kind == "line":
            self.stderr.put(f"[1,{number}]<stderr>:{value}\n".encode())
        else:
            self.ended.add(number)
            if value and self.first_failed < 0:
                self.first_failed, self.code = number, value if value > 0 else 128 - value
                self._abort(daemon, number, value)
            self._exit_if_all_ended()

    def _abort(self, daemon: Daemon, number: int, value: int) -> None:
        if self.world.random.random() > 0.1:  # sometimes it does not name the rank
            text = EXITED if value > 0 else KILLED
            text = text.format(line=LINE, rank=number, host=daemon.machine.name, code=value, number=-value)
            self.stderr.put(text.encode())
        for other in self.daemons:
            other.down.put("kill")

    def _exit_if_all_ended(self) -> None:
        lost = [number for daemon in self.daemons if daemon.machine in self.lost for number in daemon.numbers]
        if len(self.ended.union(lost)) >= self.job.num_ranks and not (self.code and self.hangs_at_failure):
            code = self.code
            self.cluster.here.later(self.world.random.uniform(0.0, 0.3), lambda: self.exit(code))

    def lose(self, machine: Machine) -> None:
        """Its daemon there does not answer any more."""
        if self.returncode is not None or machine in self.lost:
            return
        if not any(daemon.machine is machine for daemon in self.daemons):
            return
        self.world.note("mpirun", f"has lost {machine.name}")
        self.lost.append(machine)
        self.stderr.put(LOST.format(host=machine.name).encode())
        code = 0 if self.cluster.is_open_mpi_5 else 205
        if self.first_failed < 0:
            self.first_failed, self.code = self.job.num_ranks, code  # ranks that it kills from now on are no cause
        for daemon in self.daemons:
            daemon.down.put("kill")
        self.cluster.here.later(self.world.random.uniform(0.1, 2.0), lambda: self.exit(self.code))

    def exit(self, code: int) -> None:
        was_running = self.returncode is None
        if was_running:
            self.world.note("mpirun", f"exits with {code}")
        super().exit(code)
        if was_running and code < 0 and not self.cluster.daemons_stay:
            for daemon in self.daemons:
                daemon.down.put("lost")

    def send_signal(self, number: int) -> None: ...

    def follow_up(self, failed: Rank) -> None:
        """Some other ranks fail because this one has failed, or hang in a collective."""
        self.is_broken = True
        others = [rank for rank in self.ranks.values() if rank.is_alive and rank.is_started and rank is not failed]
        draw = self.world.random
        for rank in draw.sample(others, min(len(others), draw.choice([0, 0, 1, 3]))):

            def follow(rank: Rank = rank) -> None:
                if rank.is_alive and rank.told_s == float("inf") and not rank.is_hanging:
                    rank.report("UnknownError", FOLLOW_UP.removeprefix("UnknownError: "), 1)
                    rank.machine.later(0.05, lambda: rank.end(1))

            rank.machine.later(draw.choice([0.01, 0.5]), follow)


class Cluster:
    """All machines, the launcher's process and what it has started."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machines: dict[str, Machine] = {}
        self.numbers = itertools.count(100)
        self.pipes: dict[int, Pipe] = {}
        self.processes: list[Process] = []
        self.attempts: list[Mpirun] = []
        self.mpirun: Mpirun | None = None
        self.job: Job
        self.jobs: dict[str, Job] = {}
        self.here: Machine
        self.late_rate = self.refused_rate = self.hang_rate = 0.0
        self.is_open_mpi_5 = self.daemons_stay = False
        self.slowest_s = 0.05
        """longest latency of a host"""
        self.work_s = 0.0
        """of the ranks of every attempt; 0: drawn for each"""
        self.lost_rate = 0.7
        """how often mpirun notices that it has lost a host"""
        self.connect_s: dict[str, float] = {}
        """how long ssh takes to connect to hosts; else it is drawn"""
        self.had_trouble_to_connect: set[str] = set()
        self.could_not_connect: set[str] = set()
        self.starting_faults: deque[str] = deque()
        self.program = SimpleNamespace(catches=True, ignores=False, save_s=1.0)
        self.output = bytearray()
        self.on_launch: Callable[[Mpirun], None]
        self.on_rank_start: Callable[[Rank], None]
        self.on_kill: Callable[[Rank], None]
        self.on_work: Callable[[Rank], None]

    def popen(self, argv: Sequence[str], **_: Any) -> Process:
        if argv[0] == "mpirun":
            return Mpirun(self, self.job_of(argv))
        if argv[0] == "sh":
            return Ssh(self, self.here, self.job_of(argv), 60.0)
        timeout_s = next(float(word.partition("=")[2]) for word in argv if "ConnectTimeout=" in word)
        return Ssh(self, self.machines[argv[argv.index("--") + 1]], self.job_of(argv), timeout_s)

    def job_of(self, argv: Sequence[str]) -> Job:
        """The job that a command is of: its ID is one of the last words."""
        words = re.findall(r"job\d+", " ".join(argv)[-1000:])
        return next((self.jobs[word] for word in words if word in self.jobs), self.job)

    def mpirun_of(self, job: Job) -> Mpirun | None:
        """The command that starts a job's ranks, as long as it runs."""
        mpiruns = [process for process in self.processes if isinstance(process, Mpirun) and process.job.id == job.id]
        return next((process for process in mpiruns if process.returncode is None), None)

    def count_on_silence(self, machine: Machine) -> None:
        """Lets ssh and mpirun give up a machine that does not answer for long enough."""
        since_s, draw = self.world.now_s, self.world.random

        def check(give_up: Callable[[], None], wait_s: float) -> None:
            def act() -> None:
                if self.here.host.is_dead or machine.is_reachable or machine.trouble_began_s > since_s:
                    return
                if self.here.host.frozen_until_s > self.world.now_s:
                    self.world.at(self.here.host.frozen_until_s + 1.0, act)
                    return
                give_up()

            self.world.at(since_s + wait_s, act)

        for process in self.processes:
            is_of_machine = isinstance(process, Ssh) and process.machine is machine and process.returncode is None
            if is_of_machine and process.agent:
                check(process.give_up, KEEP_ALIVE_S + draw.uniform(0.0, 3.0))
        if self.mpirun and draw.random() < self.lost_rate:
            mpirun = self.mpirun
            check(lambda: mpirun.lose(machine), MPIRUN_KEEP_ALIVE_S + draw.uniform(0.0, 4.0))

    def starting_fault(self, rank: Rank) -> str:
        return self.starting_faults.popleft() if self.starting_faults else ""

    def boxes(self, job: Job, machine: Machine) -> list[tuple[int, int]]:
        """Status lines of ranks that have exited on a machine."""
        mpirun = next((attempt for attempt in self.attempts if attempt.job.id == job.id), None)
        ranks = [rank for rank in mpirun.ranks.values() if rank.machine is machine] if mpirun else []
        return [(rank.number, rank.step) for rank in ranks if rank.step >= 0]

    # ---- what the launcher's modules get -----------------------------------------------------------------------------

    def read(self, number: int, count: int) -> bytes:
        pipe = self.pipes[number]
        if not pipe.data and not pipe.is_at_end:
            raise BlockingIOError
        data = bytes(pipe.data[:count])
        del pipe.data[:count]
        if pipe.selector and not (pipe.data or pipe.is_at_end):  # as long as there is more to read, it is ready
            pipe.selector.ready.pop(number, None)
        return data

    def write(self, number: int, data: bytes) -> int:
        if number == 2:
            self.output += data
            for line in data.decode().splitlines():
                self.world.note("launcher", f"prints: {line}")
        elif number not in self.pipes or self.pipes[number].write is None:
            raise BrokenPipeError
        else:
            self.pipes[number].write(data)  # type: ignore[misc]
        return len(data)


class Os:
    """`os` of a module."""

    def __init__(self, cluster: Cluster) -> None:
        self.read, self.write = cluster.read, cluster.write

    def set_blocking(self, number: int, is_blocking: bool) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)
