"""A copy of a run on another file system or in a bucket, from which it goes on where its local disk is gone.

MIRROR/NAME/ has the files of the run folder, in the same places. A checkpoint is complete there once its manifest,
which is written last, is there; files are compared with its checksums when they are read back. One job at a time may
write, which holds the lease MIRROR/NAME/.lease. Any file system of fsspec will do.

No lease stops a request that is under way, nor a process that was frozen before it. So each job writes checkpoints to
folders of its own, step-00000440-WRITER, and a complete one is removed only by a job that has a later one there: the
newest complete one stays, whatever two jobs do at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.data.data_files import store_of, with_retries
from ringtrain.errors import CheckpointError, DamagedCheckpoint, DataError, RunDirectoryError
from ringtrain.run import checkpoint
from ringtrain.run.lease import Lease
from ringtrain.run.run_folder import LEASE, LEASE_EXPIRES_S, LOCK

if TYPE_CHECKING:
    from ringtrain.run.last_copy import LastCopy

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""protocols of stores without folders, where making one might make a bucket"""
NOT_COPIED = (LOCK, "tensorboard", "checkpoints", "saved_model")
"""names in the run folder that are not copied as they are; checkpoints go by themselves"""
UPLOAD_TIMEOUT_S = 600
"""of one request that writes a large file"""
LARGE_BYTES = 1 << 20
"""A smaller file is written soon or not at all: a late one must not replace that of another job."""

_open: list[Mirror] = []
"""mirrors of this process that are not closed"""


@dataclass(frozen=True)
class Left:
    """State of a mirror, with which another process continues it."""

    url: str
    store: Any
    path: str
    there: dict[int, str]
    states: dict[str, tuple[int, int]]
    expires_s: float
    lease: dict[str, Any]


