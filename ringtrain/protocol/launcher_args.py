"""Placement that a launcher was given, read by a rank from the launcher's command line."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ringtrain.protocol import launchers
from ringtrain.protocol.env import PLAN, has_left_rank
from ringtrain.protocol.failures import ancestors
from ringtrain.protocol.placement import PlannedPlacement

NUM_WORDS = ("-np", "--np", "-n", "--n", "-c", "--num-proc")
HOST_WORDS = ("-H", "--host", "-host", "-hosts", "--hosts")
FILE_WORDS = ("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")
NO_VALUE = re.compile(r"-+(allow-run-as-root|(tag|timestamp)-output|oversubscribe|verbose|v|q|l|gloo|mpi)")
TWO_VALUES = re.compile(r"--?(mca|pmixmca|prtemca|gmca)|-genv")
NUMBER = re.compile(r"[0-9]{1,9}")
# Options that may place ranks in another order than slot by slot: then only their number can be compared.
OTHER_ORDER = re.compile(
    r"rmaps_|-?-(map-by|rankfile|rf|N|npernode|ppn|pernode|bynode|npersocket|oversubscribe|app|rank-by|rr)\b|:$"
)


def expectation(environ: Mapping[str, str], process: int = 0, proc: Path = Path("/proc")) -> PlannedPlacement | None:
    """Planned placement from `ringtrain launch`, else a launcher's command line, else its world size; None without one.

    The search for a launcher on this host begins at `process`; 0: this one.
    """
    if has_left_rank(environ):
        return None
    if PLAN in environ:
        return PlannedPlacement.from_json(environ[PLAN])
    size = next((int(environ[name]) for name in launchers.names("size") if NUMBER.fullmatch(environ.get(name, ""))), 0)
    planned = placement_on_command_line(
        launcher_among_ancestors(process or os.getpid(), proc), read_lines, socket.gethostname()
    )
    policies = [value for name, value in environ.items() if name.startswith(("OMPI_MCA_rmaps_", "PRTE_MCA_rmaps_"))]
    if planned and any(value != "slot" for value in policies):  # mpirun itself sets "slot" for `-map-by slot`
        planned = replace(planned, hosts=())
    if planned and (not size or planned.size in (0, size)):
        if planned.size or size:
            return replace(planned, size=planned.size or size)
        return None
    return PlannedPlacement(size, source="the launcher") if size else None


def launcher_among_ancestors(process: int, proc: Path = Path("/proc")) -> list[str]:
    """Command line of the nearest launcher among the ancestors of a process on this host; empty if there is none."""
    with contextlib.suppress(OSError):
        for ancestor in itertools.takewhile(lambda ancestor: ancestor > 1, ancestors(process, proc)):
            words = (proc / str(ancestor) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            # A launcher may be a script, preceded by its interpreter.
            for start in (0, 1):
                if os.path.basename("".join(words[start : start + 1])) in launchers.PROGRAMS:
                    return words[start:]
    return []


def placement_on_command_line(
    words: Sequence[str], read: Callable[[str], Sequence[str]], hostname: str = ""
) -> PlannedPlacement | None:
    """Ranks and hosts on a launcher's command line; None without one.

    `read` returns the lines of a hostfile; `hostname` is the name of this host, where the launcher runs. Hosts are
    returned only if it is certain that their slots are filled in order. Size 0: not given.
    """
    if not words:
        return None
    name, *rest = words
    size, ordered = 0, True
    hosts: list[tuple[str, int]] = []
    end = next((place for place, word in enumerate(rest) if is_program(rest, place)), len(rest))
    shown = " ".join([os.path.basename(name), *rest[: min(end, 8)]])
    for place, word in enumerate(rest[:end]):
        value = rest[place + 1] if place + 1 < len(rest) else ""
        if word in NUM_WORDS and NUMBER.fullmatch(value) and not size:
            size = int(value)
        elif word in HOST_WORDS and not hosts:
            hosts = [slots_of(item) for item in value.split(",")]
        elif word in FILE_WORDS and not hosts:
            lines = (line.partition("#")[0].strip() for line in read(value))
            hosts = [slots_of(line) for line in lines if line]
        elif OTHER_ORDER.match(word) and not (word.endswith("map-by") and value == "slot"):
            ordered = False
    known = [(host, slots) for host, slots in hosts if slots]
    sure = ordered and size and len(known) == len(hosts) and len(dict(known)) == len(known)
    sure = sure and sum(slots for _, slots in known) >= size
    # Open MPI 4 fills the launching host first, wherever it is listed; Open MPI 5 and Hydra do not.
    sure = sure and not any(host.partition(".")[0] == hostname.partition(".")[0] for host, _ in known[1:])
    return PlannedPlacement(size, tuple(known) if sure else (), source=f"`{shown}`")


def is_program(words: Sequence[str], place: int) -> bool:
    """Whether an argument may be the ranks' program: the first one that belongs to no option."""
    if words[place].startswith("-") or (place > 1 and TWO_VALUES.fullmatch(words[place - 2])):
        return False
    before = words[place - 1] if place else ""
    return not before.startswith("-") or NO_VALUE.fullmatch(before) is not None


def slots_of(item: str) -> tuple[str, int]:
    """Host and slots from `host:4` or `host slots=4`; 0 slots: not understood."""
    match = re.fullmatch(
        r"([\w.-]+)(?::([0-9]{1,9})|(?:\s+slots\s*=\s*([0-9]{1,9}))(?:\s+max[_-]slots\s*=\s*\d+)?)?", item
    )
    if not match:
        return item, 0
    return match[1], int(match[2] or match[3] or 1)


def read_lines(path: str) -> Sequence[str]:
    """Lines of a hostfile; none if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
