"""A run with a mirror on hosts that die, freeze and lose their network: what must hold of its copy in the bucket.

Lease, mirror and checkpoints are the production code; files of a host are real ones, in a temporary folder. Training is
a loop that saves. A bucket writes an object whole or not at all; some have no conditional writes.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from simulation.bucket import Bucket, Network, Store
from simulation.world import Host, World, in_place

from ringtrain.data import data_files
from ringtrain.errors import CheckpointError, DataError, RunDirectoryError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import ATTEMPT
from ringtrain.run import checkpoint, lease, mirror
from ringtrain.run.run_folder import LEASE

URL, FOLDER = "s3://bucket/runs", "bucket/runs/r"
CHECKPOINTS = f"{FOLDER}/checkpoints/"
STEPS, EVERY = 60, 10
CHAOS_S, CALM_S, END_S = 600.0, 1200.0, 1800.0
"""when faults end, when the number of owners is looked at, and when every job has ended"""
LONGEST_LOSS_S = 90.0
"""seconds for which a job may go on writing that has lost its lease: two renewals, and a request that is under way"""
MEMORY = "/dev/shm"
"""folder of a file system in memory"""


class Run:
    """Jobs that start on new hosts, one after the other or at once, until the run is complete.

    Attributes:
        violation: What did not hold, first.
        reported: Step of the newest checkpoint that a job has reported as copied.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        has_files = world.random.random() < 0.3
        self.bucket = Bucket(world, has_files or world.random.random() < 0.5, has_files)
        self.bucket.on_change = self.on_change
        self.violation = ""
        self.reported = 0
        self.networks: dict[Host, Network] = {}
        self.owners: dict[Host, tuple[mirror.Mirror, float]] = {}
        """jobs that have the lease, as they believe, and since when"""
        self.calm_since_s: dict[Host, float] = {}
        """when the last disturbance of a host ends; none: it has not been disturbed"""
        self.last_host: dict[str, Host] = {}
        """of each job"""
        self.pace_s = world.random.choice([12, 60])
        """seconds between two checkpoints, at most"""
        self.freeze_rate = 0.0
        self.finished: list[Host] = []
        self.ends: dict[Host, str] = {}
        self._last_owner, self._owned_s = "", 0.0

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def start_job(self, job: str, same_job: bool = False, error_rate: float | None = None) -> None:
        """Starts a job on a host of its own."""
        host = self.world.host(f"host{len(self.world.hosts) + 1}")
        host.facts = {"open": [], "job": job}
        host.clock_rate = self.world.random.uniform(0.99, 1.01)
        rate = self.world.random.choice([0.0, 0.05, 0.3])
        rate = rate if error_rate is None else error_rate
        self.networks[host] = Network(host, rate, self.bucket.has_files)
        self.networks[host].pause = lambda: self._pause(host)
        self.last_host[job] = host
        if self.networks[host].error_rate:
            self.calm_since_s[host] = CHAOS_S
        self.world.note(host.name, f"starts {job}{' again' if same_job else ''}")
        self.world.start(host, "job", lambda: self._job(host, same_job))

    def _job(self, host: Host, same_job: bool) -> None:
        try:
            self._train(host, same_job)
            self.ends[host] = "complete"
        except (RunDirectoryError, DataError, CheckpointError) as error:
            self.ends[host] = str(error)
        finally:
            self.owners.pop(host, None)
        self.world.note(host.name, f"ends: {self.ends[host]}")
        if f"in use by process 1 on {host.name}:" in self.ends[host]:
            self.violated(f"{host.name} is refused because of itself")

    def _train(self, host: Host, same_job: bool) -> None:
        folder = self.folder / host.name / "r"
        (folder / "checkpoints").mkdir(parents=True)
        copy = mirror.Mirror(URL, "r", same_job)
        self.owners[host] = copy, self.world.now_s
        try:
            reported = self.reported
            copy.fetch(folder)
            saved, _ = checkpoint.newest(folder / "checkpoints")
            step = 0
            if saved:
                step = saved.global_step
            self.world.note(host.name, f"goes on from step {step}")
            if step < reported:
                self.violated(f"{host.name} goes on from step {step} although {reported} was copied")
            while step < STEPS:
                self.world.sleep(self.world.random.uniform(1, self.pace_s))
                self._check_loss(host, copy)
                copy.lease.raise_if_lost()
                step += EVERY
                arrays = {"w": np.array([step, len(self.world.hosts)])}
                checkpoint.save(folder / "checkpoints", step, {"state": arrays}, {"metrics": {"by": host.name}})
                checkpoint.prune(folder / "checkpoints", 1, "none")
                with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                    file.write(f"{host.name} {step}\n")  # of another size each time: times of files may be coarse
                copy.add(folder)
            copy.finish(folder)
            self.finished.append(host)
        finally:
            copy.close()

    # ---- faults ------------------------------------------------------------------------------------------------------

    def disturb(self, host: Host, kind: str) -> None:
        """Disturbs a host. Its launcher or another user may then start the run on another one."""
        draw, now_s = self.world.random, self.world.now_s
        seconds = draw.choice([5, 30, 90, 200]) * draw.random()
        self.calm_since_s[host] = max(self.calm_since_s.get(host, 0.0), now_s + seconds)
        if kind == "die":
            host.die()
        elif kind.startswith("freeze"):
            host.freeze(seconds)
        else:
            self.networks[host].cut_until_s = now_s + seconds
            self.world.note(host.name, f"has no network for {seconds:.0f} s")
        if kind == "die" or kind.endswith("restart"):
            is_again = draw.random() < 0.5
            self.world.at(now_s + draw.uniform(0, 100), lambda: self._restart(host, is_again))

    def _restart(self, host: Host, is_again: bool) -> None:
        job = host.facts["job"]
        if not is_again:
            self.start_job(f"job{len(self.world.hosts) + 1}")
        elif self.last_host[job] is host:  # a launcher has one attempt at a time
            self.start_job(job, same_job=True)

    def _pause(self, host: Host) -> None:
        """Freezes a host in the middle of what it does, in some schedules."""
        if self.world.now_s < CHAOS_S / 3 and self.world.random.random() < self.freeze_rate:
            self.disturb(host, "freeze and restart")
            self.world.sleep(0)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def on_reported(self, saved: Path) -> None:
        """A job has copied a checkpoint, as it believes."""
        step = checkpoint.step_of(saved.name)
        who = saved.parents[2].name
        self.world.note(who, f"reports that {step} is copied")
        self.reported = max(self.reported, step)
        self._check_newest(who, f"nothing after {saved.name}")

    def on_change(self, host: Host, name: str) -> None:
        if name.startswith(CHECKPOINTS):
            self._check_newest(host.name, name)
        elif name == f"{FOLDER}/{LEASE}":
            owner = self._owner()
            if owner and owner != self._last_owner:
                self._last_owner, self._owned_s = owner, self.world.now_s

    def on_write(self, host: Host, name: str) -> None:
        """A job begins to write an object other than the lease."""
        since_s = self.world.now_s - self._owned_s
        self.check_owners()
        if self._last_owner != host.name and since_s > LONGEST_LOSS_S:
            self.violated(f"{host.name} writes {name}: {self._last_owner} has had the lease for {since_s:.0f} s")

    def _owner(self) -> str:
        text = self.bucket.objects.get(f"{FOLDER}/{LEASE}", b"").decode()
        return lease.parse_object(text).get("host", "")

    def _check_newest(self, who: str, what: str) -> None:
        """The newest checkpoint that was reported as copied, or a later one, can be loaded."""
        newest = max(self.bucket.whole_steps(CHECKPOINTS).values(), default=0)
        if newest < self.reported:
            self.violated(f"{who} has changed {what}: the newest whole copy is of step {newest}, not {self.reported}")

    def _check_loss(self, host: Host, copy: mirror.Mirror) -> None:
        """A job keeps its lease if nothing disturbs it, nor the one that gets it."""
        others = [other for other in self.calm_since_s if other is not host]
        is_disturbed = any(other.name in (host.name, self._last_owner) for other in self.calm_since_s)
        is_sure = not is_disturbed and (self.bucket.has_conditions or not others)
        is_new = self.world.now_s < self.owners[host][1] + lease.RENEWED_S
        if copy.lease.is_lost and is_sure and not is_new:
            self.violated(f"{host.name} has lost the lease, although nothing disturbed it")

    def check_owners(self) -> None:
        """Of the jobs that nothing has disturbed for a while, one at most has the lease."""
        names = []
        for host, (copy, since_s) in self.owners.items():
            is_calm = max(since_s, self.calm_since_s.get(host, 0.0)) < self.world.now_s - LONGEST_LOSS_S
            if is_calm and not (host.is_dead or copy.lease.is_lost):
                names.append(host.name)
        if len(names) > 1:
            self.violated(f"{' and '.join(names)} have the lease")

    def check_end(self) -> None:
        """Every job has come to an end, and one of them has completed the run."""
        for task in self.world.tasks:
            if task.error:
                self.violated(f"{task.host.name}: {task.error!r}")
            if not (task.is_done or task.host.is_dead):
                self.violated(f"{task.name} of {task.host.name} has not ended")
        if not self.finished:
            ends = "; ".join(f"{host.name}: {end}" for host, end in self.ends.items())
            self.violated(f"no job has completed the run: {ends}")
        elif STEPS not in self.bucket.whole_steps(CHECKPOINTS).values():
            self.violated(f"the last checkpoint is not there: {[*self.bucket.objects]}")

    def violated(self, what: str) -> None:
        self.world.note("", f"VIOLATED: {what}")
        self.violation = self.violation or what


