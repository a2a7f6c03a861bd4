"""Folders of training jobs that run side by side, and the slots that they share."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.cluster import processes
from ringtrain.cluster.hosts import Host
from ringtrain.errors import LaunchError
from ringtrain.protocol.json_text import INVALID, parse_json

if TYPE_CHECKING:
    import subprocess

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held(path: Path) -> Iterator[int | None]:
    """File lock, held until all processes with its descriptor have exited; yields None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def claim(path: Path, own: Mapping[str, Any], what: str, fix: str = "--folder") -> None:
    """Records the settings that a folder belongs to, or checks that they match those on record."""
    own = json.loads(json.dumps(own))
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    try:
        known = dict(parse_json(path.read_text(encoding="utf-8")))
    except INVALID:
        raise LaunchError(f"{path}: expected a JSON object that says what the folder is for: delete it") from None
    for name in {**known, **own}:
        if known.get(name) != own.get(name):
            raise LaunchError(
                f"{path.parent}: holds a {what} whose {name} is {known.get(name)}, got {own.get(name)}: give another"
                f" {fix}, or delete it"
            )


def epochs_of(path: Path, monitor: str) -> list[tuple[int, float | None]]:
    """Reads epochs, from 1, with their monitored value; incomplete lines are skipped."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(*INVALID):
            record = parse_json(line)
            value = record[monitor]
            found.append((int(record["epoch"]), None if value is None else float(value)))
    return found


def start_launch(
    words: Sequence[str], command: Sequence[str], environ: Mapping[str, str], log: Path, held: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a command on ranks by `ringtrain launch` with these options; see processes.start_beside."""
    argv = [sys.executable, "-m", "ringtrain", "launch", *words, "--", *command]
    return processes.start_beside(argv, environ, log, held)


def is_done(folder: Path) -> bool:
    """Whether a run has finished: trained all its steps or stopped early by itself."""
    try:
        summary = parse_json((folder / "summary.json").read_text(encoding="utf-8"))
        trained = summary["global_step"] >= summary["numbers"]["num_steps"]
        return bool(trained or summary["stopped_by"].startswith("train."))
    except (OSError, *INVALID):
        return False


def reason_of(log: Path, code: int) -> str:
    """Reason for a launch's exit in one line: its last message, without a traceback."""
    if code < 0:
        return f"ringtrain launch was killed by signal {-code}"
    said = log.read_text(encoding="utf-8", errors="replace").rpartition("ringtrain: ")
    lines = [line.strip() for line in said[2].split("\n") if line.strip()] or [f"exit code {code}"]
    first = lines[0] if said[1] else lines[-1]
    if first.endswith(":") and len(lines) > 1:
        return f"{first} {lines[-1]}"
    return first


Place = Mapping[str, tuple[int, ...]]
"""slot numbers by host"""


def allot(free: Mapping[str, Collection[int]], num_ranks: int) -> Place:
    """Allocates slots on the fullest host where a trial fits, else on the fewest hosts; empty if too few are free."""
    fitting = [name for name, slots in free.items() if len(slots) >= num_ranks]
    if fitting:
        name = min(fitting, key=lambda name: len(free[name]))
        return {name: tuple(sorted(free[name])[:num_ranks])}
    place, left = {}, num_ranks
    for name, slots in sorted(free.items(), key=lambda one: -len(one[1])):
        if left and slots:
            place[name] = tuple(sorted(slots)[:left])
            left -= len(place[name])
    return {} if left else place


def words_of(place: Place, hosts: Sequence[Host]) -> list[str]:
    """Options of ringtrain launch for a placement."""
    used = [Host(host.name, max(numbers(host)) + 1) for host in hosts if host.name in place]
    chosen = []
    for host in used:
        name, _, _ = str(host).rpartition(":")
        chosen += [f"{name}:{slot}" for slot in place[host.name]]
    return ["-H", ",".join(map(str, used)), "--include", ",".join(chosen)]


def numbers(host: Host) -> Sequence[int]:
    """Slot numbers of a host."""
    return host.indices or range(host.slots)


def in_words(place: Place) -> str:
    """Formats a placement, e.g. "host1:0,1"."""
    return " ".join(f"{host}:{','.join(map(str, taken))}" for host, taken in place.items())
