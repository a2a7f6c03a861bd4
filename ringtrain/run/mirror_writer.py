"""Right of one job to write to a run's mirror: a small object that names it, written anew every 20 s.

Another job takes it over when it has looked at it for a minute and seen no change. No clocks of two hosts are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from typing import Any

from ringtrain.data.data_files import with_retries
from ringtrain.errors import DataError, RunDirectoryError
from ringtrain.monitor.journal import printable
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.json_text import parse_object

WRITER = ".writer"
"""file in a run's mirror that names the job which writes"""
EXPIRES_S = 60.0
"""seconds without a change of it after which that job is considered lost"""
RENEWED_S = 20.0
POLL_S = 1.0


class Writer:
    """The right, from when it is made to `release`.

    Args:
        store: File system of fsspec.
        path: Of the mirror, which exists where the file system has folders.
        url: The same for messages; files behind a URL are tried again after an error.
        same_job: Replace another process of this job at once.
        expires_s: Seconds without a change after which another writer is considered lost.

    Raises:
        RunDirectoryError: another job writes.
        DataError: the file system cannot be reached.
    """

    def __init__(self, store: Any, path: str, url: str, same_job: bool, expires_s: float) -> None:
        self.store, self.file, self.url = store, f"{path}/{WRITER}", url
        self._expires_s = expires_s
        self._token = uuid.uuid4().hex
        self._job = Attempt.from_environment(os.environ).job
        self._taken_by = ""
        """process that has taken it over"""
        self._confirmed_s = 0.0
        """time at which it was last known to be this job's"""
        self._is_released = threading.Event()
        self._is_renewed = threading.Lock()
        self._earlier = self._claim(same_job)
        """token of the replaced writer; a write of it that was under way may still arrive"""
        # Not the thread that copies: a large file may take longer than others wait.
        self._thread = threading.Thread(target=self._keep, name="ringtrain-mirror-writer", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True when another job has taken it over."""
        return bool(self._taken_by)

    def raise_if_lost(self) -> None:
        """Raises RunDirectoryError if another job has taken it over."""
        if self._taken_by:
            raise RunDirectoryError(
                f"{self.url}: taken over by {self._taken_by}: this job ends: choose another --run.name"
            )

    def confirm(self) -> None:
        """Looks at the object if it was not renewed in time, as after the process was frozen.

        Raises:
            RunDirectoryError: another job has taken it over.
            DataError: the store cannot be reached.
        """
        if self._is_released.is_set():
            raise RunDirectoryError(f"{self.url}: given up: nothing more is copied")
        if time.monotonic() > self._confirmed_s + 2 * RENEWED_S:
            self._renew()
        self.raise_if_lost()

    def release(self) -> None:
        """Gives it up."""
        self._is_released.set()
        with self._is_renewed, contextlib.suppress(Exception):  # else others wait until it expires
            if not self.is_lost and _token(self._read()) == self._token:
                self.store.rm_file(self.file)

    def hand_over(self) -> None:
        """Leaves it to another process of the job, which takes it over; it counts as lost from now on."""
        with self._is_renewed:  # no renewal is under way, which would overwrite the other's
            self._taken_by = "another rank of this job"
        self._is_released.set()

    def _claim(self, same_job: bool) -> str:
        """Writes the object, at once or when its writer is lost; returns the token of that one, "" if there is none."""
        first = self._read()
        is_same = same_job and self._job and parse_object(first or "").get("job") == self._job
        if first is not None and not is_same:
            why = f"waiting for up to {self._expires_s:g} s: it is lost if it shows no change"
            print(f"ringtrain: {self.url}: in use by {_name(first)}: {why}", file=sys.stderr, flush=True)
            end_s = time.monotonic() + self._expires_s
            now: str | None = first
            while now == first and time.monotonic() < end_s:
                time.sleep(POLL_S)
                now = self._read()
            now = self._read()  # once more: this process may have been frozen since
            if now is not None and now != first:
                raise self._in_use_by(now or first)  # "": it is being written
        with_retries(self._write, self.url, f"{self.url}: cannot be written")
        time.sleep(POLL_S)  # of two jobs that start at the same moment, the last to write it is the writer
        self._confirmed_s = time.monotonic()
        written = self._read()
        if _token(written) != self._token:
            raise self._in_use_by(written)
        return _token(first)

    def _in_use_by(self, text: str | None) -> RunDirectoryError:
        return RunDirectoryError(
            f"{self.url}: in use by {_name(text)}: wait until it ends, or choose another --run.name"
        )

    def _keep(self) -> None:
        """Renews it until it is released or lost; the body of the thread."""
        while not self._is_released.wait(RENEWED_S) and not self.is_lost:
            with contextlib.suppress(DataError):  # once more in a while
                self._renew()

    def _renew(self) -> None:
        """Writes the object anew, or notes that another job has."""

        def renew() -> None:
            looked_s, text = time.monotonic(), self._read()
            if text is None and looked_s > self._confirmed_s + self._expires_s:
                self._taken_by = "a job that has ended meanwhile"
            elif text is not None and _token(text) not in (self._token, self._earlier):
                self._taken_by = _name(text)
            elif time.monotonic() < looked_s + RENEWED_S:  # else it was frozen, and another job may write by now
                self._write()
                self._confirmed_s = looked_s

        with self._is_renewed:
            if not self.is_lost and not self._is_released.is_set():
                with_retries(renew, self.url, f"{self.url}: cannot be written")

    def _read(self) -> str | None:
        """Text of the object; None if there is none."""

        def read() -> str | None:
            self.store.invalidate_cache(self.file.rpartition("/")[0])
            with contextlib.suppress(FileNotFoundError):
                return bytes(self.store.cat_file(self.file)).decode(errors="replace")
            return None

        return with_retries(read, self.url, f"{self.url}/{WRITER}: cannot be read")

    def _write(self) -> None:
        facts = {"host": socket.gethostname(), "process": os.getpid(), "job": self._job}
        text = json.dumps({**facts, "token": self._token, "time": time.time()})
        self.store.pipe_file(self.file, text.encode())


def _token(text: str | None) -> str:
    return str(parse_object(text or "").get("token", ""))


def _name(text: str | None) -> str:
    facts = parse_object(text or "")
    return printable(f"process {facts.get('process', '?')} on {facts.get('host', '?')}")[:200]
