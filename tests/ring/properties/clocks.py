"""Clocks of ranks, compared."""

from __future__ import annotations

import time

import ringtrain.hvd as hvd
from ringtrain.hvd.timeline import clock_offset


def clocks_that_are_apart_are_measured():
    late_s = 1000.0 * hvd.rank()
    offset_s, error_s = clock_offset(lambda: time.time() - late_s, clock=f"of rank {hvd.rank()}")
    assert abs(offset_s - late_s) <= error_s < 10 and (error_s > 0) == (hvd.rank() > 0), (offset_s, error_s)


def ranks_of_one_host_have_one_clock():
    assert clock_offset() == (0.0, 0.0)
