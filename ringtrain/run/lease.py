"""Right of one job to write to a folder of any file system of fsspec, held as long as it is renewed.

A file names its holder, who writes it anew every 20 s. Others take it over when it has not changed for a minute. Of two
jobs that start at the same moment, one gets it: the last to write it, or, where there are conditional writes (S3,
Google's, Azure's), the first.
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
from collections.abc import Callable, Mapping
from typing import Any

from ringtrain.data.data_files import with_retries
from ringtrain.errors import RunDirectoryError
from ringtrain.monitor.journal import printable
from ringtrain.protocol.env import JOB
from ringtrain.protocol.json_text import INVALID, parse_json
from ringtrain.run.run_folder import LEASE, LEASE_EXPIRES_S

RENEWED_S = 20.0
POLL_S = 1.0


class Lease:
    """Lease of a folder, from when it is made to `release`. A thread renews it.

    Args:
        store: File system of fsspec.
        path: Of the folder, which exists where the file system has folders.
        url: The same for messages; files behind a URL are tried again after an error.
        same_job: Take it over at once from an earlier attempt of this job.
        expires_s: Seconds without a change after which the holder is considered lost.
        on_loss: Called from the thread when another job has taken it over.

    Raises:
        RunDirectoryError: another job holds it.
        DataError: the file system cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        path: str,
        url: str,
        same_job: bool = False,
        expires_s: float = LEASE_EXPIRES_S,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.file, self.url, self.on_loss = store, f"{path}/{LEASE}", url, on_loss
        self._token = uuid.uuid4().hex
        self._renewals = 0
        self._taken_by = ""
        self._is_released = threading.Event()
        self._take(same_job, expires_s)
        self._thread = threading.Thread(target=self._keep, name="ringtrain-lease", daemon=True)
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

    def release(self) -> None:
        """Gives it up."""
        self._is_released.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # else it expires
            if _token(self._read()) == self._token:
                self.store.rm_file(self.file)

    def _take(self, same_job: bool, expires_s: float) -> None:
        """Writes the lease, at once or when its holder has not renewed it for a while."""
        if self._created() and self._is_kept():
            return
        first, begin_s = self._read(), time.monotonic()
        in_use = f"{self.url}: in use by {_holder(first)}"
        job = _facts(first).get("job")
        if not (same_job and job and job == os.environ.get(JOB)):
            why = f"waiting for up to {expires_s:g} s: if that process is lost, its lease expires"
            print(f"ringtrain: {in_use}: {why}", file=sys.stderr, flush=True)
            while time.monotonic() < begin_s + expires_s:
                time.sleep(POLL_S)
                now = self._read()
                if not now and self._created() and self._is_kept():
                    return
                if now != first:
                    raise RunDirectoryError(f"{in_use}: wait until it ends, or choose another --run.name")
        with_retries(self._write, self.url, f"{self.url}: cannot be written")
        if not self._is_kept():
            raise RunDirectoryError(f"{in_use}, and taken over by another job: choose another --run.name")

    def _is_kept(self) -> bool:
        """Returns whether it is still this job's after a while, in which another one may have written it as well."""
        time.sleep(POLL_S)
        return _token(self._read()) == self._token

    def _created(self) -> bool:
        """Writes it if there is none; returns whether it is this job's."""

        def create() -> bool:
            try:
                self.store.pipe_file(self.file, self._text(), mode="create")
            except Exception as error:  # stores have errors of their own for one that exists
                text = self._read()
                if not text and not isinstance(error, FileExistsError):
                    raise
                return _token(text) == self._token  # written, but the answer was lost
            return True

        return with_retries(create, self.url, f"{self.url}: cannot be written")

    def _keep(self) -> None:
        """Renews it until it is released or lost; the body of the thread."""
        while not self._is_released.wait(RENEWED_S):
            with contextlib.suppress(Exception):  # once more in a while; the lease lasts longer than that
                text = self._read()
                if text and _token(text) != self._token:
                    self._taken_by = _holder(text)
                    self.on_loss()
                    return
                self._write()

    def _read(self) -> str:
        def read() -> str:
            self.store.invalidate_cache(self.file.rpartition("/")[0])
            with contextlib.suppress(FileNotFoundError):
                return bytes(self.store.cat_file(self.file)).decode(errors="replace")
            return ""

        return with_retries(read, self.url, f"{self.url}/{LEASE}: cannot be read")

    def _write(self) -> None:
        self.store.pipe_file(self.file, self._text())

    def _text(self) -> bytes:
        self._renewals += 1
        facts = {"host": socket.gethostname(), "process": os.getpid(), "job": os.environ.get(JOB, "")}
        return json.dumps({**facts, "token": self._token, "renewals": self._renewals}).encode()


def _facts(text: str) -> Mapping[str, Any]:
    try:
        facts = parse_json(text)
    except INVALID:
        return {}
    return facts if isinstance(facts, dict) else {}


def _token(text: str) -> str:
    return str(_facts(text).get("token", ""))


def _holder(text: str) -> str:
    facts = _facts(text)
    return printable(f"process {facts.get('process', '?')} on {facts.get('host', '?')}")[:200]
