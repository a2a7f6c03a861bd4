"""Run folder: its name, its lock against a second process, and summary.json."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import socket
import struct
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ringtrain.errors import RunDirectoryError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.json_text import parse_json, parse_object
from ringtrain.run import durable

if TYPE_CHECKING:
    from ringtrain.run.mirror import Mirror

METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
MAX_RECORDS_BYTES = 1 << 20
"""of metrics.jsonl, up to which other hosts get it"""
NO_METRICS = (
    "epoch",
    "global_step",
    "time_s",
    "train_s",
    "evaluate_s",
    "learning_rate",
    "loss_scale",
    "gradient_norm",
    "images_per_s",
)
"""keys of these files that are no metrics"""
LOCK = ".lock"
LEASE_S = 30.0
"""Seconds that a restart gives the previous attempt's process to exit, equal to the lease timeout of a host agent."""
EXPIRY_S = 100.0
"""Seconds after which a file server has released the locks of a lost host. NFSv4's lease is 90 s."""
MAX_BYTES = 4096
"""of this file that are read"""
MAX_PAUSE_S = 5.0
"""that counts between two looks at a lock: what happened while this process was frozen is not known"""
LOOK_S = 5.0
"""seconds between two looks of the lock's holder whether another process has taken it over"""
LEASE = ".lease"
"""file in a run's mirror that names its writer"""
LEASE_EXPIRES_S = 60.0
"""seconds without a change after which a lease is that of a lost process"""
SCHEDULED_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX")


def script_name() -> str:
    """Name of the script or module that this process runs; "" for one of ringtrain's, and in a notebook."""
    main = sys.modules["__main__"]
    if main.__spec__:  # python -m
        name = main.__spec__.name.removesuffix(".__main__")
        return "" if name.startswith("ringtrain.") else name
    return Path(getattr(main, "__file__", "")).stem


def default_name(script_or_data: str, now_s: float | None = None) -> str:
    """Returns the default name of a run, e.g. "digits-20261120-101500". `now_s`: Unix time; None: now."""
    stem = re.sub(r"[^\w.-]", "-", script_or_data)
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}"


def create_folder(parent: Path, name: str, number_if_taken: bool, reuse: bool = False) -> Path:
    """Creates the run folder and its subfolders, or raises RunDirectoryError.

    Args:
        number_if_taken: try name-2, name-3, ... if the name is taken; otherwise that is an error.
        reuse: reuse the folder of a run of that name.
    """
    candidate, number = parent / name, 1
    try:
        durable.make_folders(parent)
        known = reuse and _has_run(candidate)
        while not known and not _claimed(candidate, only_new=number_if_taken):
            if not number_if_taken:
                raise RunDirectoryError(f"{candidate}: exists already: choose another --run.name, or delete it")
            number += 1
            candidate = parent / f"{name}-{number}"
        make_subfolders(candidate)
        durable.flush(parent)
    except OSError as error:
        raise RunDirectoryError(
            f"{candidate}: cannot be created: {error.strerror}: choose another --run.directory"
        ) from error
    return candidate


def make_subfolders(folder: Path) -> None:
    """Makes the folders in a run folder."""
    for name in ("checkpoints", "tensorboard", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)


def _claimed(folder: Path, only_new: bool) -> bool:
    """Creates a folder, or takes one without files, as left by a run that ended at its start."""
    try:
        folder.mkdir()
    except FileExistsError:
        return not only_new and _holds_no_files(folder)
    return True


def is_run(folder: Path) -> bool:
    """Returns whether a folder is that of a run, including one that was killed at its start."""
    return _has_run(folder) or _holds_no_files(folder)


def _has_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or any(folder.glob("checkpoints/step-*"))


def _holds_no_files(folder: Path) -> bool:
    files = (path for path in folder.rglob("*") if not path.is_dir() and path.suffix != durable.UNFINISHED)
    return folder.is_dir() and all(path == folder / LOCK for path in files)


