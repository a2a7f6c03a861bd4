"""Ranks' processes of an elastic job in virtual time, and Horovod's C++ core in them: rendezvous and collectives.

Modeled by observed behavior of Horovod over Gloo:

- A process takes its place from its environment, and at each later `init` from the driver, where it waits until all
  ranks are there. Then all put their addresses and wait for those of the others, up to HOROVOD_GLOO_TIMEOUT_SECONDS: of
  all ranks, of those on the host, of those with the same local rank. A failure there, and a removed rank, ends the
  process by SIGABRT, as an exception in a thread of C++ does.
- A collective completes once all have called it, a moment earlier on one rank than on another. If one of them is killed
  meanwhile, it raises HorovodInternalError on the others, or not; one that has completed it has sent all of its part.
  The next one fails on all. A host that is silent for the time-out fails, as do the others. A collective that one rank
  never calls waits for ever.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Mapping
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from simulation.cluster import Machine
from simulation.horovodrun import Horovodrun, OnMachine, Shell, request

from ringtrain.protocol.env import MARK

GLOO_TIMEOUT_S = 60.0
REMOVED = "-1"
PLACEMENT = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class Aborted(BaseException):
    """The process ends by SIGABRT."""


class Member:
    """A rank's process."""

    is_late = False
    told_s = float("inf")

    def __init__(self, horovodrun: Horovodrun, shell: Shell, index: int, variables: Mapping[str, str]) -> None:
        self.horovodrun, self.shell, self.index = horovodrun, shell, index
        self.cluster: Any = horovodrun.cluster
        self.machine: Machine = shell.machine
        self.world, self.job, self.mpirun = self.machine.world, horovodrun.job, horovodrun
        self.pid = next(self.cluster.numbers)
        self.variables = dict(variables)
        self.slot = self.variables.get("RINGTRAIN_SLOT", "0")
        self.process = OnMachine(self.machine, f"{self.machine.name}.{self.pid}")
        self.process.facts["member"] = self
        self.boot = self.machine.boot
        self.exit_code: int | None = None
        self.failure = ""
        self.is_started, self.is_hanging, self.has_reset_place = False, False, False
        self.catches_signals = False
        self.received = 0
        self.wants_stop = False
        self.step = -1
        self.born_s = self.world.now_s
        self.num_inits = 0
        self.group: Group | None = None
        self.listeners: list[Any] = []
        self.host_changes: queue.Queue[Any] = queue.Queue()
        self.trainer: Any = None
        self.training: Any = None
        """the run since the last agreement of the ranks"""
        self._is_dying = False
        self.machine.ranks.append(self)  # type: ignore[arg-type]
        self.cluster.members[self.pid] = self
        horovodrun.ranks[self.pid] = self

    # ---- its life ----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return not self.process.is_dead

    @is_alive.setter
    def is_alive(self, value: bool) -> None:
        """Called by a machine that dies."""
        if not value and not self.process.is_dead:
            self.process.is_dead = True
            if self.group:
                self.group.interrupt(self)
            self.cluster.on_end(self)

    @property
    def number(self) -> int:
        return int(self.variables["HOROVOD_RANK"])

    @property
    def size(self) -> int:
        return int(self.variables["HOROVOD_SIZE"])

    @property
    def is_connected(self) -> bool:
        """Whether its host and the launching one reach each other."""
        return self.machine.is_reachable and self.machine.boot == self.boot

    @property
    def answers(self) -> bool:
        return self.is_alive and self.is_connected

    @property
    def has_reset(self) -> bool:
        """Whether a connection to it is refused or reset."""
        return not self.is_alive and self.machine.is_reachable

    def catches(self, number: int) -> bool:
        return self.catches_signals and not self.is_hanging

    def signal(self, number: int, by_launcher: bool = False) -> None:
        if not self.is_alive:
            return
        if self.catches(number):
            self.note(f"gets {signal.Signals(number).name}")
            self.received = self.received or number
        else:
            self.end(-number)

    def kill_soon(self) -> None:
        if not self._is_dying:
            self._is_dying = True
            self.machine.later(self.world.random.choice([0.0, 0.0, 0.05, 0.5]), lambda: self.end(-signal.SIGKILL))

    def end(self, code: int) -> None:
        """Its process ends; code: As in subprocess."""
        if not self.is_alive:
            return
        self.note(f"ends with {code}")
        self.process.is_dead, self.exit_code = True, code
        if self in self.machine.ranks:
            self.machine.ranks.remove(self)  # type: ignore[arg-type]
        if self.group:
            self.group.interrupt(self)
            self.group.leave(self)
        self.shell.arrive(code if code >= 0 else 128 - code)
        self.cluster.on_end(self)
        self.world.wake_waiting()

    def say(self, line: str) -> None:
        """Prints a line to standard error, which the launcher gets if its host answers."""
        if self.shell.code is None and (self.is_connected or not self.shell.is_remote):
            self.horovodrun.print(f"[{self.index}]<stderr>:{line}")

    def report(self, kind: str) -> None:
        self.say(f"{MARK}:{self.job.id}:{kind}")

    def note(self, what: str) -> None:
        self.world.note(self.machine.name, f"process {self.pid} (rank {self.number}) {what}")

    # ---- Horovod -----------------------------------------------------------------------------------------------------

    def path(self, scope: str, key: str) -> str:
        token = self.variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[2]
        return f"/{token}:{self.variables['HOROVOD_GLOO_RENDEZVOUS_PORT']}/{scope}/{key}"

    def init(self) -> None:
        """`horovod.init`."""
        try:
            if self.has_reset_place:
                self._ask_for_place()
            self.group = self._meet("global", self.number, self.size)
            host, local = self.variables["HOROVOD_HOSTNAME"], self._place("LOCAL_RANK")
            self._meet(f"local_{host}", local, self._place("LOCAL_SIZE"))
            self._meet(f"cross_{local}", self._place("CROSS_RANK"), self._place("CROSS_SIZE"))
        except (ConnectionError, TimeoutError, HorovodInternalError) as error:
            self.note(f"cannot start Horovod: {error}")
            self.say("terminate called after throwing an instance of 'gloo::IoException'")
            raise Aborted from error
        self.is_started = True
        self.num_inits += 1
        self.report(f"seat:{self.number}:{self.size}::{self.pid}:{self.machine.name}")
        self.cluster.on_init(self)

    def _place(self, name: str) -> int:
        return int(self.variables[f"HOROVOD_{name}"])

    def _ask_for_place(self) -> None:
        name = f"{self.variables['HOROVOD_HOSTNAME']}:{self.variables['HOROVOD_LOCAL_RANK']}"
        _, answer = request(self, "GET", self.path("rank_and_size", name))
        values = answer.decode().split(",")
        if values[0] == REMOVED:
            self.note("has been removed")
            self.say("terminate called: has been removed from elastic job")
            raise Aborted
        for key, value in zip(PLACEMENT, values, strict=True):
            self.variables[f"HOROVOD_{key}"] = value

    def _meet(self, scope: str, number: int, size: int) -> Group:
        """Connects to all ranks of a scope. Raises ConnectionError, TimeoutError or HorovodInternalError."""
        own = f"{self.pid}.{self.num_inits}"
        request(self, "PUT", self.path(scope, str(number)), own.encode())
        self.world.wake_waiting()
        wanted = [str(other) for other in range(size)]

        def are_there() -> bool:
            found = self.horovodrun.server.cache.get(scope, {})
            return self.is_connected and all(key in found for key in wanted)

        if not self.world.wait_for(are_there, GLOO_TIMEOUT_S):
            raise TimeoutError(f"Wait timeout after {GLOO_TIMEOUT_S:.0f} seconds for key(s) of {scope}")
        found = self.horovodrun.server.cache[scope]
        names = tuple(found[key].decode() for key in wanted)
        if own not in names:  # another process of its slot, whom the others connect to
            self.world.sleep(GLOO_TIMEOUT_S)
            raise TimeoutError("Timed out waiting for the other ranks")
        groups: dict[Any, Group] = self.cluster.groups
        group = groups.setdefault((self.job.id, scope, names), Group(self.cluster, names))
        group.join(self, number)
        request(self, "DELETE", self.path(scope, str(number)))
        return group

    def shutdown(self) -> None:
        """`horovod.shutdown`, after which the next `init` asks for a place."""
        self.world.sleep(self.world.random.choice([0.0, 0.01, 0.3]))
        self.has_reset_place, self.is_started = True, False

    def hang_up(self) -> None:
        """Closes its connections."""
        if self.group:
            self.group.leave(self)
            self.group = None

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Values of all ranks, by rank. Raises HorovodInternalError."""
        self.cluster.on_exchange(self, name)
        if self.group is None:
            raise HorovodInternalError("Horovod has been shut down")
        return self.group.exchange(self, name, value)


class Operation:
    """A collective under way."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.end_s: dict[int, float] = {}
        self.failed: set[int] = set()
        """ranks on which it fails, since another one was killed before its end"""


