"""A run folder that several hosts share, and the lock of its runs: who may write, and who gets it when.

`RunLock` and `Attempt` are the production code. A job is a loop that takes the lock, and looks at it where training
does. The file system, the launcher that restarts a job and Slurm's requeues are modeled:

- Locks of a file server, which it releases when a host has been silent for 90 s (NFSv4) or has booted again (NFSv3);
  locks of each host alone (`nolock`, `localflock`), and none at all. What a host writes is seen by others once it is
  flushed, else up to 30 s later. An operation takes up to a second.
- A launcher starts an attempt when the one before has died, or 30 s after a host does not answer. It kills the earlier
  attempt's process when that answers again, or its agent is gone, and it runs on.

Not promised, and left out: a process that is frozen between its look at the holder and the removal of the lock's file,
or between the lock and its name in the file; a start after a host that died then; a write that is under way when
another process takes over; elastic jobs, of which elastic.py is; between hosts whose file system has no common locks,
that the first start is the one that stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from simulation.world import Host, World, in_place

from ringtrain.errors import RunDirectoryError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT
from ringtrain.run import run_folder
from ringtrain.run.run_folder import EXPIRY_S, LEASE_S, RunLock

FOLDER = "/runs/r"
KINDS = ("dies", "freezes", "host freezes", "host dies")
NFS4, NFS3, LOCAL, NONE = "NFSv4", "NFSv3", "locks of each host", "no locks"
SERVER_LEASE_S = 90.0
LONGEST_FLUSH_S = 30.0
CHAOS_S, CALM_S, END_S = 400.0, 1200.0, 1800.0
SLACK_S = 10.0
"""for the operations of a start"""
STEPS = 10
REMOVED = "has locked a file that was removed meanwhile"
LONGEST_WRITE_S = 3.0
LONGEST_KILL_S = 5.0
"""after which the agent of a host that answers again has killed an earlier attempt's process"""


@dataclass
class Machine:
    """A host, on which some processes run.

    Attributes:
        silent_s: Since when the file server does not get its renewals; inf: it does.
    """

    world: World
    name: str
    boot: int = 1
    is_dead: bool = False
    frozen_until_s: float = 0.0
    silent_s: float = float("inf")
    processes: list[Host] = field(default_factory=list)

    def freeze(self, seconds: float) -> None:
        self.silent_s = min(self.silent_s, self.world.now_s)
        self.frozen_until_s = self.world.now_s + seconds
        for process in self.processes:
            if not process.is_dead:
                process.freeze(seconds)
        self.world.at(self.frozen_until_s, self._answer)

    def _answer(self) -> None:
        if not self.is_dead and self.frozen_until_s <= self.world.now_s:
            self.silent_s = float("inf")

    def die(self) -> None:
        self.is_dead, self.silent_s = True, min(self.silent_s, self.world.now_s)
        for process in self.processes:
            if not process.is_dead:
                process.facts["had_files"] = True
                process.die()
        self.processes.clear()

    def come_back(self) -> None:
        self.world.note(self.name, "boots again")
        self.is_dead, self.boot, self.silent_s, self.frozen_until_s = False, self.boot + 1, float("inf"), 0.0


class Inode:
    """A file: its lock, and its content as each host sees it."""

    def __init__(self) -> None:
        self.flushed = ""
        self.unflushed: dict[str, str] = {}
        """by host"""
        self.holders: dict[str, OpenFile] = {}
        """of its lock, by host where each host has its own; else of ''"""