def disturb(run: Run) -> None:
    """Draws which jobs start when, and what happens to their hosts."""
    world, draw = run.world, run.world.random
    kinds = draw.sample(["die", "freeze", "cut", "freeze and restart", "cut and restart"], draw.randint(1, 5))
    run.freeze_rate = draw.choice([0.0, 0.0, 0.03])
    for number in range(draw.randint(1, 3)):
        world.at(draw.uniform(0, 3), lambda number=number: run.start_job(f"job{number}"))
    for _ in range(draw.randint(1, 8)):
        world.at(draw.uniform(0, CHAOS_S / 3), lambda: _disturb_one(run, draw.choice(kinds)))


def _disturb_one(run: Run, kind: str) -> None:
    running = [host for host in run.world.hosts if not host.is_dead and host not in run.ends]
    if running:
        run.disturb(run.world.random.choice(running), kind)


def calm(run: Run) -> None:
    """Ends all disturbance."""
    for network in run.networks.values():
        network.error_rate = network.cut_until_s = 0.0
    for host in run.world.hosts:
        host.frozen_until_s = min(host.frozen_until_s, run.world.now_s)
    run.world.note("", "all is calm")


def simulate(seed: int, is_traced: bool = False) -> Run:
    """Runs one schedule."""
    world = World(seed, is_traced)
    in_memory = MEMORY if Path(MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=in_memory) as folder:
        run = Run(world, Path(folder))
        with _of_production(run):
            disturb(run)
            world.run(CHAOS_S)
            calm(run)
            world.run(CALM_S)
            run.check_owners()
            if not run.finished:
                run.start_job("last", error_rate=0.0)
            world.run(END_S)
            run.check_end()
            world.end()
    return run


