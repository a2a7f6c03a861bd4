"""A table of text, for a terminal and a page."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NUMBER = re.compile(
    r"^[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|s|ms|us|min|h|images/s|rows/s|batches/s|times|MB|GB))?( [(\[].*)?$"
)
"""cell of a column of numbers, also with its spread"""


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; numbers with their units."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    folded: bool = False
    """collapsed in HTML until opened by the reader"""

    def is_number(self, column: int) -> bool:
        """True for a column of numbers only, which is right-aligned."""
        return all(not row[column] or NUMBER.match(row[column]) for row in self.rows)

    def show(self) -> None:
        """Prints to standard output."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        from ringtrain.monitor.journal import printable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, name in enumerate(self.head):
            is_number = column > 0 and self.is_number(column)
            table.add_column(Text(printable(name)), justify="right" if is_number else "left")
        for row in self.rows:
            table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
        printed = console()
        if self.title:
            printed.print(Text(self.title, style="italic"))
        printed.print(table)


def number(value: float) -> str:
    """Formats a number with few characters: 1,200; 0.0025; 1e-06."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Formats as e.g. "1 rank" or "2 ranks"."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def console() -> Console:
    """Console on standard output; without colors, control characters and line breaks unless that is a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console()
    return Console(force_terminal=False, color_system=None, width=10_000)
