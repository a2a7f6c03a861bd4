"""Slow tests, of which `make test-all` runs others each day, and the time at which the rest of them is left out.

RINGTRAIN_SAMPLE=all runs all of them, RINGTRAIN_SAMPLE=DAY those of a day, whose number pytest prints at its start.
RINGTRAIN_TESTS_END is a time in seconds since 1970 after which no slow test begins, so that CI ends on any machine.
"""

from __future__ import annotations

import os
import time
import zlib

VARIABLE = "RINGTRAIN_SAMPLE"
END = "RINGTRAIN_TESTS_END"
SECONDS_PER_DAY = 86_400


def choose() -> str:
    """Sets the day, if it is not given, for this process and those that it starts."""
    return os.environ.setdefault(VARIABLE, str(int(time.time() // SECONDS_PER_DAY)))


def is_due(case: str, one_in: int = 2) -> bool:
    """Whether a case is in the sample, as one in so many."""
    day = choose()
    return day == "all" or (zlib.crc32(case.encode()) + int(day)) % one_in == 0


def is_time_up() -> bool:
    """Whether it is too late to begin a slow test."""
    return time.time() > float(os.environ.get(END, "inf"))