class Mirror:
    """Copy of one run; held by rank 0. A thread copies what is given to `add`.

    Args:
        url: Folder of all runs: a path, or a URL of fsspec such as s3://bucket/runs.
        name: Of the run.
        same_job: Take the lease over at once from an earlier attempt of this job.
        expires_s: Seconds after which a lease that does not change is taken over.
        left: State of another process's mirror, which this one continues.

    Attributes:
        lease: Of the copy; a job that has lost it copies nothing more.

    Raises:
        RunDirectoryError: another job holds the lease.
        DataError: the file system cannot be reached.
    """

    def __init__(
        self,
        url: str,
        name: str,
        same_job: bool = False,
        expires_s: float = LEASE_EXPIRES_S,
        left: Left | None = None,
    ) -> None:
        self.url = f"{url.rstrip('/')}/{name}"
        for other in [mirror for mirror in _open if mirror.url == self.url]:
            other.close()  # of a run of this process that has failed
        self.store, self.path = (left.store, left.path) if left else store_of(self.url)
        self._uploads = _for_uploads(self.store)
        protocols = {self.store.protocol} if isinstance(self.store.protocol, str) else set(self.store.protocol)
        self.has_folders = not protocols & OBJECT_STORES
        self._there: dict[int, str] = dict(left.there) if left else {}
        """names there of the complete checkpoints that this job has copied, by their steps"""
        self._damaged: set[str] = set()
        self.failures: list[str] = []
        self.seconds = 0.0
        """spent copying, beside training"""
        self._process = os.getpid()
        self._error = ""
        """of the last copy"""
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        """run folder whose newest checkpoint and files are to be copied"""
        self._missing: list[str] = []
        """names of checkpoints that are not yet in the local folder"""
        self._folder = Path()
        self._states: dict[str, tuple[int, int]] = dict(left.states) if left else {}
        """size and time of each file when it was copied"""
        self._is_busy = self._is_closed = False
        self._last_copy: LastCopy | None = None
        self._is_last_copy = left is not None
        self._expires_s = expires_s
        if self.has_folders:
            with_retries(
                lambda: self.store.makedirs(self.path, exist_ok=True), self.url, f"{self.url}: cannot be written"
            )
        lent = left.lease if left else None
        self.lease = Lease(self.store, self.path, self.url, same_job, expires_s, self._notify, lent)
        self._thread = threading.Thread(target=self._work, name="ringtrain-mirror", daemon=True)
        self._thread.start()
        _open.append(self)
        atexit.register(self.close)

    # ---- reading back ------------------------------------------------------------------------------------------------

    def fetch(self, folder: Path) -> Path | None:
        """Copies the run's files and its newest checkpoint to a local folder, if they are further than what is there.

        Its other checkpoints follow during training: the best one may be among them. A damaged one is left out.

        Returns:
            The local checkpoint; None if the local folder is as far, or the mirror has nothing.
        """
        newest, _ = checkpoint.newest(folder / "checkpoints")
        local_step = newest.global_step if newest else -1
        fetched = None
        while not fetched:  # listed anew after one that is damaged, or was removed meanwhile since there is a later one
            self._there = {checkpoint.step_of(name): name for name in self._complete()}
            step = max(self._there, default=-1)
            if step <= local_step:
                break
            for name in self._files_there():  # the checkpoint last: with it, the local folder is as far
                self._get(name, folder / name)
            fetched = self._fetch_whole(self._there[step], folder / "checkpoints")
        self._fetch_later(folder)
        return fetched

    def fetch_missing(self, folder: Path) -> None:
        """Copies the run's files that are not in a local folder; checkpoints follow during training.

        For a job that goes on with a later state than that of the checkpoints.
        """
        self._there = {checkpoint.step_of(name): name for name in self._complete()}
        for name in self._files_there():
            if not (folder / name).exists():
                self._get(name, folder / name)
        self._fetch_later(folder)

    def _fetch_later(self, folder: Path) -> None:
        """Lets the thread fetch the checkpoints that are not in a local folder, before it copies anything."""
        local = {checkpoint.step_of(path.name) for path in checkpoint.saved_in(folder / "checkpoints")}
        with self._changed:
            self._missing = [name for step, name in self._there.items() if step not in local]
            self._folder = folder

    def _fetch_whole(self, name: str, local: Path) -> Path | None:
        """Copies a checkpoint to a local folder; None if it is damaged, which is reported."""
        try:
            return self._fetch_checkpoint(name, local)
        except DamagedCheckpoint as error:
            self._damaged.add(name)
            self._there.pop(checkpoint.step_of(name), None)
            print(f"ringtrain: {self.url}: {error}", file=sys.stderr, flush=True)
            if not self._checkpoints().get(name):  # removed since a later one is complete, maybe by now only
                self._damaged.clear()
            return None

    @property
    def copied(self) -> list[int]:
        """Steps of the checkpoints that are complete there."""
        return sorted(self._there)

    @property
    def has_run(self) -> bool:
        """True if there are files of a run."""
        return any(name != LEASE for name in self._find(""))

    def _complete(self) -> list[str]:
        """Names of the checkpoints with a manifest, but for damaged ones."""
        names = [name for name, is_complete in self._checkpoints().items() if is_complete]
        return [name for name in names if name not in self._damaged]

    def _checkpoints(self) -> dict[str, bool]:
        """Names of the checkpoints there, in their order, and whether they have a manifest."""
        is_there: dict[str, bool] = {}
        for path in self._find("checkpoints"):
            name, _, file = path.removeprefix("checkpoints/").partition("/")
            if checkpoint.NAME.fullmatch(name):
                is_there[name] = is_there.get(name, False) or file == checkpoint.MANIFEST
        return is_there

    def _fetch_checkpoint(self, name: str, local: Path) -> Path:
        final = local / f"step-{checkpoint.step_of(name):08d}"
        unfinished = local / f"{checkpoint.UNFINISHED}{final.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            for file in self._find(f"checkpoints/{name}"):
                self._get(file, unfinished / file.rpartition("/")[2])
            checkpoint.verify(unfinished)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(unfinished, final)
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # removed meanwhile
                raise DamagedCheckpoint(str(error)) from error
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return final

    def _files_there(self) -> list[str]:
        names = [name.split("/") for name in self._find("")]
        return ["/".join(parts) for parts in names if parts[0] not in (*NOT_COPIED, LEASE) and ".." not in parts]

    # ---- copying -----------------------------------------------------------------------------------------------------

    def add(self, folder: Path) -> None:
        """Lets the thread copy the newest checkpoint of a run folder, and its files; nothing if the lease is lost."""
        with self._changed:
            self._waiting = folder
            self._changed.notify_all()

    def leave(self, folder: Path, ends_s: float) -> None:
        """Lets a process of its own copy everything, from now on: it continues if this one is killed.

        Args:
            ends_s: Time, by time.monotonic(), until which it may continue then; infinity: for last_copy.ALONE_S.
        """
        from ringtrain.run.last_copy import LOG, LastCopy

        newest = next(iter(checkpoint.saved_in(folder / "checkpoints")), None)
        is_there = newest is None or checkpoint.step_of(newest.name) in self._there
        if self.lease.is_lent or self.lease.is_lost or is_there:
            return
        self._waiting = None  # an earlier one is no more of use
        there, states = dict(self._there), dict(self._states)
        try:
            left = Left(self.url, self.store, self.path, there, states, self._expires_s, self.lease.lend())
            self._last_copy = LastCopy(left, folder, ends_s)
        except Exception as error:  # a slow renewal of the lease, a store's object that cannot be sent, no memory
            self.lease.take_back()
            self.add(folder)
            text = f"rank 0 makes the last copy itself, without a process for it: {error}"
            print(f"ringtrain: {self.url}: {text}", file=sys.stderr, flush=True)
        else:
            text = f"{newest} is copied by a process of its own: {folder / LOG}"
            print(f"ringtrain: {self.url}: {text}", file=sys.stderr, flush=True)

    def _finish_last_copy(self) -> dict[str, Any]:
        """Waits for the process of the last copy; returns facts of it, none if this process is to copy."""
        if self._last_copy is None:
            return {}
        process, self._last_copy = self._last_copy, None
        facts = process.finish()
        if facts:
            self.lease.taken_by = facts["taken_by"]
            self.failures += facts["failed"]
            self.seconds += facts["seconds"]
        else:
            self.lease.take_back()
            self.add(process.folder)
        return facts

    def finish(self, folder: Path) -> None:
        """Copies everything, and waits until it is there.

        Raises:
            CheckpointError: the last checkpoint or a file could not be copied.
            RunDirectoryError: another job has taken the lease.
        """
        error = self._finish_last_copy().get("error")
        if error is None:
            with self._changed:
                self._waiting = folder
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.lease.is_lost or not (self._waiting or self._is_busy))
            error = self._error
        self.lease.raise_if_lost()
        if error:
            raise CheckpointError(f"{error}: the run folder {folder} is complete, its mirror is not")

    def close(self) -> None:
        """Ends the thread, when all that was given to `add` is copied, and gives up the lease."""
        if os.getpid() != self._process:
            return  # a fork of the process, without its threads
        atexit.unregister(self.close)
        if self in _open:
            _open.remove(self)
        self._finish_last_copy()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self.lease.is_lent:  # else it may write an older checkpoint, in vain
            self._thread.join()
        self.lease.release()

    def hand_over(self) -> None:
        """Leaves the copy to another rank of the job, at once: nothing more is copied after the file under way."""
        atexit.unregister(self.close)
        if self in _open:
            _open.remove(self)
        if self._last_copy:
            self._last_copy.abandon()
        self.lease.hand_over()

    def summary(self) -> dict[str, Any]:
        """Facts for summary.json."""
        return {"url": self.url, "seconds": self.seconds, "failed": self.failures}

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        """Copies what is newest; the body of the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed or self.lease.is_lost)
                folder, self._waiting = self._waiting, None
                self._is_busy = folder is not None
            if not folder or self.lease.is_lost:
                return
            self._fetch_missing()
            self._copy(folder)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _fetch_missing(self) -> None:
        for name in self._missing:
            with contextlib.suppress(Exception):
                self._fetch_whole(name, self._folder / "checkpoints")
        self._missing = []

    def _copy(self, folder: Path) -> None:
        begin_s = time.perf_counter()
        self._error = self._failed(lambda: self._copy_new(folder), "it is tried again with the next copy")
        # What is left there makes it no less complete. The last copy does not know what is not on this disk yet.
        if not self._error and not self._is_last_copy:
            self._failed(lambda: self._remove_old(folder), "it stays there, and is removed with a later one")
        self.seconds += time.perf_counter() - begin_s

    def _failed(self, act: Callable[[], None], then: str) -> str:
        """Does something; returns why it failed, which is reported, or ""."""
        try:
            act()
        except RunDirectoryError:  # the lease is lost, which `finish` and the run's next step say
            return ""
        except Exception as error:  # whatever a store's library raises: `finish` waits for this thread
            self.failures.append(str(error))
            print(f"ringtrain: {error}; {then}", file=sys.stderr, flush=True)
            return str(error)
        return ""

    def _copy_new(self, folder: Path) -> None:
        """Copies the newest checkpoint, and the files that have changed."""
        newest = next(iter(checkpoint.saved_in(folder / "checkpoints")), None)
        if newest and checkpoint.step_of(newest.name) not in self._there:
            self._copy_checkpoint(newest)
        for path in _files_of(folder):
            self._put_if_changed(path, path.relative_to(folder).as_posix())

    def _copy_checkpoint(self, saved: Path) -> None:
        """Copies a checkpoint, from links: the run may remove it before all of it is copied."""
        step = checkpoint.step_of(saved.name)
        name = f"step-{step:08d}-{self.lease.writer}"
        held = saved.with_name(f"{checkpoint.UNFINISHED}mirror-{os.getpid()}")
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        try:
            for path in saved.iterdir():
                _link(path, held / path.name)
            files = sorted(held.iterdir(), key=lambda path: path.name == checkpoint.MANIFEST)
            for path in files:  # the manifest last
                self._put(path, f"checkpoints/{name}/{path.name}")
        finally:
            shutil.rmtree(held, ignore_errors=True)
        self._there[step] = name

    def _remove_old(self, folder: Path) -> None:
        """Removes what the run has removed, and what other jobs have left, once the newest checkpoint is complete."""
        kept = {checkpoint.step_of(path.name) for path in checkpoint.saved_in(folder / "checkpoints")}
        newest = max(kept, default=-1)
        if newest not in self._there:
            return
        in_use = {name for step, name in self._there.items() if step in kept}
        for name, is_complete in self._checkpoints().items():
            step = checkpoint.step_of(name)
            is_old = step < newest or (step == newest and not is_complete)
            if is_old and name not in in_use:
                self._remove(f"checkpoints/{name}")
        self._there = {step: name for step, name in self._there.items() if step in kept}

    # ---- one file ----------------------------------------------------------------------------------------------------

    def _find(self, folder: str) -> list[str]:
        """Files in a folder of the mirror, by their names in it."""
        path = f"{self.path}/{folder}".rstrip("/")

        def find() -> list[str]:
            self.store.invalidate_cache()
            try:
                return list(self.store.find(path))
            except FileNotFoundError:
                return []

        files = with_retries(find, self.url, f"{self.url}: cannot be listed")
        return [name.removeprefix(self.path).lstrip("/") for name in files if not name.endswith("/")]

    def _get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = f"{self.path}/{name}"
        with_retries(lambda: self.store.get_file(there, str(path)), self.url, f"{self.url}/{name}: cannot be read")

    def _put(self, path: Path, name: str) -> None:
        def put() -> None:
            self.lease.confirm()
            if self.has_folders:
                self.store.makedirs(f"{self.path}/{name}".rpartition("/")[0], exist_ok=True)
            store = self._uploads if path.stat().st_size > LARGE_BYTES else self.store
            store.put_file(str(path), f"{self.path}/{name}")

        with_retries(put, self.url, f"{self.url}/{name}: cannot be written")

    def _put_if_changed(self, path: Path, name: str) -> None:
        state = path.stat()
        now = state.st_size, state.st_mtime_ns
        if self._states.get(name) != now:
            self._put(path, name)
            self._states[name] = now

    def _remove(self, folder: str) -> None:
        """Removes a checkpoint: its manifest first, so that what is left of it is none."""
        names = sorted(self._find(folder), key=lambda name: not name.endswith(checkpoint.MANIFEST))

        def remove() -> None:
            for name in names:
                self.lease.confirm()
                with contextlib.suppress(FileNotFoundError):
                    self.store.rm_file(f"{self.path}/{name}")

        with_retries(remove, self.url, f"{self.url}/{folder}: cannot be removed")
        with contextlib.suppress(Exception):  # an empty folder, where there are folders
            self.store.rmdir(f"{self.path}/{folder}")


def _for_uploads(store: Any) -> Any:
    """Same store, with time for large files over a slow link: s3fs gives up a request after 15 s without an answer.

    That time includes the sending of the file. For other requests it stays as it is: a lease must not wait longer.
    """
    if not hasattr(store, "read_timeout"):
        return store
    options = store.storage_options
    config = {"read_timeout": UPLOAD_TIMEOUT_S, **(options.get("config_kwargs") or {})}
    return type(store)(**{**options, "config_kwargs": config})


def _files_of(folder: Path) -> Iterator[Path]:
    """Files of a run folder that are copied as they are."""
    for path in sorted(folder.rglob("*")):
        is_left_out = path.relative_to(folder).parts[0] in NOT_COPIED or path.name.startswith(".unfinished")
        if path.is_file() and not is_left_out:
            yield path


def _link(path: Path, link: Path) -> None:
    """Gives a file a second name; a copy where its file system has no links."""
    try:
        os.link(path, link)
    except OSError:
        shutil.copy2(path, link)
