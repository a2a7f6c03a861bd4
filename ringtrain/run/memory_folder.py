"""Folder with copies of a run's state in the memory of a host.

    /dev/shm/ringtrain-USER/NAME-HASH/    of one run, on each host
        step-00000440/                    a checkpoint as on disk, with a SHA-256 of every file; the newest two are kept
        memory.json                       ID of the run, and of the launch whose ranks write here

The files outlive the processes, not the host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ringtrain.errors import CheckpointError, DamagedCheckpoint
from ringtrain.protocol.json_text import parse_object
from ringtrain.run import checkpoint, durable

ROOT = Path("/dev/shm")
"""file system in memory that every Linux has"""
MARK = "memory.json"
KEEP = 2


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
    """Copies of one run in the memory of a host, as its first rank reports them. Its other ranks report none.

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
                shutil.rmtree(folder / name_of(copy.step), ignore_errors=True)
            else:
                self._of_run.add(name_of(copy.step))
        for path in folder.glob(f"{checkpoint.UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        write_mark(folder, run, job)

    def write(self, step: int, files: Mapping[str, Mapping[str, NDArray[Any]]], facts: Mapping[str, Any]) -> None:
        """Writes a copy in place of the oldest one; reports a failure once, and training continues."""
        begin_s = time.perf_counter()
        try:
            of_run = [path for path in checkpoint.saved_in(self.folder) if path.name in self._of_run]
            for path in checkpoint.saved_in(self.folder):
                if path not in of_run[: KEEP - 1]:
                    shutil.rmtree(path)
            checkpoint.save(self.folder, step, files, {**facts, "run": self.run})
            self._of_run.add(name_of(step))
            self.facts["count"] += 1
        except (OSError, CheckpointError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if not self.facts["failed"]:
                text = f"{self.folder}: cannot be written: {why}; training continues without this copy"
                print(f"ringtrain: {text}", file=sys.stderr, flush=True)
            self.facts["failed"].append({"global_step": step, "error": str(why)})
        self.facts["write_s"] += time.perf_counter() - begin_s


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
    mark, copies, problems = mark_of(folder), [], []
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


def remove(folder: Path) -> None:
    """Removes the copies of a run on this host."""
    with contextlib.suppress(OSError):
        _check_own(folder.parent)
        shutil.rmtree(folder)
        folder.parent.rmdir()  # unless it has another run's


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


def _check_own(folder: Path) -> None:
    """Raises OSError unless a folder is this user's alone: all users may write to its parent."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is not a folder of this user alone", str(folder))


def name_of(step: int) -> str:
    """Name of the copy of a step."""
    return f"step-{step:08d}"


def mark_of(folder: Path) -> dict[str, Any]:
    """IDs of the run, and of the launch, that a folder belongs to; {} if it does not say."""
    try:
        return parse_object((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write_mark(folder: Path, run: str, job: str) -> None:
    """Writes the IDs of a folder's run and launch."""
    durable.write(folder / MARK, json.dumps({"run": run, "job": job}) + "\n")
