"""Launching side of bench allreduce: alternating starts, and their results as a table, JSON and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.errors import LaunchError
from ringtrain.lab import plots, stats
from ringtrain.lab.bench.allreduce_on_ranks import COPY, LINK, MPI_ALLREDUCE, NO_SUM, NOTHING
from ringtrain.lab.starts import Start

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
EXAMPLES = "1KiB,64MiB or 1KiB..256MiB, multiples of 4 bytes"
STEP = 4
"""factor between two sizes of a range"""
GLOO = "horovodrun-gloo"
STARTS = {"mpi": ("mpi", ""), "horovod-mpi": ("horovod", ""), "horovod-gloo": ("horovod", GLOO)}
"""values of --libraries: the part of allreduce_on_ranks, and its launcher; "": from the command line"""


def sizes(text: str) -> list[int]:
    """Parses sizes such as "1KiB,64MiB", or "1KiB..256MiB" in steps of four, to bytes.

    Raises:
        LaunchError: The text is not a list of sizes.
    """
    found = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        size = _bytes(first, text)
        limit = _bytes(last, text) if dots else size
        if size > limit:
            raise LaunchError(f"got --sizes {text}, expected sizes such as {EXAMPLES}")
        while size <= limit:
            found.append(size)
            size *= STEP
    return found


def _bytes(word: str, text: str) -> int:
    number = word.rstrip("BKMGib").strip()
    unit = word[len(number) :].strip() or "B"
    if not number.isdigit() or unit not in UNITS or not int(number) or int(number) * UNITS[unit] % 4:
        raise LaunchError(f"got --sizes {text}, expected sizes such as {EXAMPLES}")
    return int(number) * UNITS[unit]


def size_text(num_bytes: int) -> str:
    """Formats a size, e.g. "64 MiB"."""
    unit = next(unit for unit in reversed(UNITS) if num_bytes % UNITS[unit] == 0)
    return f"{num_bytes // UNITS[unit]} {unit}"


def main(options: argparse.Namespace, start: Start) -> int:
    """Measures, prints and writes."""
    if options.command:
        raise LaunchError(f"got {options.command[0]} after --, but bench allreduce trains nothing: leave it out")
    wanted = sizes(options.sizes)
    libraries = options.libraries.split(",")
    if unknown := [name for name in libraries if name not in STARTS]:
        raise LaunchError(f"got --libraries {unknown[0]}, expected some of {','.join(STARTS)}")
    measured: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for name in libraries:
            part, launcher = STARTS[name]
            words = ["allreduce", part, "--sizes", ",".join(map(str, wanted)), "--repeats", str(options.repeats)]
            found = start(words, 0, {}, launcher or ("mpirun" if options.launcher == GLOO else ""))
            measured += [one | {"turn": turn} for one in found["measured"]]
            num_ranks = found["num_ranks"]
    found = summary(measured, num_ranks)
    show(found, num_ranks, f"{options.turns} turns of {options.repeats}")
    if options.out:
        told = {"turns": options.turns, "repeats": options.repeats, "num_ranks": num_ranks}
        stats.write(Path(options.out), "allreduce", told, found)
    if options.plot:
        draw(found, num_ranks, Path(options.plot))
    return 0


def summary(measured: Sequence[Mapping[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    """Combines the measurements of all starts.

    Args:
        measured: From allreduce_on_ranks, in the order of rounds.

    Returns:
        Per size and method: seconds; bus bandwidth as NCCL's tests have it, bytes / seconds x 2 (N - 1) / N, which is
        what a ring moves through the link of a rank (a copy and a message: bytes / seconds); how many times as fast as
        MPI_Allreduce; and the bytes that the busiest host sends over its network for one call.
    """
    seconds: dict[tuple[int, str], list[float]] = {}
    wire: dict[tuple[int, str], float] = {}
    for one in measured:
        key = one["bytes"], one["method"]
        seconds.setdefault(key, []).extend(one["seconds"])
        wire[key] = one["wire_bytes"]
    ring = 2 * (num_ranks - 1) / num_ranks
    found = []
    for (num_bytes, method), values in sorted(seconds.items(), key=lambda item: item[0][0]):
        moved = num_bytes * (1 if method in NO_SUM else ring)
        library = seconds.get((num_bytes, MPI_ALLREDUCE))
        found.append(
            {
                "bytes": num_bytes,
                "method": method,
                "seconds": stats.Spread.of(values),
                "bus_gb_per_s": stats.Spread.of([moved / value / 1e9 for value in values]),
                "speed": stats.ratios(library, values) if library and method not in NO_SUM else None,
                "wire_bytes": wire[num_bytes, method],
            }
        )
    return found


def show(found: Sequence[Mapping[str, Any]], num_ranks: int, repeats: str) -> None:
    """Prints the measurements."""
    rows = [
        [
            size_text(one["bytes"]),
            one["method"],
            _time_text(one["seconds"]),
            "" if one["method"] == NOTHING else _rate_text(one["bus_gb_per_s"].times(1e3)),
            one["speed"].text() if one["speed"] else "",
            f"{one['wire_bytes'] / one['bytes']:.2f}" if one["method"] not in (COPY, NOTHING) else "",
        ]
        for one in found
    ]
    head = ["size", "method", "time (p10 to p90)", "bus MB/s", "speed / MPI", "wire / size"]
    if LINK not in {one["method"] for one in found}:
        head, rows = head[:-1], [row[:-1] for row in rows]
    stats.show(f"allreduce, {num_ranks} ranks, {repeats}", head, rows)


def _time_text(seconds: stats.Spread) -> str:
    unit, factor = ("s", 1) if seconds.median >= 1 else ("ms", 1e3) if seconds.median >= 1e-3 else ("us", 1e6)
    return f"{seconds.times(factor).text('.1f')} {unit}"


def _rate_text(rate: stats.Spread) -> str:
    return rate.text(",.0f" if rate.median >= 10 else ".2f")


def draw(found: Sequence[Mapping[str, Any]], num_ranks: int, path: Path) -> None:
    """Draws bus bandwidth over size.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    axes, write_png = plots.canvas(f"allreduce, {num_ranks} ranks", "size", "bus bandwidth, GB/s")
    for method in dict.fromkeys(one["method"] for one in found if one["method"] != NOTHING):
        own = [one for one in found if one["method"] == method]
        x, speed = [one["bytes"] for one in own], [one["bus_gb_per_s"] for one in own]
        (line,) = axes.plot(x, [one.median for one in speed], "--" if method in (COPY, LINK) else ".-", label=method)
        axes.fill_between(x, [one.p10 for one in speed], [one.p90 for one in speed], color=line.get_color(), alpha=0.2)
    every = sorted({one["bytes"] for one in found})
    axes.set_xticks(every, labels=[size_text(size) for size in every], rotation=45, fontsize=8)
    axes.minorticks_off()
    write_png(path)
