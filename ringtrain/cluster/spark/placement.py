"""Placement of ranks on Spark's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    index: int
    host: str
    gpus: tuple[str, ...] = ()  # addresses of the GPUs that Spark assigned to the task


def assign(callers: Sequence[Caller], by_index: bool = False) -> list[tuple[Caller, dict[str, str]]]:
    """Assigns ranks host by host; returns, by rank, its task and the placement variables of Horovod over Gloo."""
    by_host: dict[str, list[Caller]] = {}
    for caller in sorted(callers, key=lambda member: member.index):
        by_host.setdefault(caller.host, []).append(caller)
    assigned: list[tuple[Caller, int]] = []
    for group in by_host.values():
        assigned += [(caller, local_rank) for local_rank, caller in enumerate(group)]
    if by_index:  # the task's partition holds the rows of that rank
        assigned.sort(key=lambda pair: pair[0].index)
    placements = []
    for rank, (caller, local_rank) in enumerate(assigned):
        group = by_host[caller.host]
        cross = [host for host, others in by_host.items() if len(others) > local_rank]
        numbers = {
            "RANK": rank,
            "SIZE": len(assigned),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": len(group),
            "CROSS_RANK": cross.index(caller.host),
            "CROSS_SIZE": len(cross),
        }
        environ = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
        environ |= {"HOROVOD_HOSTNAME": caller.host, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        # All ranks of a host see the GPUs of them all, one per rank in the order of local ranks.
        if all(member.gpus for member in group):
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(member.gpus[0] for member in group)
        placements.append((caller, environ))
    return placements
