"""Launching side of bench train: runs it at several numbers of ranks; tables, JSON and a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.lab import plots, stats
from ringtrain.lab.predict import points
from ringtrain.lab.starts import Start

SPREADS = {"images_per_s": ",.0f", "images_per_s_alone": ",.0f", "ring_efficiency": ".3f"}
"""columns of the scaling table and their formats"""


def main(options: argparse.Namespace, start: Start) -> int:
    """Measures, prints and writes."""
    words = ["train", "--steps", str(options.steps), "--turns", str(options.turns), "--", *options.command]
    measured = [start(words, num) for num in (points.parse_ranks(options.ranks) if options.ranks else [0])]
    profiles = [found.pop("profile") for found in measured]
    for found in measured:
        show(found)
    table = [{name: found[name] for name in ("num_ranks", *SPREADS)} for found in measured]
    if len(table) > 1:
        head = ("ranks", "images/s", "as many, not talking", "ring efficiency")
        cells = [[stats.Spread(**one[name]).text(form) for name, form in SPREADS.items()] for one in table]
        rows = [[str(one["num_ranks"]), *row] for one, row in zip(table, cells, strict=True)]
        stats.show("scaling", head, rows)
    if options.profile:
        Path(options.profile).write_text(json.dumps(profiles[0]) + "\n", encoding="utf-8")
    if options.out:
        told = {"steps": options.steps, "turns": options.turns}
        stats.write(Path(options.out), "train", told, {**measured[-1], "scaling": table})
    if options.plot:
        draw(table, f"{measured[0]['model']}, batch {measured[0]['batch_size']} on each rank", Path(options.plot))
    return 0


def draw(table: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draws images/s over ranks, from one row per number of ranks.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    axes, write_png = plots.canvas(title, "ranks", "images/s", log=False)
    num_ranks = [one["num_ranks"] for one in table]
    for name, label, line in (("images_per_s_alone", "as many processes alone", "--"), ("images_per_s", "ring", "-")):
        spreads = [stats.Spread(**one[name]) for one in table]
        middle = [one.median for one in spreads]
        off = [[one.median - one.p10 for one in spreads], [one.p90 - one.median for one in spreads]]
        axes.errorbar(num_ranks, middle, yerr=off, fmt=f"o{line}", capsize=3, label=label)
    axes.set_xticks(num_ranks)
    axes.set_ylim(bottom=0)
    write_png(path)


def show(found: dict[str, Any]) -> None:
    """Prints the measurements."""
    rows = [
        ["images/s, all ranks", stats.Spread(**found["images_per_s"]).text(",.0f")],
        ["images/s, as many processes alone", stats.Spread(**found["images_per_s_alone"]).text(",.0f")],
        ["ring efficiency", stats.Spread(**found["ring_efficiency"]).text(".3f")],
        ["step, ms", _ms(found["step_s"])],
        *([f"  {part}, ms", _ms(found["parts_s"][part])] for part in found["parts_s"]),
        ["step of a process alone, ms", _ms(found["step_alone_s"])],
    ]
    title = f"{found['model']}, {found['data']}, batch {found['batch_size']} on each of {found['num_ranks']} ranks"
    stats.show(title, ("", "median (p10 to p90)"), rows)


def _ms(seconds: dict[str, Any]) -> str:
    return stats.Spread(**seconds).times(1e3).text()