class RunLock:
    """Exclusive right of one process to write to a run folder, until `release` or the end of the process.

    It is a lock of the open file .lock: the kernel releases it when the process ends, for whatever reason, and NFS
    keeps it on the server for all hosts. Where there are no such locks, a POSIX record lock is used, which any other
    close of the file in this process would release. The file remains, and names the process that holds or held the
    lock. A file server releases the lock of a frozen host, and a restart takes it over: the file then names another
    process, and the frozen one no longer writes.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.mirror: Mirror | None = None
        """of the run, which is given up with the lock"""
        self._file: IO[str] | None = None
        self._facts: Mapping[str, Any] = {}
        """that this process has written to the file"""
        self._is_of_process = False
        """It is a POSIX record lock."""
        self._taken_by = ""
        """process that has taken it over"""
        self._looked_s = 0.0

    def take(self, folder: Path, same_job: bool = False) -> None:
        """Takes the lock of a folder, unless this object holds it. Another lock of this process is released first.

        With `same_job`, an earlier attempt or rank 0 of this job may hold it. That process gets 30 s to exit, as does
        an earlier start of the scheduler's job. The lock is then taken over if the holder is on another host, which is
        considered lost. Any other process on another host gets 100 s. Raises RunDirectoryError.
        """
        if self.folder == folder:
            return
        for other in [lock for lock in _taken if lock.folder == folder]:
            other.release()  # of a failed start
        path, known, reported = folder / LOCK, None, False
        waited_s, looked_s = 0.0, time.monotonic()
        try:
            while not self._locked(path):
                holder, now_s = _holder(path), time.monotonic()
                waited_s += min(now_s - looked_s, MAX_PAUSE_S)
                looked_s = now_s
                if holder != known:  # each gets its time: one that is not known yet may be a later attempt
                    known, waited_s = holder, 0.0
                elsewhere = _is_elsewhere(holder)
                earlier = _is_earlier_attempt(holder, same_job) or _of_same_scheduled_job(holder)
                wait_s = 0.0
                if earlier:
                    wait_s = LEASE_S
                elif elsewhere:
                    wait_s = EXPIRY_S
                by = _name(holder)
                if waited_s < wait_s:
                    if elsewhere and not reported:
                        why = f"waiting up to {wait_s:g} s: if that host is lost, its lock expires"
                        print(f"ringtrain: {folder}: in use by {by}: {why}", file=sys.stderr, flush=True)
                        reported = True
                    time.sleep(0.2)
                elif earlier and elsewhere:
                    path.unlink(missing_ok=True)  # the server has no lock for a new file
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
            self._is_of_process = _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            return False
        except OSError as error:
            why = f"the file system has no locks ({error.strerror}): make sure that no other job has this name"
            print(f"ringtrain: {path}: {why}", file=sys.stderr, flush=True)
        is_same = False
        with contextlib.suppress(FileNotFoundError):
            is_same = os.path.samestat(os.fstat(file.fileno()), path.stat())
        if not is_same:
            file.close()  # it was deleted meanwhile
            return self._locked(path)
        file.truncate(0)
        self._facts = _this_process() | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.write(json.dumps(self._facts) + "\n")
        file.flush()
        with contextlib.suppress(OSError):  # not on every file system
            os.fsync(file.fileno())  # other hosts read it
        self._file = file
        self._taken_by, self._looked_s = "", time.monotonic()
        if self._other(path) is not None:  # taken over while this process was frozen
            self._close()
            return False
        return True

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken over the folder or its mirror. Looks at the file every few seconds."""
        if time.monotonic() > self._looked_s + LOOK_S:
            self._look()
        return bool(self._taken_by) or (self.mirror is not None and self.mirror.lease.is_lost)

    def raise_if_lost(self) -> None:
        """Raises RunDirectoryError if another process has taken over the folder or its mirror. Looks at the file."""
        self._look()
        if self._taken_by:
            raise RunDirectoryError(
                f"{self.folder}: taken over by {self._taken_by}: this job ends: choose another --run.name"
            )
        if self.mirror is not None:
            self.mirror.lease.raise_if_lost()

    def _look(self) -> None:
        if self.folder is None or self._file is None or self._taken_by:
            return
        self._looked_s = time.monotonic()
        other = self._other(self.folder / LOCK)
        if other is not None:
            self._taken_by = _name(other)

    def _other(self, path: Path) -> dict[str, Any] | None:
        """Returns what another process has written to the lock's file; None if none has, as far as known."""
        own = self._file.fileno() if self._file else -1
        with contextlib.suppress(OSError, ValueError):  # it was deleted, or cannot be read now
            if self._is_of_process and os.path.samestat(os.fstat(own), path.stat()):
                text = os.pread(own, MAX_BYTES, 0).decode()  # a close of the path would release the lock
            else:
                text = path.read_text(encoding="utf-8")  # opened anew: file servers then send what it holds now
            facts = parse_object(text)
            return None if facts == self._facts else facts
        return None

    def release(self, to_own_job: bool = False) -> None:
        """Releases the lock, if this process holds it. With `to_own_job`, another rank takes it, and waits for it."""
        if self.mirror and to_own_job:
            self.mirror.hand_over()
        elif self.mirror:
            self.mirror.close()
        self.mirror = None
        self._close()
        self.folder = None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


