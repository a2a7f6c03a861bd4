"""Ranges of files behind URLs, kept on a local disk by all processes of a host together, within a limit of bytes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

CHECKSUM = 4
"""first bytes of a file: CRC-32 of the others, little-endian"""
HEXADECIMAL = re.compile("[0-9a-f]{2}")
LOCK, UNFINISHED = "lock", "unfinished"
"""names of files: the first has the bytes of all others"""
_warned: set[Path] = set()
"""folders that could not be written to"""
_full: set[RangeCache] = set()
"""caches of this process whose files were all used since they were opened"""


class RangeCache(NamedTuple):
    """Contents by key. What was used since it was opened stays, as every epoch reads it again; what is older may go.

    Processes that have the same folder share it. Nothing else may be in it. A file that is damaged counts as missing.
    """

    folder: Path
    max_bytes: int
    opened_s: float
    """Unix time"""

    def get(self, key: str) -> bytes | None:
        """Content of a key; None: it is not there."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            found = path.read_bytes()
            content = found[CHECKSUM:]
            if len(found) >= CHECKSUM and zlib.crc32(content).to_bytes(CHECKSUM, "little") == found[:CHECKSUM]:
                with contextlib.suppress(OSError):  # it is another user's
                    os.utime(path)
                return content
            with self._locked():
                path.unlink()
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keeps a content if there is room for it. A folder that cannot be written to keeps nothing."""
        path, size = self._path(key), CHECKSUM + len(content)
        if size > self.max_bytes:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as lock:
                if path.exists() or not self._has_room(lock, size):
                    return
                path.parent.mkdir(exist_ok=True)
                unfinished = self.folder / UNFINISHED
                with unfinished.open("wb") as file:
                    file.write(zlib.crc32(content).to_bytes(CHECKSUM, "little"))
                    file.write(content)
                unfinished.replace(path)
        except OSError as error:
            if self.folder not in _warned:
                _warned.add(self.folder)
                print(f"ringtrain: {self.folder}: could not keep data: {error.strerror}", file=sys.stderr, flush=True)

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / name[:2] / name[2:]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """The file LOCK, which no other process or thread has meanwhile."""
        with (self.folder / LOCK).open("a+", errors="replace") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield lock
            finally:
                lock.flush()
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file, too

    def _has_room(self, lock: IO[str], size: int) -> bool:
        """Makes room for a new file, and counts it before it is there. After a kill, files are counted again."""
        lock.seek(0)
        text = lock.read()
        is_known = text.isdecimal()
        total = int(text) if is_known else 0
        if not is_known or (total + size > self.max_bytes and self not in _full):
            total = self._made_room(size)
        has_room = total + size <= self.max_bytes
        lock.truncate(0)
        lock.write(str(total + size if has_room else total))
        return has_room

    def _made_room(self, size: int) -> int:
        """Deletes files that were not used since this was opened, the oldest first, and returns the bytes of the rest.

        Down to nine tenths of the limit, as each call looks at all files.
        """
        (self.folder / UNFINISHED).unlink(missing_ok=True)  # of a process that was killed
        folders = [folder.path for folder in os.scandir(self.folder) if HEXADECIMAL.fullmatch(folder.name)]
        states = [(file.stat(), file.path) for folder in folders for file in os.scandir(folder)]
        total = sum(state.st_size for state, _ in states)
        old = [(state.st_mtime, state.st_size, path) for state, path in states if state.st_mtime < self.opened_s]
        for _, its_size, path in sorted(old):
            if total + size <= self.max_bytes * 0.9:
                break
            os.unlink(path)
            total -= its_size
        if total + size > self.max_bytes:
            _full.add(self)
        return total
