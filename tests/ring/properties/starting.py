"""`init` after `shutdown` is refused, before MPI ends the process."""

from __future__ import annotations

import small

import ringtrain.hvd as hvd
from ringtrain.errors import LaunchError
from ringtrain.hvd.process import PROCESS


def a_second_start_is_refused():
    PROCESS.has_ended = True
    try:
        assert "ranks meet only once in a process" in small.raised(LaunchError, hvd.init)
    finally:
        PROCESS.has_ended = False
