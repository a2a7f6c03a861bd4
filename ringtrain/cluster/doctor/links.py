"""Results of the ring measurement: each link, an allreduce, and slow links. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.cluster.doctor.findings import Finding

SLOW = 0.5  # fraction of the fastest link's bandwidth
RESNET50_MB = 102.4  # gradients of 25.6 million parameters


@dataclass(frozen=True)
class Link:
    """Link from one host to the next in the ring."""

    source: str
    target: str
    latency_us: float
    """one way: half the round trip of one byte"""
    mb_per_s: float


@dataclass(frozen=True)
class Ring:
    """Measured links and allreduce, or the error."""

    links: tuple[Link, ...] = ()
    allreduce_mb: float = 0.0
    allreduce_s: float = 0.0
    error: str = ""
    hosts: tuple[str, ...] = ()
    """hosts of a failed measurement"""

    @property
    def slowest(self) -> Link:
        return min(self.links, key=lambda link: link.mb_per_s)

    @property
    def bus_mb_per_s(self) -> float:
        """Bus bandwidth of the allreduce, as nccl-tests defines it: that of each link of an ideal ring."""
        num = len(self.links)
        return self.allreduce_mb / self.allreduce_s * 2 * (num - 1) / num


def read(names: Sequence[str], measured: Sequence[Sequence[Any]], error: str) -> Ring:
    """Converts a measurement to a Ring; one with an error if results are missing or ranks shared a host.

    `measured` has [host name, latency_us, mb_per_s] of each rank, then [MB, s] of the allreduce.
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
    """Findings of a ring: a failed measurement, or links below half the fastest link's bandwidth."""
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
    """Formats the results of a ring as lines of text."""
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
    """Formats a bandwidth, e.g. "1.2 GB/s"."""
    return f"{mb_per_s / 1e3:.1f} GB/s" if mb_per_s >= 1e3 else f"{mb_per_s:.0f} MB/s"


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:4]) + ", ..." * (len(words) > 4)


def essence(said: str) -> str:
    """Most informative lines of a launcher's error output: the first Python error, else the first two lines."""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip(" -*=\t")]
    errors = [line for line in lines if re.search(r"\b[A-Z]\w*Error: ", line)]
    return "; ".join(errors[:1] or lines[:2])
