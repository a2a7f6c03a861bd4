"""Tables and charts as one self-contained HTML file, or the tables as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ringtrain.lab.report.charts import Bars, Chart, draw
from ringtrain.lab.tables import Table, plain


@dataclass(frozen=True)
class Note:
    """Highlighted sentence."""

    text: str


Part = str | Note | Table | Chart | Bars
"""a str is a sentence"""


@dataclass(frozen=True)
class Section:
    """Parts under one heading."""

    title: str
    parts: Sequence[Part]

    @property
    def filled(self) -> list[Part]:
        """Parts without empty tables."""
        return [part for part in self.parts if not isinstance(part, Table) or part.rows]


def html(title: str, sections: Sequence[Section]) -> str:
    """Renders one HTML file without scripts or external resources; empty sections are dropped."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        parts = _parts(section.filled)
        if parts and section.title:
            body.append(f"<h2>{escape(section.title)}</h2>")
        body += parts
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _parts(parts: Sequence[Part]) -> list[str]:
    """Elements of the page; charts that follow each other are in one that shows them side by side."""
    elements: list[str] = []
    for are_charts, group in itertools.groupby(parts, lambda part: isinstance(part, Chart | Bars)):
        drawn = [_element(part) for part in group]
        if are_charts and any(drawn):
            elements.append(f'<div class="charts">{"".join(drawn)}</div>')
        elif not are_charts:
            elements += drawn
    return elements


def _element(part: Part) -> str:
    match part:
        case Chart() | Bars():
            return draw(part)
        case Table():
            return _table(part)
        case Note():
            return f'<p class="note">{escape(part.text)}</p>'
    return f"<p>{escape(part)}</p>"


def _table(table: Table) -> str:
    # Columns of numbers are right-aligned.
    kinds = [' class="n"' if table.is_number(column) else "" for column in range(len(table.head))]
    rows = "".join(f"<tr>{_cells('td', row, kinds)}</tr>\n" for row in table.rows)
    box = f'<div class="box"><table>\n<tr>{_cells("th", table.head, kinds)}</tr>\n{rows}</table></div>'
    if table.folded:
        return f"<details><summary>{escape(table.title)}</summary>{box}</details>"
    if table.title:
        return f"<h3>{escape(table.title)}</h3>{box}"
    return box


def _cells(tag: str, row: Sequence[str], kinds: Sequence[str]) -> str:
    return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for text, kind in zip(row, kinds, strict=True))


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Renders sentences and tables as Markdown; charts and empty sections are dropped."""
    blocks = [f"# {plain(title)}"]
    for section in sections:
        parts = [part for part in section.filled if not isinstance(part, Chart | Bars)]
        if parts and section.title:
            blocks.append(f"## {plain(section.title)}")
        for part in parts:
            if isinstance(part, Table):
                if part.title:
                    blocks.append(f"**{plain(part.title)}**")
                blocks.append(part.markdown())
            elif isinstance(part, Note):
                blocks.append(plain(part.text))
            else:
                blocks.append(plain(part))
    return "\n\n".join(blocks) + "\n"
