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
from collections.abc import Callable
from typing import Any

from ringtrain.data.data_files import with_retries
from ringtrain.errors import DataError, RunDirectoryError
from ringtrain.monitor.journal import printable
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.json_text import parse_object
from ringtrain.run.run_folder import LEASE, LEASE_EXPIRES_S

RENEWED_S = 20.0
LEND_S = 1.0
POLL_S = 1.0
LAST_OF = "last_of"
"""key of a lease whose holder makes the last copy of a run, with the number of the job's attempt"""
MAX_LOOKS = 5
"""at a lease that a slow store, or a process that is frozen again and again, shows too late"""


class Lease:
    """Lease of a folder, from when it is made to `release`. A thread renews it.

    Args:
        store: File system of fsspec.
        path: Of the folder, which exists where the file system has folders.
        url: The same for messages; files behind a URL are tried again after an error.
        same_job: Take it over at once from an earlier attempt of this job.
        expires_s: Seconds without a change after which the holder is considered lost.
        on_loss: Called from the thread when another job has taken it over.
        lent: Result of `lend` of the process that holds it; None: it is taken.

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
        lent: dict[str, Any] | None = None,
    ) -> None:
        self.store, self.file, self.url, self.on_loss = store, f"{path}/{LEASE}", url, on_loss
        self._expires_s = expires_s
        self._token = uuid.uuid4().hex
        self._earlier = ""
        """token of the holder that was replaced; a write of it that was under way may still arrive"""
        self._confirmed_s = 0.0
        """time at which it was last known to be this job's"""
        self._renewals = 0
        self.taken_by = ""
        """process that has taken it over"""
        self._is_released = threading.Event()
        self._is_checked = threading.Lock()
        self.is_lent = False
        """another process has it, for the last copy of the run"""
        self._is_for_last_copy = lent is not None
        if lent is None:
            self._take(same_job)
        else:
            self.__dict__ |= lent
            with contextlib.suppress(DataError):  # else with the first renewal
                self._check()
        self._keep_it()

    @property
    def is_lost(self) -> bool:
        """True when another job has taken it over."""
        return bool(self.taken_by)

    def raise_if_lost(self) -> None:
        """Raises RunDirectoryError if another job has taken it over."""
        if self.taken_by:
            raise RunDirectoryError(
                f"{self.url}: taken over by {self.taken_by}: this job ends: choose another --run.name"
            )

    @property
    def writer(self) -> str:
        """Name of the holder in the names of what it writes, of 8 letters."""
        # A file that the lending process was writing may still arrive.
        return self._token[8:16] if self._is_for_last_copy else self._token[:8]

    def confirm(self) -> None:
        """Reads it if it was not renewed in time, as after the process was frozen.

        Raises:
            RunDirectoryError: another job has taken it over.
            DataError: the store cannot be reached, or takes too long.
        """
        if self.is_lent:
            raise RunDirectoryError(f"{self.url}: another process makes the last copy")
        for _ in range(MAX_LOOKS):
            if self.is_lost or time.monotonic() < self._confirmed_s + 2 * RENEWED_S:
                break
            self._check()
        else:
            raise DataError(f"{self.url}: takes longer than {RENEWED_S:g} s to answer")
        self.raise_if_lost()

    def release(self) -> None:
        """Gives it up."""
        self._is_released.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # else it expires
            if not (self.is_lost or self.is_lent) and _token(self._read()) == self._token:
                self.store.rm_file(self.file)

    def hand_over(self) -> None:
        """Leaves it to another process of the job, which takes it over; it counts as lost from now on."""
        with self._is_checked:  # no renewal is under way, which would overwrite the other's
            self.taken_by = "another rank of this job"
        self._is_released.set()
        self.on_loss()

    def lend(self) -> dict[str, Any]:
        """Leaves it to the process of the last copy, with its state. This one writes nothing until `take_back`.

        Raises:
            DataError: a renewal takes too long.
        """
        if not self._is_checked.acquire(timeout=LEND_S):
            raise DataError(f"{self.url}: the lease is being renewed for more than {LEND_S:g} s")
        self.is_lent = True
        self._is_checked.release()
        self._is_released.set()
        names = ("_token", "_earlier", "_confirmed_s", "_renewals")
        return {name: getattr(self, name) for name in names}

    def take_back(self) -> None:
        """Continues to hold what was lent, if it was: the process of the last copy was killed."""
        if not self.is_lent:
            return
        self.is_lent = False
        self._is_released.clear()
        self._keep_it()

    def _take(self, same_job: bool) -> None:
        """Writes the lease, at once or when its holder has not renewed it for a while."""
        expires_s = self._expires_s
        # Read first: a store without conditional writes would overwrite it.
        if not self._read() and self._created() and not self._others():
            return
        first, begin_s = self._read(), time.monotonic()
        facts, own = parse_object(first), _own_attempt()
        is_same = same_job and own.job and facts.get("job") == own.job and facts.get(LAST_OF, own.number) == own.number
        is_own = _token(first) == self._token  # whose first write was not answered
        if not is_own and not is_same:
            why = f"waiting for up to {expires_s:g} s: if that process is lost, its lease expires"
            if LAST_OF in facts:
                why = "waiting until the last copy of the earlier run, which it makes, has ended"
            print(f"ringtrain: {self.url}: in use by {_holder(first)}: {why}", file=sys.stderr, flush=True)
            read_s = begin_s
            expiry_s = begin_s + expires_s
            limit_s = expiry_s + MAX_LOOKS * RENEWED_S
            # Read again after a pause in which this process was frozen: another job may hold it by now.
            while read_s < expiry_s or read_s + RENEWED_S < time.monotonic() < limit_s:
                time.sleep(POLL_S)
                read_s, now = time.monotonic(), self._read()
                if not now:
                    if self._created() and not self._others():
                        return
                    now = self._read()
                if _token(now) == self._token:  # its first write has arrived, late
                    break
                if now != first and LAST_OF not in parse_object(now):
                    raise RunDirectoryError(self._in_use_by(now or first))
                if now != first:  # its holder makes the last copy of a run, and ends
                    first, expiry_s = now, read_s + expires_s
                    limit_s = expiry_s + MAX_LOOKS * RENEWED_S
        self._earlier = _token(first)
        with_retries(self._write, self.url, f"{self.url}: cannot be written")
        other = self._others()
        if other:
            raise RunDirectoryError(self._in_use_by(other))

    def _in_use_by(self, text: str) -> str:
        return f"{self.url}: in use by {_holder(text)}: wait until it ends, or choose another --run.name"

    def _others(self) -> str:
        """Text of the lease if it is another job's after a while, in which both may have written it; else ""."""
        time.sleep(POLL_S)
        read_s, text = time.monotonic(), self._read()
        if _token(text) != self._token:
            return text or "?"
        self._confirmed_s = read_s
        return ""

    def _created(self) -> bool:
        """Writes it if there is none; returns whether it did. It may have although the answer was lost."""

        def create() -> bool:
            try:
                self.store.pipe_file(self.file, self._text(), mode="create")
            except Exception as error:  # stores have errors of their own for one that exists
                if not self._read() and not isinstance(error, FileExistsError):
                    raise
                return False
            return True

        return with_retries(create, self.url, f"{self.url}: cannot be written")

    def _keep_it(self) -> None:
        self._thread = threading.Thread(target=self._keep, name="ringtrain-lease", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        """Renews it until it is released or lost; the body of the thread."""
        while not self._is_released.wait(RENEWED_S):
            with contextlib.suppress(Exception):  # once more in a while; the lease lasts longer than that
                self._check()
            if self.is_lost:
                return

    def _check(self) -> None:
        """Renews it, or notes that another job has it."""

        def renew() -> None:
            read_s, text = time.monotonic(), self._read()
            if not text and time.monotonic() > self._confirmed_s + self._expires_s:
                self.taken_by = "another job, which may have ended: the lease has expired and is gone"
                self.on_loss()
            elif text and _token(text) not in (self._token, self._earlier):
                self.taken_by = _holder(text)
                self.on_loss()
            elif time.monotonic() < read_s + RENEWED_S:  # else it was frozen, and another job may have it by now
                self._write()
                self._confirmed_s = read_s

        with self._is_checked:
            if not self.is_lost and not self.is_lent:
                with_retries(renew, self.url, f"{self.url}: cannot be written")

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
        own = _own_attempt()
        facts: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid(), "job": own.job}
        if self._is_for_last_copy:
            facts[LAST_OF] = own.number
        return json.dumps({**facts, "token": self._token, "renewals": self._renewals}).encode()


def _own_attempt() -> Attempt:
    return Attempt.from_environment(os.environ)


def _token(text: str) -> str:
    return str(parse_object(text).get("token", ""))


def _holder(text: str) -> str:
    facts = parse_object(text)
    return printable(f"process {facts.get('process', '?')} on {facts.get('host', '?')}")[:200]
