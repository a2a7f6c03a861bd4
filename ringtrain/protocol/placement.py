"""Actual and planned placement of ranks, and the difference."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ringtrain.errors import PlacementError
from ringtrain.protocol import launchers
from ringtrain.protocol.env import PLAN, has_left_rank
from ringtrain.protocol.json_text import INVALID, parse_json

MAX_PLAN_LETTERS = 100_000  # the kernel's limit per variable is 131,072
MAX_ROWS = 16


@dataclass(frozen=True)
class RankPlacement:
    """Host, local rank, device and process of one rank."""

    rank: int
    size: int
    host: str
    """name by which the host calls itself"""
    local_rank: int = -1
    """-1: not known"""
    device: str = ""
    """unique ID of its GPU; "" on CPU, or if ranks share GPUs"""
    process: int = 0
    """process ID on its host; 0: not known"""


@dataclass(frozen=True)
class PlannedPlacement:
    size: int
    hosts: tuple[tuple[str, int], ...] = ()
    """name and slots, filled in this order; empty: anywhere"""
    source: str = "ringtrain launch"
    """origin of the plan, for messages"""

    def ranks(self) -> list[tuple[str, int]]:
        """Host and local rank of each rank; empty if they may be anywhere."""
        places = ((name, local_rank) for name, slots in self.hosts for local_rank in range(slots))
        return list(itertools.islice(places, max(0, self.size)))

    def to_json(self) -> str:
        """Plan as JSON, without its hosts if they are too long for an environment variable."""
        text = json.dumps(asdict(self))
        if len(text) < MAX_PLAN_LETTERS:
            return text
        return json.dumps({"size": self.size, "source": self.source})

    @classmethod
    def from_json(cls, text: str) -> PlannedPlacement:
        """Reads the output of to_json. Raises ValueError for anything else."""
        try:
            fields = parse_json(text)
            hosts = tuple((str(name), int(slots)) for name, slots in fields.get("hosts", ()))
            return cls(int(fields["size"]), hosts, str(fields.get("source", cls.source)))
        except INVALID as error:
            raise ValueError(f"{PLAN}={text[:200]!r}: expected what ringtrain launch writes: unset it") from error


def expectation(environ: Mapping[str, str]) -> PlannedPlacement | None:
    """Planned placement from `ringtrain launch`, else the number of ranks from the launcher; None without one."""
    if has_left_rank(environ):
        return None
    if PLAN in environ:
        return PlannedPlacement.from_json(environ[PLAN])
    for name in launchers.names("size"):
        if re.fullmatch("[1-9][0-9]{0,8}", environ.get(name, "")):
            return PlannedPlacement(int(environ[name]), source="the launcher")
    return None


def difference(expected: PlannedPlacement, ranks: Iterable[RankPlacement]) -> str:
    """Table of differences between the plan and the ranks known so far, with a hint how to fix them; "" if none."""
    planned = expected.ranks()
    short = Counter(_short(name) for name, _ in expected.hosts)
    by_name = {_short(name): name for name, _ in expected.hosts if short[_short(name)] == 1}
    # Hosts may have other names than the plan's: each planned host must be one host, and no two of them the same.
    actual_of: dict[str, str] = {}
    planned_of: dict[str, str] = {}
    taken: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    rows: list[tuple[str, str, str]] = []
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    for rank in ranks:
        if rank.size != expected.size or rank.rank >= expected.size or rank.rank in seen:
            rows.append((str(rank.rank), f"one of {expected.size}", f"{_ranks(rank.size)}, on {rank.host}"))
            continue
        seen.add(rank.rank)
        if rank.rank < len(planned):
            name, local_rank = planned[rank.rank]
            named = by_name.get(_short(rank.host), name)
            same = actual_of.setdefault(name, rank.host) == rank.host
            reverse = planned_of.setdefault(rank.host, name) == name
            if not (same and reverse and named == name) or rank.local_rank not in (-1, local_rank):
                local = ""
                if rank.local_rank >= 0:
                    local = f", local rank {rank.local_rank}"
                rows.append((str(rank.rank), f"{name}, local rank {local_rank}", f"{rank.host}{local}"))
        first = taken.setdefault((rank.host, rank.device), rank.rank)
        if rank.device and first != rank.rank:
            rows.append((str(rank.rank), "a GPU of its own", f"{rank.device}, which rank {first} has"))
    if not rows:
        return ""
    lines = table(("rank", "planned", "found"), rows)
    return f"ranks are not where {expected.source} has them\n{lines}\n{_advice(expected, ranks)}"


def refuse_others(
    ranks: Sequence[RankPlacement], plans: Sequence[PlannedPlacement | None], versions: Sequence[str]
) -> None:
    """Raises PlacementError unless all ranks run where the launcher has planned them, with one version of ringtrain."""
    known = [plan for plan in plans if plan is not None]
    known.append(PlannedPlacement(len(ranks), source="the launcher"))
    wrong = difference(next((plan for plan in known if plan.hosts), known[0]), ranks)
    if wrong:
        raise PlacementError(wrong)
    if len(set(versions)) > 1:
        rows = [(str(rank.rank), rank.host, version) for rank, version in zip(ranks, versions, strict=True)]
        lines = table(("rank", "host", "ringtrain"), rows)
        raise PlacementError(f"ranks run different versions of ringtrain: install the same everywhere\n{lines}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, as plain text; at most MAX_ROWS of them."""
    shown = [head, *rows[:MAX_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    lines = []
    for row in shown:
        cells = [word.ljust(width) for word, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    if len(rows) > MAX_ROWS:
        lines.append(f"  ... and {len(rows) - MAX_ROWS} more")
    return "\n".join(lines)


def _advice(expected: PlannedPlacement, ranks: Sequence[RankPlacement]) -> str:
    if expected.size > 1 and all(rank.size == 1 for rank in ranks):
        return "each process is alone: use the mpirun of the MPI that Horovod (or mpi4py) was built with"
    if len(expected.hosts) > 1 and len({rank.host for rank in ranks}) == 1:
        return f"all run on {ranks[0].host}: the launcher did not get the hosts, or their names mean one machine"
    if any(rank.device for rank in ranks):
        return "give each rank of a host a GPU of its own (hvd.local_rank()), or let them share: --device.share-gpus"
    return "look for settings of the launcher's own (a hostfile, OMPI_MCA_* or PRTE_MCA_*) that win over the plan"


def _short(host: str) -> str:
    numeric = host.replace(".", "").isdigit() or ":" in host
    return host if numeric else host.partition(".")[0].lower()


def _ranks(size: int) -> str:
    return f"one of {size}" if size > 1 else "alone in its world"