class OpenFile:
    """An open file of a process, whose lock is released when it is closed or the process ends."""

    def __init__(self, shared: Shared, inode: Inode) -> None:
        self.shared, self.inode, self.process = shared, inode, shared.world.current_host
        self.machine: Machine = self.process.facts["machine"]
        self.boot, self.is_open = self.machine.boot, True
        self.text, self._is_flushed = "", False

    def fileno(self) -> OpenFile:
        return self

    def truncate(self, size: int) -> None:
        self.text = ""
        self.inode.unflushed[self.machine.name] = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """The kernel has it; a file server gets it some time later."""
        self.inode.unflushed[self.machine.name] = self.text
        world, text = self.shared.world, self.text

        def arrive() -> None:
            if not self._is_flushed and not self.machine.is_dead and self.machine.boot == self.boot:
                self.arrive(text)

        world.at(world.now_s + world.random.uniform(0, LONGEST_FLUSH_S), arrive)

    def arrive(self, text: str) -> None:
        """All hosts see it. If another process has the lock by now, the server refuses it, and no host sees it."""
        self._is_flushed = True
        if self.inode.unflushed.get(self.machine.name) == text:
            del self.inode.unflushed[self.machine.name]
        if self.inode.holders.get(self.shared.place(self.machine), self) is self:
            self.inode.flushed = text
            self.inode.unflushed.clear()

    @property
    def is_held(self) -> bool:
        """Whether its process has it open, as its file server knows."""
        machine = self.machine
        if self.shared.kind in (NFS4, NFS3):
            silent_s = self.shared.world.now_s - machine.silent_s
            if self.shared.kind == NFS4 and silent_s > SERVER_LEASE_S:
                return False
            if machine.is_dead:  # what was closed before is not held
                return machine.boot == self.boot and self.is_open and "had_files" in self.process.facts
            if machine.boot != self.boot:
                return False
        return self.is_open and not self.process.is_dead

    def close(self) -> None:
        self.is_open = False
        if self.text and "owns_s" not in self.process.facts:
            self.shared.world.note(self.process.name, "gives up a lock that another one has taken over")


