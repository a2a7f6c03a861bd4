"""bench train, seen from outside: the measurement at several numbers of ranks, as tables, JSON and a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtrain.lab import figures
from ringtrain.lab.starts import Start


def main(options: argparse.Namespace, start: Start) -> int:
    """Measures, shows and writes.

    Args:
        options: of bench train.
        start: runs lab/speed.py on ranks.
    """
    words = ["train", "--steps", str(options.steps), "--turns", str(options.turns), "--", *options.command]
    found = start(words, 0)
    profile = found.pop("profile")
    show(found)
    if options.profile:
        Path(options.profile).write_text(json.dumps(profile) + "\n", encoding="utf-8")
    if options.out:
        figures.write(Path(options.out), "train", {"steps": options.steps, "turns": options.turns}, found)
    return 0


def show(found: dict[str, Any]) -> None:
    """Prints what was measured."""
    rows = [
        ["images/s, all ranks", figures.Spread(**found["images_per_s"]).text(",.0f")],
        ["images/s, as many processes alone", figures.Spread(**found["images_per_s_alone"]).text(",.0f")],
        ["ring efficiency", figures.Spread(**found["ring_efficiency"]).text(".3f")],
        ["step, ms", _ms(found["step_s"])],
        *([f"  {part}, ms", _ms(found["parts_s"][part])] for part in found["parts_s"]),
        ["step of a process alone, ms", _ms(found["step_alone_s"])],
    ]
    title = f"{found['model']}, {found['data']}, batch {found['batch_size']} on each of {found['num_ranks']} ranks"
    figures.show(title, ("", "median (p10 to p90)"), rows)


def _ms(seconds: dict[str, Any]) -> str:
    return figures.Spread(**seconds).times(1e3).text()
