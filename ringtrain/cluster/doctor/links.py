"""A ring of hosts as it was measured: each link, an allreduce, and which link is slow. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.cluster.doctor.findings import Finding

SLOW = 0.5  # of the fastest link's bandwidth
RESNET50_MB = 102.4  # gradients of 25.6 million parameters


@dataclass(frozen=True)
class Link:
    """From one host to the next of the ring."""

    source: str
    target: str
    latency_us: float
    """one way, half a round trip of one byte"""
    mb_per_s: float


@dataclass(frozen=True)
class Ring:
    """What was measured, or why nothing was."""

    links: tuple[Link, ...] = ()
    allreduce_mb: float = 0.0
    allreduce_s: float = 0.0
    error: str = ""
    hosts: tuple[str, ...] = ()
    """where there was an error: that it was tried on"""

    @property
    def slowest(self) -> Link:
        """The link with the least bandwidth."""
        return min(self.links, key=lambda link: link.mb_per_s)

    @property
    def bus_mb_per_s(self) -> float:
        """Bandwidth that each link of a perfect ring would have for this allreduce, as NCCL's tests define it."""
        num = len(self.links)
        return self.allreduce_mb / self.allreduce_s * 2 * (num - 1) / num


def read(names: Sequence[str], measured: Sequence[Sequence[Any]], error: str) -> Ring:
    """Makes a ring of what doctor's program printed.

    Args:
        names: of the hosts, in the order of ranks.
        measured: [own name of the rank's host, latency_us, mb_per_s] from each rank, then the allreduce's [MB, s].
        error: why, if there is less than that.

    Returns:
        Links from each host to the next; or the error, also where ranks were not on a host of their own each.
    """
    if len(measured) != len(names) + 1:
        return Ring(error=error, hosts=tuple(names))
    *ranks, (mb, seconds) = measured
    where = [host for host, _, _ in ranks]
    if len(set(where)) < len(names):
        text = f"the launcher put {len(where)} ranks on {len(set(where))} of {len(names)} hosts: {_some(where)}"
        return Ring(error=text, hosts=tuple(names))
    ends = zip(names, [*names[1:], names[0]], ranks, strict=True)
    return Ring(tuple(Link(source, target, *figures) for source, target, (_, *figures) in ends), mb, seconds)


def judge(ring: Ring) -> list[Finding]:
    """What is wrong with a ring: it could not be measured, or a link is much slower than another."""
    if ring.error:
        hosts = ",".join(f"[{name}]" if ":" in name else name for name in ring.hosts)
        return [Finding("ring", "hurts", (), ring.error, f"ringtrain launch -H {hosts} -- hostname  # says all of it")]
    best = max(link.mb_per_s for link in ring.links)
    slow = [link for link in ring.links if link.mb_per_s < SLOW * best]
    if not slow:
        return []
    at_all = set.intersection(*({link.source, link.target} for link in slow))
    culprit = f": {at_all.pop()} is at an end of all of them" if len(slow) > 1 and len(at_all) == 1 else ""
    link = ring.slowest
    text = (
        f"{link.source} -> {link.target} is the slowest link: {speed(link.mb_per_s)}, the fastest has {speed(best)};"
        f" {len(slow)} of {len(ring.links)} links have less than half of that{culprit}"
    )
    ends = tuple(dict.fromkeys([link.source, link.target]))
    return [Finding("ring", "warns", ends, text, "ethtool eth0 | grep Speed  # on both: cable, port, other traffic?")]


def describe(ring: Ring) -> list[str]:
    """A ring in lines for a person."""
    if not ring.links:
        return []
    width = max(len(link.source) + len(link.target) for link in ring.links) + 4
    mark = {True: "  slowest", False: ""}
    lines = [
        f"{f'{link.source} -> {link.target}':<{width}}  {link.latency_us:8.1f} µs  {speed(link.mb_per_s):>10}"
        + mark[link is ring.slowest and len(ring.links) > 1]
        for link in ring.links
    ]
    resnet50_s = RESNET50_MB / ring.allreduce_mb * ring.allreduce_s
    return [
        *lines,
        f"allreduce of {ring.allreduce_mb:.0f} MB in {ring.allreduce_s * 1e3:.1f} ms,"
        f" {speed(ring.bus_mb_per_s)} on each link; ResNet-50's gradients would take {resnet50_s * 1e3:.0f} ms a step",
    ]


def speed(mb_per_s: float) -> str:
    """E.g. "1.2 GB/s"."""
    return f"{mb_per_s / 1e3:.1f} GB/s" if mb_per_s >= 1e3 else f"{mb_per_s:.0f} MB/s"


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:4]) + ", ..." * (len(words) > 4)


def essence(said: str) -> str:
    """The lines of a launcher's complaint that say most: a rank's error, else how it begins."""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip(" -*=\t")]
    errors = [line for line in lines if re.search(r"\b[A-Z]\w*Error: ", line)]
    return "; ".join(errors[:1] or lines[:2])
