"""Ranks are where they were meant to be, each on a device of its own."""

from __future__ import annotations

import os
import socket

import small

import ringtrain.hvd as hvd
from ringtrain.errors import PlacementError
from ringtrain.reports import PLAN, Expected


def ranks_in_their_places_pass():
    hvd.check_placement()
    hvd.check_placement(f"GPU-{hvd.rank()}")
    _with_plan(Expected(hvd.size(), ((socket.gethostname(), hvd.size()),)))


def two_ranks_on_one_gpu_are_named_on_every_rank():
    message = small.raised(PlacementError, lambda: hvd.check_placement("GPU-0"))
    assert "GPU-0, which rank 0 has" in message
    assert "--device.share-gpus" in message


def ranks_that_are_elsewhere_are_named_on_every_rank():
    apart = Expected(hvd.size(), tuple((f"host{rank}", 1) for rank in range(hvd.size())))
    message = small.raised(PlacementError, lambda: _with_plan(apart))
    rows = [line.split() for line in message.splitlines()[2:-1]]
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, hvd.size())]
    assert message.endswith("the launcher did not get the hosts, or their names mean one machine")


def another_number_of_ranks_is_noticed():
    other = Expected(hvd.size() + 1, ((socket.gethostname(), hvd.size() + 1),))
    message = small.raised(PlacementError, lambda: _with_plan(other))
    assert f"one of {hvd.size() + 1}" in message


def _with_plan(plan: Expected) -> None:
    os.environ[PLAN] = plan.to_json()
    try:
        hvd.check_placement()
    finally:
        del os.environ[PLAN]
