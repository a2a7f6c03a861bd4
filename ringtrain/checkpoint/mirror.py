"""Copy of a run in another folder or in a bucket, from which the run continues on an empty disk.

MIRROR/NAME/ has the files of the run folder, under the same names. The manifest of a checkpoint is written last there,
and removed first: a checkpoint that has one is complete. One job at a time writes, which the file .writer names.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from ringtrain.checkpoint import checkpoint
from ringtrain.checkpoint.run_folder import LOCK
from ringtrain.data.data_files import store_of, with_retries
from ringtrain.errors import CheckpointError, RingtrainError, RunDirectoryError
from ringtrain.monitor.journal import printable
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.json_text import parse_object

WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""Stores in which making a folder might make a bucket."""
WRITER = ".writer"
NOT_COPIED = (WRITER, LOCK, "tensorboard", "checkpoints")
"""Names in the run folder that are not copied as they are. Checkpoints are copied by themselves."""
RENEWED_S = 20.0
EXPIRES_S = 60.0
"""Seconds without a change of .writer after which its job is considered lost. No clocks are compared."""
POLL_S = 1.0
LEAVE_S = 2.0
"""Seconds before ranks are killed at which an incomplete copy is given up."""


class Mirror:
    """Copy of a run below a folder or URL of fsspec, held by rank 0; raises RunDirectoryError if another job writes."""

    def __init__(self, url: str, name: str, same_job: bool = False) -> None:
        self.url = f"{url.rstrip('/')}/{name}"
        self.store, self.path = store_of(self.url)
        self.failures: list[str] = []
        """errors of all copies"""
        self.lost_to = ""
        """process that has become the writer instead"""
        self._job, self._token = Attempt.from_environment(os.environ).job, uuid.uuid4().hex
        self._renewal, self._is_released = threading.Lock(), threading.Event()
        self._copied: dict[str, tuple[int, int]] = {}
        """size and time of each file when it was copied"""
        self._complete: set[str] = set()
        """checkpoints that this process has seen there"""
        self._is_given_up = False
        self._queue: queue.Queue[tuple[Path, Future[str]] | None] = queue.Queue()
        """run folders to copy, with the error, or "", that comes of it; None ends the thread"""
        with_retries(lambda: self._claim(same_job), self.url, f"{self.url}: cannot be used")
        self._thread = threading.Thread(target=self._work, name="ringtrain-mirror", daemon=True)
        self._thread.start()
        # Another thread, as a large file may take longer to copy than other jobs wait.
        threading.Thread(target=self._keep, name="ringtrain-mirror-writer", daemon=True).start()

    # ---- the only writer ---------------------------------------------------------------------------------------------

    def _claim(self, same_job: bool) -> None:
        """Becomes the writer, also after a job that shows no change for a while; else raises RunDirectoryError."""
        first = writer = self._read(WRITER)
        # An earlier attempt of this job, or its former rank 0.
        if same_job and self._job and parse_object(first or b"").get("job") == self._job:
            first = writer = None
        if writer is not None:
            why = f"waiting for up to {EXPIRES_S:g} s: it is lost if it shows no change"
            print(f"ringtrain: {self.url}: in use by {_name(writer)}: {why}", file=sys.stderr, flush=True)
        end_s = time.monotonic() + EXPIRES_S
        while writer is not None and writer == first and time.monotonic() < end_s:
            time.sleep(POLL_S)
            writer = self._read(WRITER)
        if writer not in (None, first):
            why = "wait until it ends, or choose another --run.name"
            raise RunDirectoryError(f"{self.url}: in use by {_name(first)}: {why}")
        self._write_writer()

    def _keep(self) -> None:
        """Shows other jobs that this one lives; the body of a thread."""
        while not self._is_released.wait(RENEWED_S) and not self.lost_to:
            with contextlib.suppress(Exception):  # a store that cannot be reached is tried again
                self._renew()

    def _renew(self) -> None:
        """Writes .writer anew, or notes that another process has."""
        with self._renewal:
            writer = self._read(WRITER)
            if writer and self._token.encode() not in writer:
                self.lost_to = _name(writer)
            elif not self._is_released.is_set():
                self._write_writer()

    def raise_if_lost(self) -> None:
        """Raises RunDirectoryError if another process has become the writer."""
        if self.lost_to:
            then = "this job ends: choose another --run.name"
            raise RunDirectoryError(f"{self.url}: taken over by {self.lost_to}: {then}")

    def _write_writer(self) -> None:
        facts = {"host": socket.gethostname(), "process": os.getpid(), "job": self._job, "token": self._token}
        text = json.dumps({**facts, "time": time.time()})
        self.store.pipe_file(self._place(WRITER), text.encode())

    # ---- reading back ------------------------------------------------------------------------------------------------

    def has_run(self) -> bool:
        """Returns whether there are files of a run."""
        names = with_retries(self._find, self.url, f"{self.url}: cannot be read")
        return any(name != WRITER for name in names)

    def fetch(self, folder: Path) -> str:
        """Copies what a run folder lacks, if the newest checkpoint here is newer; returns its name, or ""."""
        return with_retries(lambda: self._fetch(folder), self.url, f"{self.url}: cannot be read")

    def _fetch(self, folder: Path) -> str:
        files, here = self._find(), [path.name for path in _saved_in(folder)]
        manifests = [name for name in files if name.startswith("checkpoints/") and _is_manifest(name)]
        there = sorted((name.split("/")[1] for name in manifests), key=checkpoint.step_of)
        if not there or checkpoint.step_of(there[-1]) <= max(map(checkpoint.step_of, here), default=-1):
            return ""
        # The newest checkpoint last: with it, the folder lacks nothing.
        wanted = [name for name in files if name.split("/")[0] not in NOT_COPIED]
        for saved in there:
            if saved not in here:
                of_saved = [name for name in files if name.startswith(f"checkpoints/{saved}/")]
                wanted += sorted(of_saved, key=_is_manifest)
        for name in wanted:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.store.get_file(f"{self.path}/{name}", str(path))
        return there[-1]

    # ---- copying, in a thread ----------------------------------------------------------------------------------------

    def add(self, folder: Path) -> None:
        """Lets the thread copy what has changed in a run folder."""
        if self._queue.empty():  # else it will be seen
            self._queue.put((folder, Future()))

    def finish(self, folder: Path, ends_s: float = math.inf) -> None:
        """Copies what has changed, until `ends_s` of time.monotonic(); raises CheckpointError if it is not there."""
        copied: Future[str] = Future()
        self._queue.put((folder, copied))
        limit_s = max(0.0, ends_s - LEAVE_S - time.monotonic())
        try:
            error = copied.result(min(limit_s, threading.TIMEOUT_MAX))
        except TimeoutError:
            error = f"{self.url}: not all is copied, and the time to save is over (--grace)"
            self._is_given_up = True
        self.raise_if_lost()
        if error:
            missing = [path.name for path in _saved_in(folder) if path.name not in self._complete]
            then = f"the run folder {folder} is complete, and the same command copies it"
            raise CheckpointError(f"{error}: not there: {', '.join(missing) or 'some files'}; {then}")

    def close(self) -> None:
        """Copies what was given to `add`, unless it is given up, and lets other jobs write."""
        self._queue.put(None)
        if not self._is_given_up:
            self._thread.join()
        self._is_released.set()
        with self._renewal, contextlib.suppress(Exception):  # else others wait until it expires
            if not self.lost_to:
                self.store.rm_file(f"{self.path}/{WRITER}")

    def _work(self) -> None:
        for folder, copied in iter(self._queue.get, None):
            copied.set_result(self._try_to_copy(folder))

    def _try_to_copy(self, folder: Path) -> str:
        """Copies what has changed; returns why it failed, or ""."""
        try:
            with_retries(lambda: self._copy(folder), self.url, f"{self.url}: cannot be written")
        except RingtrainError as error:
            if not self.failures and not self.lost_to:
                then = "training continues, and it is tried again with the next checkpoint"
                print(f"ringtrain: {error}; {then}", file=sys.stderr, flush=True)
            self.failures.append(str(error))
            return str(error)
        return ""

    def _copy(self, folder: Path) -> None:
        self._renew()  # this process may have been frozen
        for path in _files_of(folder):
            name, state = path.relative_to(folder).as_posix(), path.stat()
            if self._copied.get(name) != (state.st_size, state.st_mtime_ns):
                self._put(str(path), name)
                self._copied[name] = (state.st_size, state.st_mtime_ns)
        saved = _saved_in(folder)
        for path in saved:
            if path == saved[0] or self._queue.empty():  # else a newer one is waiting
                self._copy_checkpoint(path)
        if saved and saved[0].name in self._complete:
            self._remove_others({path.name for path in saved})

    def _copy_checkpoint(self, saved: Path) -> None:
        """Copies a checkpoint that is not there, by open files, which stay if the run removes it meanwhile."""
        with contextlib.ExitStack() as stack:
            try:
                files = {path.name: stack.enter_context(open(path, "rb")) for path in saved.iterdir()}
            except FileNotFoundError:
                return
            if files[checkpoint.MANIFEST].read() != self._read(f"checkpoints/{saved.name}/{checkpoint.MANIFEST}"):
                for name in sorted(files, key=_is_manifest):
                    self._put(f"/proc/self/fd/{files[name].fileno()}", f"checkpoints/{saved.name}/{name}")
        self._complete.add(saved.name)

    def _remove_others(self, names: set[str]) -> None:
        """Removes checkpoints there that the run does not have, their manifests first."""
        there = {name.split("/")[1] for name in self._find() if name.startswith("checkpoints/")}
        for path in (f"{self.path}/checkpoints/{name}" for name in there - names):
            try:
                with contextlib.suppress(FileNotFoundError):
                    self.store.rm_file(f"{path}/{checkpoint.MANIFEST}")
                self.store.rm(path, recursive=True)
            except Exception as error:  # what is left there makes it no less complete
                self.failures.append(f"{path}: cannot be removed: {error}")

    # ---- files there -------------------------------------------------------------------------------------------------

    def _find(self) -> list[str]:
        """Names of all files there."""
        self.store.invalidate_cache()
        names = [name.removeprefix(self.path).lstrip("/") for name in self.store.find(self.path)]
        return [name for name in names if ".." not in name.split("/") and not name.endswith("/")]

    def _read(self, name: str) -> bytes | None:
        """Content of a file there; None if there is none."""
        self.store.invalidate_cache()
        try:
            return bytes(self.store.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def _put(self, path: str, name: str) -> None:
        self.raise_if_lost()
        self.store.put_file(path, self._place(name))

    def _place(self, name: str) -> str:
        """Path of a file that is to be written there, whose folder exists."""
        path = f"{self.path}/{name}"
        if self.url.partition("://")[0] not in WITHOUT_FOLDERS:
            self.store.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path


def _files_of(folder: Path) -> Iterator[Path]:
    """Files of a run folder that are copied as they are."""
    for top in sorted(folder.iterdir()):
        if top.name not in NOT_COPIED:  # of which files are renamed meanwhile
            yield from (path for path in [top, *top.rglob("*")] if path.is_file() and ".unfinished" not in path.name)


def _saved_in(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, the newest first."""
    return [path for path in checkpoint.saved_in(folder / "checkpoints") if (path / checkpoint.MANIFEST).exists()]


def _is_manifest(name: str) -> bool:
    return name.endswith(checkpoint.MANIFEST)


def _name(writer: bytes | None) -> str:
    facts = parse_object(writer or b"")
    return printable(f"process {facts.get('process', '?')} on {facts.get('host', '?')}")[:200]