class Group:
    """Connected ranks."""

    def __init__(self, cluster: Any, names: tuple[str, ...]) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.members: list[Member] = [cluster.members[int(name.partition(".")[0])] for name in names]
        self.operations: dict[str, Operation] = {}
        self.last = Operation()
        """the one that all have called last"""
        self.has_met = False
        self.fails_s: dict[int, float] = {}
        """when a member, by process, notices that another one is gone"""
        self.lost: set[int] = set()
        """processes that have waited for a silent host for too long"""
        self._joined: set[int] = set()

    @property
    def is_connected(self) -> bool:
        return all(member.is_connected for member in self.members)

    def join(self, member: Member, number: int) -> None:
        """Waits for the others to be there as well. Raises TimeoutError or HorovodInternalError."""
        self._joined.add(number)
        self.world.wake_waiting()
        if any(other.has_reset for other in self.members):
            raise HorovodInternalError("Connection refused")

        def has_ended() -> bool:
            return self._fails(member) or (len(self._joined) == len(self.members) and self.is_connected)

        if not self.world.wait_for(has_ended, GLOO_TIMEOUT_S):
            raise TimeoutError("Timed out waiting for the other ranks")
        if self._fails(member):
            raise HorovodInternalError("Connection reset by peer")
        self.has_met = True

    def leave(self, gone: Member) -> None:
        """A member has closed its connections; those of a silent host stay open to the others until it is back."""
        if not gone.is_connected:
            silent_s = gone.machine.blocked_until_s - self.world.now_s
            if 0 < silent_s < float("inf"):
                after_s = silent_s * self.world.random.uniform(1.0, 1.5)  # TCP sends again after times that double
                self.world.at(self.world.now_s + after_s, lambda: self.leave(gone))
            return
        for member in self.members:
            if member is not gone and member.is_alive:
                self.fail(member, self.world.random.uniform(0.001, 0.01) + member.machine.latency_s)

    def interrupt(self, gone: Member) -> None:
        """A member ends, perhaps before the end of a collective."""
        last, now_s = self.last, self.world.now_s
        if last.end_s.get(self.members.index(gone), 0.0) <= now_s:
            return
        for rank, end_s in last.end_s.items():
            if end_s > now_s and self.world.random.random() < 0.5:
                last.failed.add(rank)

    def fail(self, member: Member, after_s: float) -> None:
        until_s = self.world.now_s + after_s
        if member.pid not in self.fails_s or self.fails_s[member.pid] > until_s:
            self.fails_s[member.pid] = until_s
            self.world.at(until_s, self.world.wake_waiting)

    def _fails(self, member: Member) -> bool:
        has_noticed = self.fails_s.get(member.pid, float("inf")) <= self.world.now_s
        return member.pid in self.lost or (has_noticed and member.is_connected)

    def watch(self, limit_s: float) -> None:
        """Both sides give up once a host has been silent for too long, and all others once it has booted again."""
        if self.lost:
            return
        for member in self.members:
            machine = member.machine
            is_silent = not machine.is_reachable and self.world.now_s > machine.trouble_began_s + limit_s
            if is_silent or machine.boot != member.boot:
                self.lost |= {other.pid for other in self.members}

    def exchange(self, member: Member, name: str, value: Any) -> list[Any]:
        rank, draw = self.members.index(member), self.world.random
        operation = self.operations.setdefault(name, Operation())
        operation.values[rank] = value

        def complete() -> None:
            if len(operation.values) == len(self.members) and not operation.end_s and self.is_connected:
                del self.operations[name]
                self.last = operation
                self.cluster.on_complete(self, name)
                for number in operation.values:
                    operation.end_s[number] = self.world.now_s + draw.choice([0.001, 0.002, 0.01])

        def is_over() -> bool:
            complete()
            return rank in operation.end_s or self._fails(member)

        before = rank in operation.end_s
        complete()
        if operation.end_s and not before:
            self.world.wake_waiting()
        self.world.wait_for(is_over)
        if rank in operation.end_s:
            self.world.sleep(operation.end_s[rank] - self.world.now_s)
        if rank not in operation.end_s or rank in operation.failed:
            number = draw.randint(1000, 9999)
            raise HorovodInternalError(f"Gloo AllReduce failed: Connection closed by peer [10.0.0.2]:{number}")
        return [operation.values[number] for number in range(len(self.members))]
