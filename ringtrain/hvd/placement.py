"""Are the ranks where the launcher was told to put them? Asked at hvd.init() and, with devices, before training."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

import ringtrain
from ringtrain.errors import PlacementError
from ringtrain.hvd.backend import horovod
from ringtrain.protocol.env import ALONE, COLLECTIVES
from ringtrain.protocol.launcher_args import expectation
from ringtrain.protocol.placement import PlannedPlacement, RankPlacement, difference, table

CPU = "CPU:0"
"""device of small collectives: on GPUs, NCCL refuses ranks without one, and two ranks on the same one"""


def check_own_seat() -> None:
    """Compares what Horovod says of this rank with what its launcher was told; asks no other rank.

    It comes before the first collective: processes that are alone in their worlds by mistake could not talk about it.

    Raises:
        PlacementError: with a table of what differs.
    """
    if os.environ.get("HOROVOD_ELASTIC") == "1" or os.environ.get(COLLECTIVES) == ALONE:
        return  # its ranks come and go; or have been asked already
    expected = expectation(os.environ)
    if expected is None:
        return
    rank, host = horovod.rank(), socket.gethostname()
    found = {
        "ranks": horovod.size(),
        "local rank": horovod.local_rank(),
        "ranks on this host": horovod.local_size(),
        "hosts with such a rank": horovod.cross_size(),
    }
    planned = expected.counts(rank)
    rows = [(name, str(planned[name]), str(found[name])) for name in planned if planned[name] != found[name]]
    seat = RankPlacement(rank, horovod.size(), host, horovod.local_rank())
    elsewhere = difference(expected, [seat])
    if rows:
        lines = table((f"rank {rank} on {host}", "planned", "found"), rows)
        advice = elsewhere.rpartition("\n")[2] if elsewhere else _advice(found["hosts with such a rank"], expected)
        raise PlacementError(f"ranks are not where {expected.source} has them\n{lines}\n{advice}")
    if elsewhere:
        raise PlacementError(elsewhere)


def check_placement(device: str = "") -> None:
    """Compares where all ranks are with where they shall be. A collective: all ranks call it.

    Args:
        device: that this rank uses, named so that no other device of the host has the same name, such as a GPU's UUID.
            No two ranks of a host may have the same. Empty: none of its own.

    Raises:
        PlacementError: on every rank alike, with a table of what differs.
    """
    if os.environ.get(COLLECTIVES) == ALONE:
        return
    own = RankPlacement(horovod.rank(), horovod.size(), socket.gethostname(), horovod.local_rank(), device)
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
    expected = None if elastic else expectation(os.environ)
    report = (own, expected, ringtrain.__version__)
    with tf.device(CPU):
        everybody = horovod.allgather_object(report, name="ringtrain_placement") if horovod.size() > 1 else [report]
    seats, expectations, versions = zip(*everybody, strict=True)
    told = next((each for each in expectations if each is not None and each.hosts), None) or expected
    told = told or PlannedPlacement(own.size, source="the launcher")
    if wrong := difference(told, seats):
        raise PlacementError(wrong)
    without = [f"rank {seat.rank} on {seat.host}" for seat in seats if not seat.device]
    if horovod.nccl_built() and 0 < len(without) < len(seats):
        raise PlacementError(
            f"{', '.join(without)} found no GPU, and others did: NCCL cannot add up gradients of both: give every rank "
            "a GPU, or hide all of them on every host (CUDA_VISIBLE_DEVICES=)"
        )
    if len(set(versions)) > 1:
        rows = [(str(seat.rank), seat.host, version) for seat, version in zip(seats, versions, strict=True)]
        lines = table(("rank", "host", "ringtrain"), rows)
        raise PlacementError(f"ranks run different versions of ringtrain: install the same everywhere\n{lines}")


def _advice(num_hosts: int, expected: PlannedPlacement) -> str:
    if num_hosts < len(expected.hosts):
        return "the launcher did not get the hosts, or their names mean one machine"
    return "look for settings of the launcher's own (OMPI_MCA_*, PRTE_MCA_*) that win over what it was told"
