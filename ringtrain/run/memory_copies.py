"""Copies of a run's state in the memory of its hosts, from which it goes on after the loss of any one of them.

    /dev/shm/ringtrain-USER/NAME-HASH/    of one run, on each host
        step-00000440/                    a checkpoint as on disk, with a SHA-256 of every file; the newest two are kept
        memory.json                       ID of the run, and of the launch whose ranks write here

Weights and optimizer are equal on all ranks, so the first rank of each host writes its own copy: only what differs
between ranks, and what rank 0 alone has, is sent for it. The files outlive the processes, not the host.

A run gets its ID when it begins anew. The ID is in memory.json of its folder, too, and in the manifest of every copy.
A copy is taken only if it has the ID of rank 0's folder, or one that this launch has written in an earlier attempt.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain import config_io
from ringtrain.config import Config
from ringtrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from ringtrain.protocol.json_text import parse_object
from ringtrain.run import checkpoint, durable
from ringtrain.run.run_folder import METRICS

if TYPE_CHECKING:
    from ringtrain.run.context import Job, Process
    from ringtrain.run.resume import Start

OPTION = "checkpoint.memory_every_steps"
ROOT = Path("/dev/shm")
"""file system in memory that every Linux has"""
MARK = "memory.json"
KEEP = 2
PIECE_BYTES = 1 << 26
"""of a file that are sent to rank 0 in one message"""


@dataclass(frozen=True)
class Copy:
    """A copy as other ranks see it.

    Attributes:
        run: ID of the run.
        digest: SHA-256 of its manifest, which is equal on all hosts.
        sizes: Bytes of its files.
    """

    step: int
    run: str
    digest: str
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Host:
    """What a host has in memory of one run; nothing on ranks other than its first.

    Attributes:
        job, run: IDs of the launch and the run whose ranks have last written here.
        problems: Why copies are left out.
    """

    name: str = ""
    job: str = ""
    run: str = ""
    copies: tuple[Copy, ...] = ()
    problems: tuple[str, ...] = ()


class Copies:
    """Copies of one run on this host; held by the host's first rank.

    Args:
        folder: In memory; see `folder_of`.
        run: ID of the run.
        job: ID of the launch.
        step: Step after which training starts. Later copies belong to a past that is left.

    Raises:
        OSError: The folder cannot be written, or belongs to another user.
    """

    def __init__(self, folder: Path, run: str, job: str, step: int) -> None:
        self.folder, self.run = folder, run
        self.facts: dict[str, Any] = {"count": 0, "write_s": 0.0, "failed": []}
        """for the summary"""
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        _check_own(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._of_run: set[str] = set()
        """names of this run's copies; those of others go when the first one is written"""
        for copy in in_memory(folder).copies:
            if copy.run != run:
                continue
            if copy.step > step:
                shutil.rmtree(folder / _name(copy.step), ignore_errors=True)
            else:
                self._of_run.add(_name(copy.step))
        for path in folder.glob(f"{checkpoint.UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        _write_mark(folder, run, job)

    def write(self, step: int, files: Mapping[str, Mapping[str, NDArray[Any]]], facts: Mapping[str, Any]) -> None:
        """Writes a copy in place of the oldest one; reports a failure once, and training continues."""
        begin_s = time.perf_counter()
        try:
            of_run = [path for path in checkpoint.saved_in(self.folder) if path.name in self._of_run]
            for path in checkpoint.saved_in(self.folder):
                if path not in of_run[: KEEP - 1]:
                    shutil.rmtree(path)
            checkpoint.save(self.folder, step, files, {**facts, "run": self.run})
            self._of_run.add(_name(step))
            self.facts["count"] += 1
        except (OSError, CheckpointError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if not self.facts["failed"]:
                text = f"{self.folder}: cannot be written: {why}; training continues without this copy"
                print(f"ringtrain: {text}", file=sys.stderr, flush=True)
            self.facts["failed"].append({"global_step": step, "error": str(why)})
        self.facts["write_s"] += time.perf_counter() - begin_s


# ---- before training -------------------------------------------------------------------------------------------------


def fetch(process: Process) -> bool:
    """Copies the newest state in the memory of the hosts to rank 0's disk, if it is newer than what is there.

    Every copy is compared with its checksums after it has arrived. One that is damaged is reported, and the next newest
    is taken. Collective.

    Returns:
        Whether there is one, with which the run goes on.
    """
    from ringtrain import hvd

    config, rank = process.config, hvd.rank()
    if process.strategy.ranks_change:
        raise ConfigError(
            f"{OPTION} does not work in elastic jobs, whose other ranks have the state when one is lost: leave one out"
        )
    if not config.run.name or (config.run.resume == "never" and not process.attempt.number):
        return False
    run = Path(config.run.directory) / config.run.name
    here = hvd.run_together(lambda: in_memory(folder_of(run)) if hvd.local_rank() == 0 else Host())
    hosts = hvd.allgather_object(here, name="ringtrain_memory")
    if not any(host.copies or host.problems for host in hosts):
        return False
    # Rank 0 knows its disk, and decides.
    choice = hvd.run_together(lambda: _wanted(hosts, process, run) if rank == 0 else (frozenset(), 0))
    runs, disk_step = hvd.broadcast_object(choice, 0, name="ringtrain_memory")
    found, notes = candidates(hosts, runs, disk_step)
    fetched = False
    for copy, source in found:
        problem = _copy_to_disk(copy, source, run, config)
        fetched, name = not problem, hosts[source].name
        if fetched:
            notes.append(f"step {copy.step:,} is from the memory of {name}")
            break
        notes.append(f"memory of {name}: {problem}: not taken")
    for note in notes if rank == 0 else ():
        print(f"ringtrain: {note}", file=sys.stderr, flush=True)
    return fetched


def begin(process: Process, job: Job, folder: Path, start: Start) -> None:
    """Opens the run's copies on each host that has memory for them, and adds their row to the plan. Collective."""
    from ringtrain import hvd

    every = process.config.checkpoint.memory_every_steps
    if not every:
        return
    _refuse(job.model)
    run = hvd.broadcast_object(
        hvd.run_together(lambda: _id_of(folder, start, process) if hvd.rank() == 0 else ""), 0, name="ringtrain_memory"
    )
    needed_bytes = KEEP * _num_bytes(job.model)

    def open_here() -> tuple[str, int, str]:
        """Host, free bytes and why it has no copies."""
        if hvd.local_rank():
            return "", 0, ""
        host, memory = socket.gethostname(), folder_of(folder)
        try:
            copies = Copies(memory, run, process.attempt.job, start.global_step)
            free_bytes = free_in_memory(memory)
        except OSError as error:
            return host, 0, f"{error.filename or memory}: {error.strerror}"
        if free_bytes < needed_bytes:
            return host, free_bytes, f"{free_bytes / 1e6:,.0f} MB free in {ROOT}, {needed_bytes / 1e6:,.0f} MB needed"
        process.memory = copies
        return host, free_bytes, ""

    opened = [on_host for on_host in hvd.allgather_object(open_here(), name="ringtrain_memory") if on_host[0]]
    row = f"every {every} steps, {KEEP} x {needed_bytes / KEEP / 1e6:,.3g} MB in {ROOT} of each host"
    free = [free_bytes for _, free_bytes, problem in opened if not problem]
    if free:
        row += f", of which {min(free) / 1e6:,.0f} MB are free"
    without = [f"{host} ({problem})" for host, _, problem in opened if problem]
    if without:
        row += f"; none on {', '.join(without)}"
        if hvd.rank() == 0:
            print(f"ringtrain: {OPTION}: no copies on {', '.join(without)}", file=sys.stderr, flush=True)
    job.plan["memory copies"] = row


def end(process: Process) -> None:
    """Removes the copies of a complete run on this host."""
    from ringtrain import hvd

    config = process.config
    if not config.checkpoint.memory_every_steps or not config.run.name or hvd.local_rank():
        return
    remove(folder_of(Path(config.run.directory) / config.run.name))


def remove(folder: Path) -> None:
    """Removes the copies of a run on this host."""
    with contextlib.suppress(OSError):
        _check_own(folder.parent)
        shutil.rmtree(folder)
        folder.parent.rmdir()  # unless it has another run's


# ---- what is there ---------------------------------------------------------------------------------------------------


def folder_of(run: Path) -> Path:
    """Folder in memory for the copies of a run, given the run's folder."""
    path = hashlib.sha256(os.fsencode(run.absolute())).hexdigest()
    return ROOT / f"ringtrain-{os.getuid()}" / f"{run.name}-{path[:12]}"


def in_memory(folder: Path) -> Host:
    """Returns what this host has in memory of a run, without reading the arrays."""
    name = socket.gethostname()
    try:
        _check_own(folder.parent)
        paths = checkpoint.saved_in(folder)
    except FileNotFoundError:
        return Host(name)
    except OSError as error:
        return Host(name, problems=(f"{error.filename} on {name}: {error.strerror}",))
    mark, copies, problems = _mark_of(folder), [], []
    for path in paths:
        try:
            manifest, digest = checkpoint.read_manifest(path)
            sizes = {file: facts["bytes"] for file, facts in manifest["files"].items()}
            sizes[checkpoint.MANIFEST] = (path / checkpoint.MANIFEST).stat().st_size
            copies.append(Copy(manifest["global_step"], manifest["run"], digest, sizes))
        except DamagedCheckpoint as error:
            problems.append(f"memory of {name}: {error}: not taken")
        except (CheckpointError, OSError):  # of a newer ringtrain, or removed meanwhile
            continue
    return Host(name, mark.get("job", ""), mark.get("run", ""), tuple(copies), tuple(problems))


def candidates(
    hosts: Sequence[Host], runs: Collection[str], disk_step: int
) -> tuple[list[tuple[Copy, int]], list[str]]:
    """Returns copies that may be taken, newest first, each with a rank that has it; and why others are not.

    Args:
        hosts: By rank.
        runs: IDs of runs whose copies may be taken.
        disk_step: Newest step on disk, which a copy must exceed.
    """
    problems = [problem for host in hosts for problem in host.problems]
    sources: dict[tuple[int, str], list[int]] = {}
    copies: dict[tuple[int, str], Copy] = {}
    different: set[tuple[int, str]] = set()
    for rank, host in enumerate(hosts):
        for copy in host.copies:
            if copy.run not in runs or copy.step <= disk_step:
                continue
            key = copy.step, copy.run
            first = copies.setdefault(key, copy)
            sources.setdefault(key, []).append(rank)
            if copy.digest != first.digest:
                different.add(key)
    for step, _ in sorted(different):
        problems.append(f"copies of step {step:,} in memory differ between hosts: not taken")
    found = []
    for key in sorted(copies.keys() - different, reverse=True):
        for rank in sources[key]:
            found.append((copies[key], rank))
    return found, problems


def free_in_memory(folder: Path) -> int:
    """Bytes that copies in a folder may take: those free in the file system and the host, and those of older copies."""
    free = shutil.disk_usage(folder).free
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = min(free, 1024 * int(text.partition("MemAvailable:")[2].split()[0]))
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            free += path.stat().st_size
    return free


def _wanted(hosts: Sequence[Host], process: Process, run: Path) -> tuple[frozenset[str], int]:
    """IDs whose copies may be taken, and the newest step on disk, -1 if there is none; on rank 0."""
    newest, _ = checkpoint.newest(run / "checkpoints")
    disk_step = newest.global_step if newest else -1
    attempt, of_disk = process.attempt, _mark_of(run).get("run", "")
    # A restart: whatever this launch has written, as rank 0's disk may be another one.
    of_job = frozenset(host.run for host in hosts if attempt.number and host.job and host.job == attempt.job)
    if of_job:
        return of_job, disk_step
    if of_disk:
        return frozenset([of_disk]), disk_step
    # Without the run's folder, nothing tells an old run of this name from this one: a person has to.
    of_all = {copy.run for host in hosts for copy in host.copies}
    if process.config.run.resume == "must" and not newest:
        return frozenset([max(of_all, default="")]), disk_step
    if of_all and not newest:
        text = (
            f"{run} is new: copies in memory of an earlier run of this name are not taken; run.resume must takes them"
        )
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)
    return frozenset(), disk_step


def _check_own(folder: Path) -> None:
    """Raises OSError unless a folder is this user's alone: all users may write to its parent."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not a folder of this user alone", str(folder))


def _name(step: int) -> str:
    return f"step-{step:08d}"


# ---- IDs -------------------------------------------------------------------------------------------------------------


def _id_of(folder: Path, start: Start, process: Process) -> str:
    """ID of the run in a folder: a new one if it begins anew. On rank 0."""
    run = ""
    if start.source and Path(start.source).parent == folder / "checkpoints":
        run = str(_mark_of(folder).get("run", ""))
    run = run or f"{time.time_ns()}-{secrets.token_hex(8)}"  # the newest is the greatest
    _write_mark(folder, run, process.attempt.job)
    return run


def _mark_of(folder: Path) -> dict[str, Any]:
    try:
        return parse_object((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_mark(folder: Path, run: str, job: str) -> None:
    durable.write(folder / MARK, json.dumps({"run": run, "job": job}) + "\n")


# ---- from the memory of one host to the disk of another --------------------------------------------------------------


@dataclass
class _Arriving:
    """A checkpoint of which rank 0 writes the files as they arrive; does nothing after an error."""

    folder: Path
    problem: str = ""

    def write(self, name: str, content: NDArray[np.uint8]) -> None:
        if self.problem:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / name, "ab") as file:
                file.write(content.data)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror}"


def _copy_to_disk(copy: Copy, source: int, run: Path, config: Config) -> str:
    """Sends a copy to rank 0, which verifies it and makes it a checkpoint; returns why not, or "". Collective."""
    from ringtrain import hvd

    memory = folder_of(run) / _name(copy.step)
    arriving = _Arriving(run / "checkpoints" / f"{checkpoint.UNFINISHED}memory-{os.getpid()}")
    shutil.rmtree(arriving.folder, ignore_errors=True)
    for name, size in copy.sizes.items():
        for begin in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - begin)
            piece = np.zeros(0, np.uint8)
            if hvd.rank() == source:
                piece = _read(memory / name, begin, length)
            received = hvd.forward_bytes(piece, length, source, name="ringtrain_memory")
            if hvd.rank() == 0:
                arriving.write(name, received)
    install = functools.partial(_install, arriving, copy, run, config)
    problem = hvd.run_together(lambda: install() if hvd.rank() == 0 else "")
    return str(hvd.broadcast_object(problem, 0, name="ringtrain_memory"))


def _read(path: Path, begin: int, length: int) -> NDArray[np.uint8]:
    """Part of a file; zeros for what cannot be read, which its checksum then shows."""
    content = np.zeros(length, np.uint8)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(begin)
        file.readinto(content.data)
    return content


def _install(arriving: _Arriving, copy: Copy, run: Path, config: Config) -> str:
    """Makes a copy that has arrived the newest checkpoint of a run; returns why not, or ""."""
    if arriving.problem:
        shutil.rmtree(arriving.folder, ignore_errors=True)
        return arriving.problem
    try:
        saved = checkpoint.verify(arriving.folder)
        if checkpoint.read_manifest(arriving.folder)[1] != copy.digest:
            raise DamagedCheckpoint(f"{_name(copy.step)}: has changed meanwhile")
        # With these files, the folder is that of a run, as on the host that is lost.
        if not (run / "config.toml").exists():
            durable.write(run / "config.toml", config_io.to_toml(config))
        records = saved.manifest.get("records", "")
        if records:
            durable.write(run / METRICS, records)
        _write_mark(run, copy.run, "")
        final = run / "checkpoints" / _name(copy.step)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        os.rename(arriving.folder, final)
        durable.flush(final.parent)
    except CheckpointError as error:
        return str(error).replace(str(arriving.folder), _name(copy.step))
    except OSError as error:
        return f"{error.filename or run}: {error.strerror}"
    finally:
        shutil.rmtree(arriving.folder, ignore_errors=True)
    return ""


# ---- of the model ----------------------------------------------------------------------------------------------------


def _refuse(model: Any) -> None:
    """Raises ConfigError for a model of which no rank has the whole state."""
    from ringtrain import hvd
    from ringtrain.run import model_state

    sharded = any(hvd.part_of(variable) for variable in model_state.shared_variables(model))
    if sharded or hvd.local_steps_of(model) > 1:
        raise ConfigError(
            f"{OPTION}: the optimizer is sharded or makes local steps: no rank has the whole state: leave one out"
        )


def _num_bytes(model: Any) -> int:
    """Bytes of a copy, without what callbacks and reducers keep."""
    import tensorflow as tf

    from ringtrain import hvd
    from ringtrain.run import model_state

    of_ranks = [*hvd.seeds(model), *hvd.weights_of_one_rank(model)] * hvd.size()
    variables = [*model_state.shared_variables(model), *of_ranks]
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)