class Shared:
    """The file system, and the calls by which production code uses it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kind = world.random.choice([NFS4, NFS4, NFS4, NFS3, NFS3, LOCAL, NONE])
        self.latency_s = world.random.choice([0.001, 0.02, 1.0])
        self.file: Inode | None = None
        """at the lock's path"""
        self.pause: Callable[[str], None] = lambda what: None
        """what happens in the middle of an operation of the current process"""

    def place(self, machine: Machine) -> str:
        return machine.name if self.kind == LOCAL else ""

    def takes(self, what: str) -> None:
        """An operation's time."""
        self.world.sleep(self.world.random.uniform(0, self.latency_s))
        self.pause(what)

    # ---- of production code ------------------------------------------------------------------------------------------

    def open(self, path: Any, mode: str, encoding: str = "") -> OpenFile:
        self.takes("open")
        self.file = self.file or Inode()
        return OpenFile(self, self.file)

    def lock(self, file: OpenFile, command: int, query: bytes) -> None:
        self.takes("lock")
        if self.kind == NONE:
            raise OSError(errno.ENOLCK, "No locks available")
        place = self.place(file.machine)
        holder = file.inode.holders.get(place)
        if holder and holder.is_held:
            raise BlockingIOError
        file.inode.holders[place] = file

    def lock_of_process(self, file: OpenFile, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def fsync(self, file: OpenFile) -> None:
        self.takes("flush")
        file.arrive(file.text)

    def read(self) -> str:
        self.takes("read")
        if self.file is None:
            raise FileNotFoundError
        machine = self.world.current_host.facts["machine"]
        return self.file.unflushed.get(machine.name, self.file.flushed)

    def unlink(self) -> None:
        self.world.note(self.world.current_host.name, "removes the lock's file")
        self.file = None


class LockPath:
    """Path of the run folder, and of its lock."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    def __truediv__(self, name: str) -> LockPath:
        return self

    def __str__(self) -> str:
        return FOLDER

    def stat(self) -> Inode:
        self.shared.takes("stat")
        if self.shared.file is None:
            self.shared.world.note(self.shared.world.current_host.name, REMOVED)
            raise FileNotFoundError
        return self.shared.file

    def read_text(self, encoding: str) -> str:
        return self.shared.read()

    def unlink(self, missing_ok: bool) -> None:
        self.shared.unlink()


@dataclass
class Launch:
    """A job: its attempts, one after the other, or its requeues by Slurm."""

    name: str
    is_slurms: bool
    restarts: int
    kills_late: bool
    """The agents of a host that does not answer kill its processes when it does again."""
    number: int = 0

    def environ(self) -> dict[str, str]:
        if self.is_slurms:
            job = f"{self.name} of requeue {self.number}"
            slurms = {"SLURM_JOB_ID": self.name, "SLURM_RESTART_COUNT": str(self.number)}
            return {**slurms, ATTEMPT: Attempt(job=job).to_json()}
        return {ATTEMPT: Attempt(number=self.number, job=self.name).to_json()}


class Run:
    """Starts of one run on hosts that share its folder.

    Attributes:
        violation: What did not hold, first.
    """

    def __init__(self, world: World) -> None:
        self.world, self.shared = world, Shared(world)
        self.violation = ""
        self.machines = [Machine(world, f"host{number}") for number in range(1, world.random.randint(2, 4))]
        self.path = LockPath(self.shared)
        self.owner: Host | None = None
        """process that took the lock last"""
        self.disturbed_s: dict[Host, float] = {}
        """when a process was disturbed last"""
        self.seen: list[tuple[Host, float]] = []
        """processes with the time at which they ended or died"""
        self.complete: list[Host] = []
        self.shared.pause = self._pause
        self.pause_rate = world.random.choice([0.0, 0.0, 0.02, 0.1])
        world.note("", f"the file system has: {self.shared.kind}")

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def start(self, launch: Launch, on: int | None = None) -> None:
        """Starts an attempt of a job on a host, by default any that is alive, now or later."""
        machines = [machine for machine in self.machines if not machine.is_dead]
        if not machines:
            self.world.at(self.world.now_s + 10.0, lambda: self.start(launch))
            return
        machine = self.world.random.choice(machines) if on is None else self.machines[on]
        process = self.world.host(f"{launch.name}.{launch.number}")
        process.facts = {
            "machine": machine,
            "taken": [],
            "launch": launch,
            "environ": launch.environ(),
            "pid": len(self.world.hosts),
            "began_s": self.world.now_s,
            "lost": self._lost_holders(),
        }
        process.frozen_until_s = machine.frozen_until_s
        if machine.frozen_until_s > self.world.now_s:
            self.disturbed_s[process] = self.world.now_s
        machine.processes.append(process)
        self.world.note(process.name, f"starts on {machine.name}")
        self.world.start(process, "job", lambda: self._job(process))

    def _lost_holders(self) -> list[Launch | None]:
        """Jobs of processes that had the lock when their host died; None: one that had not written its name yet."""
        jobs = []
        for file in self.shared.file.holders.values() if self.shared.file else ():
            if file.is_open and (file.machine.is_dead or file.machine.boot != file.boot):
                is_named = file.inode.flushed in ("", file.text)
                jobs.append(file.process.facts["launch"] if is_named else None)
        return jobs

    def _job(self, process: Host) -> None:
        lock = RunLock()
        launch: Launch = process.facts["launch"]
        try:
            lock.take(self.path, same_job=launch.number > 0 and not launch.is_slurms)  # type: ignore[arg-type]
        except RunDirectoryError as error:
            self.world.note(process.name, f"is refused: {error}")
            self.seen.append((process, self.world.now_s))
            self._check_start(process, was_refused=True)
            if "cannot be written" in str(error):
                self.violated(str(error))
            return
        self.world.note(process.name, "has the lock")
        self._check_start(process, was_refused=False)
        self.owner = process
        process.facts["owns_s"] = self.world.now_s
        try:
            for _ in range(STEPS):
                self.world.sleep(self.world.random.choice([1, 20]) * self.world.random.random())
                if lock.is_lost:
                    break
                lock.raise_if_lost()
                self._write(process)
            else:
                lock.raise_if_lost()
                self._write(process)
                self.complete.append(process)
        except RunDirectoryError as error:
            self.world.note(process.name, f"{error}")
        if process not in self.complete:
            self._check_loss(process)
        lock.release()
        self.world.note(process.name, "ends")
        self.seen.append((process, self.world.now_s))
        if self.owner is process:
            self.owner = None

    # ---- faults ------------------------------------------------------------------------------------------------------

    def running(self) -> list[Host]:
        ended = {process for process, _ in self.seen}
        return [process for machine in self.machines for process in machine.processes if process not in ended]

    def disturb(self, kind: str) -> None:
        processes = [process for process in self.running() if not process.is_dead]
        if processes:
            # More often the one that owns it.
            process = self.world.random.choice(processes)
            if self.owner in processes and self.world.random.random() < 0.5:
                process = self.owner
            self._disturb(process, kind)

    def _disturb(self, process: Host, kind: str) -> None:
        draw, world = self.world.random, self.world
        machine: Machine = process.facts["machine"]
        seconds = draw.choice([5, 40, 150, 250]) * draw.uniform(0.3, 1.0)
        affected = [process]
        if kind.startswith("host"):
            affected = [one for one in machine.processes if not one.is_dead]
        for one in affected:
            self.disturbed_s[one] = world.now_s + seconds
        if kind == "dies":
            self.end(process)
        elif kind == "freezes":
            process.freeze(seconds)
        elif kind == "host freezes":
            machine.freeze(seconds)
        else:
            self.seen += [(one, world.now_s) for one in affected]
            machine.die()
            world.note(machine.name, "dies")
            if draw.random() < 0.7:
                world.at(world.now_s + seconds, machine.come_back)
        for one in affected:
            self._restart_later(one, 0.0 if kind == "dies" else LEASE_S)

    def _restart_later(self, process: Host, least_s: float) -> None:
        """What the launcher does: the next attempt, once the earlier one has died or cannot be reached."""
        launch: Launch = process.facts["launch"]
        if launch.restarts <= 0 or process.facts["environ"] != launch.environ():
            return
        launch.restarts -= 1
        world = self.world

        def restart() -> None:
            if process in [one for one, _ in self.seen] and not process.is_dead:
                return  # it has ended by itself
            if process.facts["environ"] != launch.environ():
                return  # it was disturbed twice
            launch.number += 1
            self.start(launch)
            if not process.is_dead and launch.kills_late:
                world.at(
                    max(world.now_s, process.frozen_until_s) + world.random.uniform(0, LONGEST_KILL_S),
                    lambda: self._kill(process),
                )

        world.at(world.now_s + least_s + world.random.uniform(0, 5), restart)

    def _kill(self, process: Host) -> None:
        if not process.is_dead and process in self.running():
            self.disturbed_s[process] = self.world.now_s
            self.end(process)

    def end(self, process: Host) -> None:
        process.die()
        process.facts["machine"].processes.remove(process)
        self.seen.append((process, self.world.now_s))

    def _pause(self, what: str) -> None:
        """Disturbs a process in the middle of what it does with the file, in some schedules."""
        if what != "stat" and self.world.now_s < CHAOS_S / 2 and self.world.random.random() < self.pause_rate:
            self._disturb(self.world.current_host, self.world.random.choice(KINDS))
            self.world.sleep(0)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def _write(self, process: Host) -> None:
        """A process writes, and none has taken the folder after it."""
        begin_s = self.world.now_s
        if self.owner not in (process, None):
            self.violated(f"{process.name} writes, although {self.owner.name} has the folder")
        self.world.sleep(self.world.random.uniform(0, LONGEST_WRITE_S))
        is_common = self.shared.kind in (NFS4, NFS3)
        is_killed = process.facts["launch"].kills_late
        may_live = self._was_disturbed(process, begin_s - LONGEST_KILL_S)
        if self.owner not in (process, None) and is_common and is_killed and not may_live:
            self.violated(f"{self.owner.name} has taken the folder while {process.name} writes")

    def _was_disturbed(self, process: Host, since_s: float) -> bool:
        return self.disturbed_s.get(process, -1.0) >= since_s

    def _check_loss(self, process: Host) -> None:
        """A process that nothing disturbs keeps the lock, where there is a common one, unless it is out of date."""
        is_current = process.facts["environ"] == process.facts["launch"].environ()
        is_common = self.shared.kind in (NFS4, NFS3)
        if is_current and is_common and not self._was_disturbed(process, process.facts["owns_s"]):
            self.violated(f"{process.name} has lost the folder, although nothing disturbed it")

    def _check_start(self, process: Host, was_refused: bool) -> None:
        """A start gets the lock in time if no other process was alive meanwhile."""
        facts, now_s = process.facts, self.world.now_s
        began_s = facts["began_s"]
        others = [one for one in self.world.hosts if one is not process]
        ended = dict(self.seen)
        if None in facts["lost"]:
            return  # the file names another one, maybe of the same host
        had_company = any(ended.get(one, now_s) > began_s for one in others)
        if had_company or self._was_disturbed(process, began_s) or process.is_dead:
            return
        launch, lost = facts["launch"], facts["lost"]
        waited_s = now_s - began_s
        slack_s = SLACK_S + 40 * self.shared.latency_s
        limit_s = 0.0
        if lost:
            is_earlier = launch in lost
            limit_s = LEASE_S if is_earlier else EXPIRY_S
            if was_refused and self.shared.kind == NFS3 and (launch.is_slurms or not is_earlier):
                return  # until that host is back; of an earlier requeue only its name tells
        if was_refused:
            self.violated(f"{process.name} is refused, although no other process is alive")
        elif waited_s > limit_s + slack_s:
            self.violated(f"{process.name} gets the folder after {waited_s:.0f} s, not {limit_s:.0f}")

    def check_end(self) -> None:
        """All processes have ended, and the run is complete."""
        for task in self.world.tasks:
            if task.error:
                self.violated(f"{task.host.name}: {task.error!r}")
            if not (task.is_done or task.host.is_dead):
                self.violated(f"{task.host.name} has not ended")
        if not self.complete:
            self.violated("no process has completed the run")

    def violated(self, what: str) -> None:
        self.world.note("", f"VIOLATED: {what}")
        self.violation = self.violation or what


def disturb(run: Run) -> None:
    """Draws which jobs start when, and what happens to their processes and hosts."""
    world, draw = run.world, run.world.random
    kinds = draw.sample(KINDS, draw.randint(1, 4))
    is_crowded = draw.random() < 0.3
    if is_crowded:  # starts of few jobs meet at a slow server
        run.pause_rate, run.shared.latency_s, run.shared.kind = 0.1, 1.0, draw.choice([NFS4, NFS3])
    for number in range(draw.randint(1, 2 if is_crowded else 3)):
        restarts = draw.choice([3, 5]) if is_crowded else draw.choice([0, 1, 3])
        launch = Launch(f"job{number}", draw.random() < 0.4, restarts, draw.random() < 0.5)
        world.at(draw.choice([1, 150]) * draw.random(), lambda launch=launch: run.start(launch))  # type: ignore[misc]
    for _ in range(draw.randint(0, 6)):
        world.at(draw.uniform(0, CHAOS_S / 2), lambda: run.disturb(draw.choice(kinds)))


def calm(run: Run) -> None:
    """Ends all disturbance, and boots all hosts."""
    for machine in run.machines:
        if machine.is_dead:
            machine.come_back()
    run.shared.pause = lambda what: None
    run.world.note("", "all is calm")


def simulate(seed: int, is_traced: bool = False, directed: Callable[[Run], None] = disturb) -> Run:
    """Runs one schedule."""
    world = World(seed, is_traced)
    run = Run(world)
    with _of_production(run):
        directed(run)
        world.run(CHAOS_S)
        calm(run)
        world.run(CALM_S)
        if not run.complete:
            run.start(Launch("last", False, 0, False))
        world.run(END_S)
        run.check_end()
        world.end()
    return run


class _Taken:
    """Locks of the process that runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __iter__(self) -> Iterator[RunLock]:
        return iter(self._world.current_host.facts["taken"])

    def add(self, lock: RunLock) -> None:
        self._world.current_host.facts["taken"].append(lock)


@contextlib.contextmanager
def _of_production(run: Run) -> Iterator[None]:
    """Gives the tested module the simulated time, files and process."""
    world, shared = run.world, run.shared

    class Environ:
        def get(self, name: str, default: str = "") -> str:
            return str(world.current_host.facts["environ"].get(name, default))

        def __getitem__(self, name: str) -> str:
            return str(world.current_host.facts["environ"][name])

        def __contains__(self, name: str) -> bool:
            return name in world.current_host.facts["environ"]

    def boot_id(path: str) -> SimpleNamespace:
        machine = world.current_host.facts["machine"]
        return SimpleNamespace(read_text=lambda encoding: f"{machine.name} {machine.boot}")

    def is_same(opened: Inode, at_path: Inode) -> bool:
        if opened is not at_path:
            world.note(world.current_host.name, REMOVED)
        return opened is at_path

    of_files = SimpleNamespace(
        environ=Environ(),
        getpid=lambda: world.current_host.facts["pid"],
        fstat=lambda file: file.inode,
        fsync=shared.fsync,
        path=SimpleNamespace(samestat=is_same),
        SEEK_SET=os.SEEK_SET,
    )
    locks = SimpleNamespace(
        fcntl=shared.lock, lockf=shared.lock_of_process, F_WRLCK=1, F_OFD_SETLK=2, LOCK_EX=2, LOCK_NB=4
    )
    hosts = SimpleNamespace(gethostname=lambda: world.current_host.facts["machine"].name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place(world, run_folder))
        for name, value in [
            ("open", shared.open),
            ("os", of_files),
            ("fcntl", locks),
            ("socket", hosts),
            ("Path", boot_id),
            ("json", SimpleNamespace(dumps=json.dumps)),
            ("_taken", _Taken(world)),
            ("print", lambda text, **_: world.note(world.current_host.name, text)),
        ]:
            stack.enter_context(mock.patch.object(run_folder, name, value, create=name in ("open", "print")))
        yield