class _Open:
    """Mirrors that are open in the process of the current host."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _list(self) -> list[Any]:
        return self._world.current_host.facts["open"]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list())

    def __contains__(self, copy: Any) -> bool:
        return copy in self._list()

    def append(self, copy: Any) -> None:
        self._list().append(copy)

    def remove(self, copy: Any) -> None:
        self._list().remove(copy)


class _Environ:
    def __init__(self, world: World) -> None:
        self._world = world

    def get(self, name: str, default: str = "") -> str:
        return Attempt(job=self._world.current_host.facts["job"]).to_json() if name == ATTEMPT else default


@contextlib.contextmanager
def _of_production(run: Run) -> Iterator[None]:
    """Gives the tested modules the simulated time, store and process."""
    world = run.world
    copy_checkpoint = mirror.Mirror._copy_checkpoint

    def copy_and_report(copy: mirror.Mirror, saved: Path) -> None:
        copy_checkpoint(copy, saved)
        run.on_reported(saved)

    def store_of(url: str) -> tuple[Store, str]:
        return Store(run.bucket, run.networks[world.current_host], run.on_write), url.partition("://")[2]

    def uuid4() -> SimpleNamespace:
        return SimpleNamespace(hex=f"{world.random.getrandbits(128):032x}")

    hosts = SimpleNamespace(gethostname=lambda: world.current_host.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place(world, lease, mirror, data_files, checkpoint))
        for place, name, value in [
            (mirror, "store_of", store_of),
            (mirror, "_open", _Open(world)),
            (mirror, "atexit", SimpleNamespace(register=lambda _: None, unregister=lambda _: None)),
            (mirror.Mirror, "_copy_checkpoint", copy_and_report),
            (lease, "uuid", SimpleNamespace(uuid4=uuid4)),
            (lease, "socket", hosts),
            (lease, "os", SimpleNamespace(environ=_Environ(world), getpid=lambda: 1)),
            (checkpoint, "socket", hosts),
            (checkpoint.os, "fsync", lambda _: None),
        ]:
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield
