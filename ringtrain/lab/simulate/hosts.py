"""Failures of hosts in the order of time, from a seed, and which hosts are down."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

import numpy as np

Failure = tuple[float, int]
"""time in seconds from the job's start, and number of the host"""
NEVER: Failure = (math.inf, -1)
CHUNK = 512
"""failures that are drawn at once"""


def failures(num_hosts: int, mtbf_s: float, seed: tuple[int, ...]) -> Iterator[Failure]:
    """Yields failures of hosts that fail independently of each other and of their age: exponential times.

    A host that is down cannot fail: `Outages` skips its failures until it is back.
    """
    if math.isinf(mtbf_s):
        return
    random = np.random.default_rng(seed)
    now_s = 0.0
    while True:
        times_s = now_s + random.exponential(mtbf_s / num_hosts, CHUNK).cumsum()
        hosts = random.integers(num_hosts, size=CHUNK)
        yield from zip(times_s.tolist(), hosts.tolist(), strict=True)
        now_s = float(times_s[-1])


class Outages:
    """Failures of the first hosts of a list, and when each failed host answers again.

    repair_s: Seconds until a failed host answers again; 0.0: it answers at once, as after a crash of a process.
    """

    def __init__(self, failures: Iterator[Failure], num_hosts: int, repair_s: float) -> None:
        self.repair_s = repair_s
        self.back_s: dict[int, float] = {}
        """time at which a host answers again, by host; of hosts that have answered since: none"""
        self._failures = failures
        self._num_hosts = num_hosts
        self._next = next(failures, NEVER)

    def first(self, until_s: float, used: Container[int]) -> Failure | None:
        """Next failure of a host in use, if it comes before a time; failures of other hosts up to it are noted."""
        while self._next[0] < until_s:
            time_s, host = self._next
            self._next = next(self._failures, NEVER)
            if host >= self._num_hosts or time_s < self.back_s.get(host, 0.0):
                continue
            self.back_s[host] = time_s + self.repair_s
            if host in used:
                return time_s, host
        return None

    def pass_until(self, now_s: float) -> None:
        """Notes all failures up to a time."""
        self.first(now_s, ())

    def down(self, now_s: float) -> list[int]:
        """Hosts that do not answer at a time, which must not be earlier than that of the last call."""
        self.back_s = {host: back_s for host, back_s in self.back_s.items() if back_s > now_s}
        return list(self.back_s)