_taken: weakref.WeakSet[RunLock] = weakref.WeakSet()


def is_locked(folder: Path) -> bool:
    """Returns whether a process, on any host, holds the lock of a run folder: whether the run is going on.

    It only asks. False where the file system has no locks, and on an NFS server that does not tell other hosts.
    """
    query = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    with contextlib.suppress(OSError), open(folder / LOCK, "rb") as file:
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, query)
        return bool(struct.unpack("hhqqi0q", answer)[0] != fcntl.F_UNLCK)
    return False


def _close_in_child() -> None:
    for lock in _taken:
        lock._close()


# The lock is held until every process with the open file has closed it: a forked process must not keep it.
os.register_at_fork(after_in_child=_close_in_child)


def _lock(file: IO[str]) -> bool:
    """Locks an open file; returns whether by a lock of the process. Raises BlockingIOError if another one holds it."""
    whole = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
        return False
    except (BlockingIOError, PermissionError):
        raise
    except OSError:  # not supported by the kernel or the file system
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True


def _this_process() -> dict[str, Any]:
    """Returns host, boot, process and scheduler's job of this process, as written to the lock file."""
    attempt = Attempt.from_environment(os.environ)
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "process": os.getpid(),
        "job": " ".join(os.environ[name] for name in SCHEDULED_JOB if os.environ.get(name)),
        "requeued": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "launch": attempt.job,
        "attempt": attempt.number,
    }


def _is_elsewhere(holder: Mapping[str, Any]) -> bool:
    """Returns whether a lock's holder is on another host: by its name, or by its boot if two hosts share a name.

    True of a holder that is not known, since it was lost before it had written who it is.
    """
    process = _this_process()
    return not holder or any(holder.get(key) not in (None, "", process[key]) for key in ("host", "boot"))


def _is_earlier_attempt(holder: Mapping[str, Any], same_job: bool) -> bool:
    """Returns whether a lock's holder may be an earlier attempt of this process's job, or rank 0 of this attempt."""
    process = _this_process()
    if not same_job or holder.get("launch", process["launch"]) != process["launch"]:
        return False
    number = holder.get("attempt", 0)
    return not isinstance(number, int) or number <= process["attempt"]


def _of_same_scheduled_job(holder: Mapping[str, Any]) -> bool:
    """Returns whether a lock's holder belongs to an earlier start of this process's scheduler job."""
    process = _this_process()
    if not process["job"] or holder.get("job") != process["job"]:
        return False
    # Slurm counts requeues: with an equal count, the holder is another launch, which may still be training.
    return "SLURM_JOB_ID" not in os.environ or _requeues(holder) < _requeues(process)


def _requeues(facts: Mapping[str, Any]) -> int:
    text = str(facts.get("requeued"))
    return int(text[:9]) if text.isdecimal() else 0


def _holder(path: Path) -> dict[str, Any]:
    """Returns host, process and start time of a lock's holder, as far as known."""
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _name(holder: Mapping[str, Any]) -> str:
    process, host, since = (holder.get(key, "?") for key in ("process", "host", "since"))
    return f"process {process} on {host} since {since}"


def records_of(folder: Path) -> str:
    """Metrics of a run's epochs so far, as in metrics.jsonl, for other hosts; "" if there are none, or too many."""
    with contextlib.suppress(OSError):
        if (folder / METRICS).stat().st_size <= MAX_RECORDS_BYTES:
            return (folder / METRICS).read_text(encoding="utf-8")
    return ""


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json, with null for numbers that are not finite."""
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False)
    durable.write(folder / "summary.json", text + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns summary.json, or {} if there is none or it is incomplete."""
    path = folder / "summary.json"
    try:
        summary = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}


def plain(value: Any) -> Any:
    """Returns a value that JSON can represent: non-finite numbers become None."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
