"""A run folder on a disk that loses, when the machine loses its power, what was not flushed.

Real files are written by production code in a temporary folder, and what it does to them is recorded: Python's audit
events, and each `os.fsync` with the content that it has made safe. A loss of power is then made from the record up to
some moment: a file that was not flushed has no content, part of it or all of it; of the changes to the entries of a
folder (new, renamed, removed) since it was flushed, only the first few are there. That is what POSIX allows of the
changes to one folder, with those of several folders in any order.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Event = tuple[Any, ...]
_recorders: list[Recorder] = []
_fsync = os.fsync


class Recorder:
    """Events below a folder while it is the recording one: kind, path, and what else belongs to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, []
        self.events: list[Event]

    def note(self, kind: str, path: Any, dir_fd: Any = -1, *more: Any) -> None:
        name = os.fsdecode(path)
        if dir_fd not in (-1, None):
            name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
        full = os.path.abspath(name)
        if f"{full}/".startswith(f"{self.root}/"):
            self.events.append((kind, full, *more))

    @contextmanager
    def recording(self) -> Iterator[None]:
        _recorders.append(self)
        try:
            with mock.patch.object(os, "fsync", self._fsync):
                yield
        finally:
            _recorders.remove(self)

    def _fsync(self, descriptor: int) -> None:
        _fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        content = None
        if os.path.isfile(path):
            content = Path(path).read_bytes()
        self.note("flush", path, -1, content)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _recorders:
        return
    recorder = _recorders[-1]
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR):
            recorder.note("write", path, -1, bool(flags & os.O_TRUNC))
    elif event in ("os.mkdir", "os.rmdir", "os.remove"):
        recorder.note(event.removeprefix("os."), arguments[0], arguments[-1])
    elif event == "os.rename":
        source = Path(os.fsdecode(arguments[0]))
        content = source.read_bytes() if source.is_file() else None
        recorder.note("rename", source, -1, os.path.abspath(os.fsdecode(arguments[1])), content)


sys.addaudithook(_audit)


@dataclass
class _File:
    content: bytes = b""
    """that processes see, as far as it is known"""
    is_flushed: bool = False


@dataclass
class _Folder:
    entries: dict[str, Any] = field(default_factory=dict)
    """that were flushed"""
    changes: list[tuple[tuple[str, Any], ...]] = field(default_factory=list)
    """since then, of which each is seen whole: names with what they stand for, None: removed"""
    seen: dict[str, Any] = field(default_factory=dict)
    """entries as processes see them"""

    def change(self, *changes: tuple[str, Any]) -> None:
        for name, node in changes:
            self.seen[name] = node
            if node is None:
                del self.seen[name]
        self.changes.append(changes)

    def flush(self) -> None:
        self.entries, self.changes = dict(self.seen), []


class Disk:
    """Files of a folder as a disk holds them. Starts with the files that are there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = self._read(root)

    def _read(self, folder: Path) -> _Folder:
        entries: dict[str, Any] = {}
        for path in folder.iterdir():
            entries[path.name] = self._read(path) if path.is_dir() else _File(path.read_bytes(), True)
        return _Folder(entries, [], dict(entries))

    def apply(self, event: Event) -> None:
        """Makes a recorded change, unless it has failed, as it was recorded before."""
        kind, path, *more = event
        if path == str(self.root):  # flushed, or created although it is there
            self.top.flush()
            return
        try:
            parent, name = self._place(path)
        except KeyError:
            return
        node = parent.seen.get(name)
        if kind == "write":
            self._write_to(parent, name, *more)
        elif kind == "mkdir" and node is None:
            parent.change((name, _Folder()))
        elif kind in ("rmdir", "remove") and node is not None:
            parent.change((name, None))
        elif kind == "rename":
            self._rename(parent, name, *more)
        elif kind == "flush" and isinstance(node, _File):
            node.content, node.is_flushed = more[0], True
        elif kind == "flush" and isinstance(node, _Folder):
            node.flush()

    def _write_to(self, parent: _Folder, name: str, is_emptied: bool) -> None:
        if name not in parent.seen:
            parent.change((name, _File()))
        elif is_emptied:
            parent.seen[name].is_flushed = False

    def _rename(self, parent: _Folder, name: str, target: str, content: bytes | None) -> None:
        other, new = self._place(target)
        node = parent.seen[name]
        if isinstance(node, _File) and content is not None:
            node.content = content
        if other is parent:
            parent.change((new, node), (name, None))
        else:  # one may be on disk without the other
            other.change((new, node))
            parent.change((name, None))

    def _place(self, path: str) -> tuple[_Folder, str]:
        *parents, name = Path(path).relative_to(self.root).parts
        folder = self.top
        for parent in parents:
            folder = folder.seen[parent]
        return folder, name

    def after_power_loss(self, choose: random.Random, folder: Path) -> None:
        """Writes to an empty folder what may be left."""
        self._write_left(self.top, choose, folder)

    def _write_left(self, node: _Folder, choose: random.Random, folder: Path) -> None:
        entries = dict(node.entries)
        # Often all or none: with several folders, few others would come about.
        number = choose.choice([0, len(node.changes), choose.randint(0, len(node.changes))])
        for changes in node.changes[:number]:
            for name, entry in changes:
                entries[name] = entry
                if entry is None:
                    del entries[name]
        for name, entry in entries.items():
            if isinstance(entry, _Folder):
                (folder / name).mkdir()
                self._write_left(entry, choose, folder / name)
            else:
                content = entry.content
                if not entry.is_flushed:
                    content = choose.choice([b"", content[: choose.randint(0, len(content))], content])
                (folder / name).write_bytes(content)
