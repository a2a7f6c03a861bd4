"""Tables and charts as one self-contained HTML file; charts are SVG by matplotlib."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ringtrain.lab.tables import Table

COLORS = ("#0067a5", "#d55e00", "#008a65", "#b5568f", "#b07d00", "#2b9fd6")
"""Okabe and Ito's, some darker; distinguishable with color blindness"""
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ringtrain", "font.family": "sans-serif", "font.size": 9}
"""of matplotlib: text stays text, and equal charts are equal files"""
SIZE = (4.6, 2.7)
"""inches"""


@dataclass(frozen=True)
class Line:
    """Line of a chart; a value of None interrupts it."""

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over the epochs of a run."""

    title: str
    """with the unit of y"""
    lines: Sequence[Line]
    marks: Sequence[tuple[float, int]] = ()
    """epoch and color of vertical lines"""
    marked: str = ""
    """legend of the vertical lines"""
    from_zero: bool = False


@dataclass(frozen=True)
class Note:
    """Highlighted sentence."""

    text: str


Part = str | Note | Table | Chart
"""a str is a sentence"""


@dataclass(frozen=True)
class Section:
    """Parts under one heading."""

    title: str
    parts: Sequence[Part]


def html(title: str, sections: Sequence[Section]) -> str:
    """Renders one HTML file without scripts or external resources; empty sections are dropped."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        parts = _parts(section.parts)
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
    for are_charts, group in itertools.groupby(parts, lambda part: isinstance(part, Chart)):
        drawn = [element for element in map(_element, group) if element]
        if are_charts and drawn:
            elements.append(f'<div class="charts">{"".join(drawn)}</div>')
        else:
            elements += drawn
    return elements


def _element(part: Part) -> str:
    """A part of the page; empty for a table without rows, and a chart without numbers."""
    match part:
        case Chart():
            return _drawn(part)
        case Table():
            return _table(part)
        case Note():
            return f'<p class="note">{escape(part.text)}</p>'
    return f"<p>{escape(part)}</p>"


def _table(table: Table) -> str:
    if not table.rows:
        return ""
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


# ---- charts ---------------------------------------------------------------------------------------------------------


def _drawn(chart: Chart) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = [line for line in chart.lines if any(_is_number(y) for _, y in line.points)]
    if not lines:
        return ""
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        title = _plotted(chart, lines, axes)
        handles, _ = axes.get_legend_handles_labels()
        if len(handles) > 1:
            figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = file.getvalue()
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg[svg.index('<svg') :]}</figure>"


def _plotted(chart: Chart, lines: Sequence[Line], axes: Any) -> str:
    """Plots lines, and returns the title of the figure."""
    heights: list[float] = []
    for line in lines:
        xs = [x for x, _ in line.points]
        ys = [y if y is not None and math.isfinite(y) else math.nan for _, y in line.points]
        heights += [y for y in ys if not math.isnan(y)]
        style = "--" if line.dashed else "-"
        marker = "." if len(ys) == 1 else ""
        axes.plot(xs, ys, style, marker=marker, color=COLORS[line.color % len(COLORS)], label=line.name)
    for index, (x, color) in enumerate(chart.marks):
        label = "_" if index else chart.marked  # once in the legend
        axes.axvline(x, color=COLORS[color % len(COLORS)], linestyle=":", label=label)
    axes.set_xlabel("epoch")
    axes.grid(axis="y", alpha=0.3)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    elif min(heights) > 0 and max(heights) / min(heights) > 100:
        axes.set_yscale("log")
        return f"{chart.title}, logarithmic"
    return chart.title


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
