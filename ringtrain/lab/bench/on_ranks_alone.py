"""Launching side of benches that measure on ranks only: prints rank 0's table and writes the results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringtrain.lab import stats
from ringtrain.lab.commands import BENCHES, OUT
from ringtrain.lab.starts import Start


def main(options: argparse.Namespace, start: Start) -> int:
    """Measures, shows and writes.

    Args:
        options: of the bench; the part of the same name is given those of its own.
        start: runs that on ranks; its results hold "table": a title, a head and rows.
    """
    own = {
        flag: vars(options)[flag[2:].replace("-", "_")] for flag, _ in BENCHES[options.kind].options if flag != OUT[0]
    }
    found: dict[str, Any] = start(
        [options.kind, *(word for flag, value in own.items() for word in (flag, str(value))), "--", *options.command], 0
    )
    stats.show(*found.pop("table"))
    if options.out:
        stats.write(Path(options.out), options.kind, own, found)
    return 0
