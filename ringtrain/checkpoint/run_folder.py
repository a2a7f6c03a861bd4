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

from ringtrain.checkpoint import durable
from ringtrain.errors import RunDirectoryError
from ringtrain.protocol.json_text import parse_json, parse_object

if TYPE_CHECKING:
    from ringtrain.checkpoint.mirror import Mirror

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
    "images_per_s",
)
"""keys of these files that are no metrics"""
LOCK = ".lock"
WAIT_S = 100.0
"""Seconds that a restart waits for the lock. A file server releases that of a lost host meanwhile: NFSv4 after 90 s."""
REPORTED_S = 2.0
"""after which a wait is reported"""
FLOCK = "hhqqi0q"
"""struct flock: type, whence, start, length, process"""


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
    """Creates the run folder, with -2, -3, ... if taken; `reuse`: takes that of a run. Raises RunDirectoryError."""
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
    """Exclusive right to write to a run folder: a lock of the open file .lock, which ends with the process."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.mirror: Mirror | None = None
        """of the run, which is given up with the lock"""
        self._file: IO[str] | None = None

    def take(self, folder: Path, same_job: bool = False) -> None:
        """Takes the lock of a folder, unless this object holds it. Another lock of this process is released first."""
        if self.folder == folder:
            return
        for other in [lock for lock in _taken if lock.folder == folder]:
            other.release()  # of a failed start
        path = folder / LOCK
        end_s, reported_s = time.monotonic() + WAIT_S, time.monotonic() + REPORTED_S
        try:
            while not self._locked(path):
                by = _holder(path)
                if not same_job or time.monotonic() > end_s:  # else an earlier attempt or a lost host may end
                    raise RunDirectoryError(
                        f"{folder}: in use by {by}: wait until it ends, or choose another --run.name; if that host is"
                        f" lost, delete {path}"
                    )
                if time.monotonic() > reported_s:
                    why = f"waiting up to {WAIT_S:g} s until it has ended, or its file server has released the lock"
                    print(f"ringtrain: {folder}: in use by {by}: {why}", file=sys.stderr, flush=True)
                    reported_s = math.inf
                time.sleep(0.2)
        except OSError as error:
            raise RunDirectoryError(
                f"{path}: cannot be written: {error.strerror}: choose another --run.directory"
            ) from error
        self.folder = folder
        _taken.add(self)

    def _locked(self, path: Path) -> bool:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            # Not flock(2): others ask for it without taking it, and NFS has it between hosts.
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
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
        # The file remains, and names the process that holds or held the lock.
        facts = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.write(json.dumps(facts) + "\n")
        file.flush()
        with contextlib.suppress(OSError):  # not on every file system
            os.fsync(file.fileno())  # other hosts read it
        self._file = file
        return True

    @property
    def is_lost(self) -> bool:
        """Whether another job has become the writer of the run's mirror."""
        return self.mirror is not None and self.mirror.lost_to != ""

    def raise_if_lost(self) -> None:
        """Raises RunDirectoryError if another job has become the writer of the run's mirror."""
        if self.mirror is not None:
            self.mirror.raise_if_lost()

    def release(self) -> None:
        """Releases the lock, if this process holds it."""
        if self.mirror:
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
    """Asks whether a process, on any host, holds the lock of a run folder; False if the file system does not tell."""
    query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError), open(folder / LOCK, "rb") as file:
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, query)
        return bool(struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK)
    return False


def _close_in_child() -> None:
    for lock in _taken:
        lock._close()


# The lock is held until every process with the open file has closed it: a forked process must not keep it.
os.register_at_fork(after_in_child=_close_in_child)


def _holder(path: Path) -> str:
    """Returns host, process and start time of a lock's holder, as far as known."""
    facts: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        facts = parse_object(path.read_text(encoding="utf-8"))
    return f"process {facts.get('process', '?')} on {facts.get('host', '?')} since {facts.get('since', '?')}"


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


def look_for_lost_checkpoints(folder: Path | None, num_steps: int) -> None:
    """Raises RunDirectoryError for a complete run without checkpoints; says of another one that it begins anew."""
    if folder is None:
        return
    if read_summary(folder).get("global_step", -1) >= num_steps:
        raise RunDirectoryError(
            f"{folder}: is complete, but has no checkpoint any more, so that training would begin anew and replace its"
            f" results: choose another name, or delete the folder"
        )
    if records_of(folder):
        text = f"{folder} has metrics, but no checkpoint any more: training begins anew, and replaces them"
        print(f"ringtrain: {text}", file=sys.stderr, flush=True)


def plain(value: Any) -> Any:
    """Returns a value that JSON can represent: non-finite numbers become None."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
