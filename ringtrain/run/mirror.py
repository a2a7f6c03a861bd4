"""A copy of a run on another file system or in a bucket, from which it goes on where its local disk is gone.

MIRROR/NAME/ has the files of the run folder, in the same places. A checkpoint is complete there once its manifest,
which is written last, is there; files are compared with its checksums when they are read back. One job at a time may
write: mirror_writer.py. Any file system of fsspec will do.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringtrain.data.data_files import store_of, with_retries
from ringtrain.errors import CheckpointError, DamagedCheckpoint, RunDirectoryError
from ringtrain.run import checkpoint
from ringtrain.run.mirror_writer import EXPIRES_S, WRITER, Writer
from ringtrain.run.run_folder import LOCK

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""protocols of stores without folders, where making one might make a bucket"""
NOT_COPIED = (LOCK, "tensorboard", "checkpoints")
"""names in the run folder that are not copied as they are; checkpoints go by themselves"""
UPLOAD_TIMEOUT_S = 600
"""of one request that writes a file: s3fs gives up others after 15 s, in which a slow link does not send it"""
LEAVE_S = 2.0
"""before ranks are killed, when a copy is given up that is not complete"""

_open: list[Mirror] = []
"""mirrors of this process that are not closed"""


class Mirror:
    """Copy of one run; held by rank 0. A thread copies what is given to `add`.

    Args:
        url: Folder of all runs: a path, or a URL of fsspec such as s3://bucket/runs.
        name: Of the run.
        same_job: Replace an earlier attempt of this job, or its former rank 0, as the writer at once.
        expires_s: Seconds after which another writer that shows no change is considered lost.

    Raises:
        RunDirectoryError: another job writes.
        DataError: the file system cannot be reached.
    """

    def __init__(self, url: str, name: str, same_job: bool = False, expires_s: float = EXPIRES_S) -> None:
        self.url = f"{url.rstrip('/')}/{name}"
        for other in [mirror for mirror in _open if mirror.url == self.url]:
            other.close()  # of a run of this process that has failed
        self.store, self.path = store_of(self.url)
        self._uploads = _for_uploads(self.store)
        protocols = {self.store.protocol} if isinstance(self.store.protocol, str) else set(self.store.protocol)
        self.has_folders = not protocols & OBJECT_STORES
        self.failures: list[str] = []
        self.seconds = 0.0
        """spent copying, beside training"""
        self._there: set[str] = set()
        """names of complete checkpoints there, but for damaged ones"""
        self._states: dict[str, tuple[int, int]] = {}
        """size and time of each file when it was copied"""
        self._error = ""
        """of the last copy"""
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        """run folder that is to be copied"""
        self._to_fetch: tuple[Path, list[str]] = Path(), []
        """folder of checkpoints, and names of those that are not there yet"""
        self._is_busy = self._is_closed = self._is_given_up = False
        self._process = os.getpid()
        if self.has_folders:
            with_retries(
                lambda: self.store.makedirs(self.path, exist_ok=True), self.url, f"{self.url}: cannot be written"
            )
        self.writer = Writer(self.store, self.path, self.url, same_job, expires_s)
        self._thread = threading.Thread(target=self._work, name="ringtrain-mirror", daemon=True)
        self._thread.start()
        _open.append(self)
        atexit.register(self.close)

    # ---- reading back ------------------------------------------------------------------------------------------------

    def fetch(self, folder: Path) -> Path | None:
        """Copies the run's files and its newest checkpoint to a local folder, if they are further than what is there.

        A damaged one is reported, and the one before is taken. Others, of which one may be the best, follow during
        training.

        Returns:
            The local checkpoint; None if the local folder is as far, or the mirror has nothing.
        """
        local = folder / "checkpoints"
        newest, _ = checkpoint.newest(local)
        local_step = newest.global_step if newest else -1
        fetched = None
        for name in self._list():
            if fetched or checkpoint.step_of(name) <= local_step:
                break
            self._get_files(folder)  # the checkpoint last: with it, the local folder is as far
            fetched = self._fetch_checkpoint(name, local)
        self._fetch_later(local)
        return fetched

    def fetch_missing(self, folder: Path) -> None:
        """Copies the run's files that are not in a local folder; checkpoints follow during training.

        For a job that goes on with a later state than that of the checkpoints.
        """
        self._list()
        self._get_files(folder, only_missing=True)
        self._fetch_later(folder / "checkpoints")

    def _list(self) -> list[str]:
        """Names of the complete checkpoints there, the newest first."""
        files = [name.split("/") for name in self._find("checkpoints")]
        self._there = {parts[1] for parts in files if parts[-1] == checkpoint.MANIFEST}
        self._there = {name for name in self._there if checkpoint.NAME.fullmatch(name)}
        return sorted(self._there, key=checkpoint.step_of, reverse=True)

    def _fetch_later(self, local: Path) -> None:
        """Lets the thread fetch the checkpoints that are not in a local folder, before it copies anything."""
        here = {path.name for path in checkpoint.saved_in(local)}
        self._to_fetch = local, sorted(self._there - here)

    def _get_files(self, folder: Path, only_missing: bool = False) -> None:
        for name in self._find(""):
            parts = name.split("/")
            is_wanted = parts[0] not in (*NOT_COPIED, WRITER) and ".." not in parts
            if is_wanted and not (only_missing and (folder / name).exists()):
                self._get(name, folder / name)

    def _fetch_checkpoint(self, name: str, local: Path) -> Path | None:
        """Copies a checkpoint to a local folder; None if it is damaged, which is reported."""
        unfinished = local / f"{checkpoint.UNFINISHED}{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            for file in self._find(f"checkpoints/{name}"):
                self._get(file, unfinished / file.rpartition("/")[2])
            checkpoint.verify(unfinished)
            shutil.rmtree(local / name, ignore_errors=True)
            os.rename(unfinished, local / name)
        except DamagedCheckpoint as error:
            self._there.discard(name)
            print(f"ringtrain: {self.url}: {error}", file=sys.stderr, flush=True)
            return None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return local / name

    @property
    def has_run(self) -> bool:
        """True if there are files of a run."""
        return any(name != WRITER for name in self._find(""))

    # ---- copying -----------------------------------------------------------------------------------------------------

    def add(self, folder: Path) -> None:
        """Lets the thread copy a run folder: its newest checkpoint, then what else is new."""
        with self._changed:
            self._waiting = folder
            self._changed.notify_all()

    def finish(self, folder: Path, ends_s: float = math.inf) -> None:
        """Copies everything, and waits until it is there.

        Args:
            ends_s: Time, by time.monotonic(), at which this process will be killed; infinity: never.

        Raises:
            CheckpointError: a checkpoint or a file could not be copied, or not in time.
            RunDirectoryError: another job has become the writer.
        """
        limit_s = None
        if ends_s < math.inf:
            limit_s = max(0.0, ends_s - LEAVE_S - time.monotonic())
        with self._changed:
            self._waiting = folder
            self._changed.notify_all()
            is_copied = self._changed.wait_for(
                lambda: self.writer.is_lost or not (self._waiting or self._is_busy), limit_s
            )
        self.writer.raise_if_lost()
        error = self._error
        if not is_copied:
            self._is_given_up = True
            error = f"{self.url}: not all is copied, and the time to save is over (--grace)"
        if error:
            names = [path.name for path in checkpoint.saved_in(folder / "checkpoints")]
            missing = ", ".join(name for name in names if name not in self._there) or "some files"
            newest = max([*self._there], key=checkpoint.step_of, default="none")
            raise CheckpointError(
                f"{error}: not there: {missing}; newest complete checkpoint there: {newest}; the run folder {folder} is"
                f" complete, and the same command copies it"
            )

    def close(self) -> None:
        """Ends the thread, when all that was given to `add` is copied or given up, and lets other jobs write."""
        if os.getpid() != self._process:
            return  # a fork of the process, without its threads
        self._leave()
        if not self._is_given_up:
            self._thread.join()
        self.writer.release()

    def hand_over(self) -> None:
        """Leaves the copy to another rank of the job, at once: nothing more is copied after the file under way."""
        self.writer.hand_over()
        self._leave()

    def _leave(self) -> None:
        atexit.unregister(self.close)
        if self in _open:
            _open.remove(self)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def summary(self) -> dict[str, Any]:
        """Facts for summary.json."""
        return {"url": self.url, "seconds": self.seconds, "failed": self.failures}

    def _work(self) -> None:
        """Copies what is new; the body of the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                folder, self._waiting = self._waiting, None
                self._is_busy = folder is not None
            if folder is None:
                return
            local, names = self._to_fetch
            self._to_fetch = local, []
            for name in names:
                with contextlib.suppress(Exception):  # training goes on without it
                    self._fetch_checkpoint(name, local)
            begin_s = time.perf_counter()
            self._error = self._failed(self._copy, folder)
            # What is left there makes it no less complete.
            if not self._error:
                self._failed(self._remove_old, folder)
            self.seconds += time.perf_counter() - begin_s
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _failed(self, act: Callable[[Path], None], folder: Path) -> str:
        """Does something; returns why it failed, or "". The first failure is printed, all are kept."""
        try:
            act(folder)
        except RunDirectoryError:  # another job writes, which `finish` and the run's next step say
            return ""
        except Exception as error:  # whatever a store's library raises: `finish` waits for this thread
            if not self.failures:
                then = "training continues, and it is tried again with the next copy; more errors: summary.json"
                print(f"ringtrain: {error}; {then}", file=sys.stderr, flush=True)
            self.failures.append(str(error))
            return str(error)
        return ""

    def _copy(self, folder: Path) -> None:
        """Copies the newest checkpoint, the files that have changed, and the other checkpoints."""
        saved = checkpoint.saved_in(folder / "checkpoints")
        for path in saved[:1]:
            self._copy_checkpoint(path)
        for path in _files_of(folder):
            self._put_if_changed(path, path.relative_to(folder).as_posix())
        for path in saved[1:]:
            if not self._waiting:  # for a newer one
                self._copy_checkpoint(path)

    def _copy_checkpoint(self, saved: Path) -> None:
        """Copies a checkpoint, from links: the run may remove it before all of it is copied."""
        if saved.name in self._there:
            return
        held = saved.with_name(f"{checkpoint.UNFINISHED}mirror-{os.getpid()}")
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        try:
            for path in saved.iterdir():
                _link(path, held / path.name)
            for path in sorted(held.iterdir(), key=lambda path: path.name == checkpoint.MANIFEST):
                self._put(path, f"checkpoints/{saved.name}/{path.name}")  # the manifest last
        except FileNotFoundError:  # the run has removed it
            return
        finally:
            shutil.rmtree(held, ignore_errors=True)
        self._there.add(saved.name)

    def _remove_old(self, folder: Path) -> None:
        """Removes checkpoints that the run has removed, once its newest one is complete there."""
        saved = checkpoint.saved_in(folder / "checkpoints")
        if not saved or saved[0].name not in self._there:
            return
        here = {path.name for path in saved}
        for name in {path.split("/")[1] for path in self._find("checkpoints")}:
            if name not in here and -1 < checkpoint.step_of(name) < checkpoint.step_of(saved[0].name):
                self._remove(f"checkpoints/{name}")
                self._there.discard(name)

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
            self.writer.confirm()
            if self.has_folders:
                self.store.makedirs(f"{self.path}/{name}".rpartition("/")[0], exist_ok=True)
            self._uploads.put_file(str(path), f"{self.path}/{name}")

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
                self.writer.confirm()
                with contextlib.suppress(FileNotFoundError):
                    self.store.rm_file(f"{self.path}/{name}")

        with_retries(remove, self.url, f"{self.url}/{folder}: cannot be removed")
        with contextlib.suppress(Exception):  # an empty folder, where there are folders
            self.store.rmdir(f"{self.path}/{folder}")


def _for_uploads(store: Any) -> Any:
    """Same store, with time for large files over a slow link."""
    if not hasattr(store, "read_timeout"):
        return store
    options = store.storage_options
    config = {"read_timeout": UPLOAD_TIMEOUT_S, **(options.get("config_kwargs") or {})}
    return type(store)(**{**options, "config_kwargs": config})


def _files_of(folder: Path) -> Iterator[Path]:
    """Files of a run folder that are copied as they are."""
    for top in sorted(folder.iterdir()):
        if top.name in NOT_COPIED:  # not even listed, as the run renames what is in it
            continue
        for path in [top, *sorted(top.rglob("*"))]:
            if path.is_file() and not path.name.startswith(".unfinished"):
                yield path


def _link(path: Path, link: Path) -> None:
    """Gives a file a second name; a copy where its file system has no links."""
    try:
        os.link(path, link)
    except OSError:
        shutil.copy2(path, link)
