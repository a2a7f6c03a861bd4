"""The run folder: its name, its lock against a second process, and summary.json."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ringtrain.errors import RunDirectoryError
from ringtrain.protocol.json_text import parse_json

METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
LOCK = ".lock"
LEASE_S = 30.0
"""seconds that a restart gives the process of the attempt before to end: as long as a host agent lives on its own"""
EXPIRY_S = 100.0
"""seconds after which a file server has released the locks of a lost host: NFSv4's lease is 90 s"""
SCHEDULED_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX")


def default_name(data_name: str, now_s: float | None = None) -> str:
    """A run's name where none was given, e.g. "digits-20261120-101500".

    Args:
        now_s: seconds since 1970; None: now.
    """
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in data_name)
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"


def create_folder(parent: Path, name: str, number_if_taken: bool, go_on: bool = False) -> Path:
    """Makes the folder of a run, and those inside it.

    Args:
        parent: the folder of all runs; made if it is missing.
        number_if_taken: take name-2, name-3, ... where there is one already; else that is an error.
        go_on: a run's folder of that name is used again.

    Returns:
        The new folder.

    Raises:
        RunDirectoryError: it exists already and holds files, or cannot be made.
    """
    candidate, number = parent / name, 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        known = go_on and (candidate / "config.toml").is_file()
        while not known and not _claimed(candidate, only_new=number_if_taken):
            if not number_if_taken:
                raise RunDirectoryError(f"{candidate}: exists already: choose another --run.name, or delete it")
            number += 1
            candidate = parent / f"{name}-{number}"
        for folder in (candidate / "checkpoints", candidate / "tensorboard", candidate / "logs"):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{candidate}: cannot be created: {error.strerror}: choose another --run.directory"
        ) from error
    return candidate


def _claimed(folder: Path, only_new: bool) -> bool:
    """Makes a folder, or takes one without files, as a run that was killed while it began leaves it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return not only_new and _holds_no_files(folder)
    return True


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, or of one that was killed while it began."""
    return (folder / "config.toml").is_file() or _holds_no_files(folder)


def _holds_no_files(folder: Path) -> bool:
    return folder.is_dir() and all(path.is_dir() or path == folder / LOCK for path in folder.rglob("*"))


class RunLock:
    """Right of one process to write to a run's folder, until `release` or the end of the process.

    It is a lock of the open file .lock: the kernel gives it back when the process ends, however that happens, and NFS
    keeps it on the server for all hosts. A POSIX record lock, which any other close of the file in this process would
    give back, takes its place where there is none. The file stays, and says which process has or had the lock.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._file: IO[str] | None = None

    def take(self, folder: Path, same_job: bool = False) -> None:
        """Takes the lock of a folder, unless this object has it already; from another one in this process at once.

        Args:
            same_job: the lock may be held by an earlier attempt of this job, or by an earlier rank 0, as it may by an
                earlier start of the scheduler's job. It gets 30 s to end; after that the lock is taken from it if it
                is on another host: that host is lost. Any other process on another host gets 100 s.

        Raises:
            RunDirectoryError: another process holds it, or it cannot be written.
        """
        if self.folder == folder:
            return
        for other in [lock for lock in _taken if lock.folder == folder]:
            other.release()  # of a start that has failed
        path, begin_s, told = folder / LOCK, time.monotonic(), False
        try:
            while not self._locked(path):
                holder = _holder(path)
                elsewhere = _is_elsewhere(holder)
                earlier = same_job or _of_same_scheduled_job(holder)
                wait_s = LEASE_S if earlier else EXPIRY_S if elsewhere else 0.0
                process, host, since = (holder.get(key, "?") for key in ("process", "host", "since"))
                by = f"process {process} on {host} since {since}"
                if time.monotonic() < begin_s + wait_s:
                    if elsewhere and not told:
                        why = f"waiting up to {wait_s:g} s: if that host is lost, its lock expires"
                        print(f"ringtrain: {folder}: in use by {by}: {why}", file=sys.stderr, flush=True)
                        told = True
                    time.sleep(0.2)
                elif earlier and elsewhere:
                    path.unlink(missing_ok=True)  # another file, which the server has no lock for
                else:
                    raise RunDirectoryError(
                        f"{folder}: in use by {by}: wait until it ends, or choose another --run.name; if that host is"
                        f" lost, delete {path}"
                    )
        except OSError as error:
            raise RunDirectoryError(
                f"{path}: cannot be written: {error.strerror}: choose another --run.directory"
            ) from error
        self.folder = folder
        _taken.add(self)

    def _locked(self, path: Path) -> bool:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            return False
        except OSError as error:
            why = f"the file system has no locks ({error.strerror}): make sure that no other job has this --run.name"
            print(f"ringtrain: {path}: {why}", file=sys.stderr, flush=True)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.close()  # it was deleted in this moment
            return self._locked(path)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(json.dumps(_this_process() | {"since": since}) + "\n")
        file.flush()
        self._file = file
        return True

    def release(self) -> None:
        """Gives the lock back, if this process has it."""
        self._close()
        self.folder = None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


_taken: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in _taken:
        lock._close()


# The lock is held until every process that has the open file has closed it: one that was forked must not have it.
os.register_at_fork(after_in_child=_close_in_child)


def _lock(file: IO[str]) -> None:
    whole = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
    except (BlockingIOError, PermissionError):
        raise
    except OSError:  # the kernel or the file system has no such locks
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _this_process() -> dict[str, Any]:
    """Host, boot, process and the scheduler's job of this process, as a lock's file has them."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "process": os.getpid(),
        "job": " ".join(os.environ[name] for name in SCHEDULED_JOB if os.environ.get(name)),
        "requeued": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def _is_elsewhere(holder: Mapping[str, Any]) -> bool:
    """Whether a lock's holder is on another host: by its name, or by its boot where two have one name."""
    own = _this_process()
    return any(holder.get(key) not in (None, "", own[key]) for key in ("host", "boot"))


def _of_same_scheduled_job(holder: Mapping[str, Any]) -> bool:
    """Whether a lock's holder belongs to an earlier start of the scheduler's job that this process belongs to."""
    own = _this_process()
    if not own["job"] or holder.get("job") != own["job"]:
        return False
    # Slurm counts its requeues: within one, the holder is another launch, which may still train.
    return "SLURM_JOB_ID" not in os.environ or holder.get("requeued") != own["requeued"]


def _holder(path: Path) -> dict[str, Any]:
    """Host, process and begin of the process that has a lock, as far as they are known."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json.

    Args:
        summary: what came out; numbers that are not finite are written as null.
    """
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False)
    unfinished = folder / "summary.unfinished"
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, folder / "summary.json")


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns summary.json, or {} if there is none or it is incomplete."""
    path = folder / "summary.json"
    try:
        summary = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}


def plain(value: Any) -> Any:
    """The value as JSON can say it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
