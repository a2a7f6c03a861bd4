"""Comparison of the ranks' placement with the launcher's plan, at hvd.init() and, with devices, before training."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

import ringtrain
from ringtrain.errors import PlacementError
from ringtrain.hvd.backend import horovod
from ringtrain.hvd.process import elastic
from ringtrain.protocol.env import ALONE, COLLECTIVES
from ringtrain.protocol.placement import RankPlacement, difference, expectation, refuse_others

CPU = "CPU:0"
"""device of small collectives: NCCL rejects ranks without a GPU, and two ranks on one GPU"""


def check_local_placement() -> None:
    """Compares this rank's placement with the plan, without a collective; raises PlacementError with a table."""
    # No collective: a process that is alone in its world by mistake cannot reach the others.
    if elastic() or os.environ.get(COLLECTIVES) == ALONE:
        return  # elastic ranks join and leave; with parameter servers, ranks were checked before
    expected = expectation(os.environ)
    if expected is None:
        return
    local = RankPlacement(horovod.rank(), horovod.size(), socket.gethostname(), horovod.local_rank())
    wrong = difference(expected, [local])
    if wrong:
        raise PlacementError(wrong)


def check_placement(device: str = "") -> None:
    """Compares the placement of all ranks with the launcher's plan. A collective.

    Args:
        device: Unique ID of this rank's device, such as the UUID of its GPU, different for all ranks of a host. "": no
            device of its own.

    Raises:
        PlacementError: On every rank: placement, GPUs or ringtrain versions do not match. Contains a table.
    """
    if os.environ.get(COLLECTIVES) == ALONE:
        return
    local = RankPlacement(horovod.rank(), horovod.size(), socket.gethostname(), horovod.local_rank(), device)
    expected = None if elastic() else expectation(os.environ)
    report = (local, expected, ringtrain.__version__)
    with tf.device(CPU):
        if horovod.size() > 1:
            reports = horovod.allgather_object(report, name="ringtrain_placement")
        else:
            reports = [report]
    ranks, plans, versions = zip(*reports, strict=True)
    refuse_others(ranks, plans, versions)
    without = [f"rank {rank.rank} on {rank.host}" for rank in ranks if not rank.device]
    if horovod.nccl_built() and 0 < len(without) < len(ranks):
        raise PlacementError(
            f"{', '.join(without)} found no GPU, and others did: NCCL cannot add up gradients of both: give every rank "
            "a GPU, or hide all of them on every host (CUDA_VISIBLE_DEVICES=)"
        )
