"""Placement of ranks on Spark's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.cluster import horovod_driver


@dataclass(frozen=True)
class Caller:
    index: int
    host: str
    gpus: tuple[str, ...] = ()  # addresses of the GPUs that Spark assigned to the task


def assign(callers: Sequence[Caller], by_index: bool = False) -> list[tuple[Caller, Any]]:
    """Assigns ranks host by host; returns, by rank, its task and its slot of Horovod's."""
    by_host: dict[str, list[Caller]] = {}
    for caller in sorted(callers, key=lambda member: member.index):
        by_host.setdefault(caller.host, []).append(caller)
    assigned: list[tuple[Caller, int]] = []
    for group in by_host.values():
        assigned += [(caller, local_rank) for local_rank, caller in enumerate(group)]
    if by_index:  # the task's partition holds the rows of that rank
        assigned.sort(key=lambda pair: pair[0].index)
    return [
        (caller, horovod_driver.slot(caller.host, rank, local_rank, len(assigned)))
        for rank, (caller, local_rank) in enumerate(assigned)
    ]


def gpus_of_host(callers: Sequence[Caller], host: str) -> str:
    """GPUs that all ranks of a host see, one per rank in the order of local ranks; "": those that the host has."""
    group = sorted((caller for caller in callers if caller.host == host), key=lambda member: member.index)
    if all(member.gpus for member in group):
        return ",".join(member.gpus[0] for member in group)
    return ""
