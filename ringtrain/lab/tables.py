"""A table of text, for a terminal and a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; numbers with their units."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def show(self) -> None:
        """Prints to standard output; columns of numbers, but the first, are right-aligned."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        from ringtrain.monitor.journal import printable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, name in enumerate(self.head):
            is_number = column > 0 and all(row[column][:1] in "-0123456789" for row in self.rows)
            table.add_column(Text(printable(name)), justify="right" if is_number else "left")
        for row in self.rows:
            table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
        console = Console()
        if not sys.stdout.isatty():
            console = Console(force_terminal=False, color_system=None, width=10_000)  # no line is broken
        if self.title:
            console.print(Text(self.title, style="italic"))
        console.print(table)


def number(value: float) -> str:
    """Formats a number with few characters: 1,200; 0.0025; 1e-06."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"
