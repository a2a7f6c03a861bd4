"""Line charts and stacked bars as SVG by matplotlib, for a page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

COLORS = ("#0067a5", "#d55e00", "#008a65", "#b5568f", "#b07d00", "#2b9fd6")
"""Okabe and Ito's, some darker; distinguishable with color blindness"""
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ringtrain", "font.family": "sans-serif", "font.size": 9}
"""of matplotlib: text stays text, and equal charts are equal files"""
WIDTH, HEIGHT, BAR = 4.6, 2.7, 0.26
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
    """Lines over a common x axis."""

    title: str
    """with the unit of y"""
    x: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, int]] = ()
    """x and color of vertical lines"""
    marked: str = ""
    """legend of the vertical lines"""
    dashes: str = ""
    """legend of all dashed lines, if they share names with solid ones"""
    from_zero: bool = False


@dataclass(frozen=True)
class Bars:
    """One stacked bar per row."""

    title: str
    """with the unit"""
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]


def draw(chart: Chart | Bars) -> str:
    """Draws a chart as a figure of HTML; empty without a number."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        height = HEIGHT if isinstance(chart, Chart) else 0.8 + BAR * len(chart.rows)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        title = _lines(chart, axes) if isinstance(chart, Chart) else _bars(chart, axes)
        if not title:
            return ""
        handles, labels = axes.get_legend_handles_labels()
        if len(handles) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = file.getvalue()
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg[svg.index('<svg') :]}</figure>"


def _lines(chart: Chart, axes: Any) -> str:
    lines = []
    for line in chart.lines:
        if any(_is_number(y) for _, y in line.points):
            lines.append(line)
    if not lines:
        return ""
    heights: list[float] = []
    for line in lines:
        xs = [x for x, _ in line.points]
        ys = [y if y is not None and math.isfinite(y) else math.nan for _, y in line.points]
        heights += [y for y in ys if not math.isnan(y)]
        name = chart.dashes if chart.dashes and line.dashed else line.name
        if name in axes.get_legend_handles_labels()[1]:
            name = "_"  # not in the legend again
        style = "--" if line.dashed else "-"
        marker = "." if len(ys) == 1 else ""
        axes.plot(xs, ys, style, marker=marker, color=COLORS[line.color % len(COLORS)], label=name)
    for index, (x, color) in enumerate(chart.marks):
        axes.axvline(x, color=COLORS[color % len(COLORS)], linestyle=":", label="_" if index else chart.marked)
    axes.set_xlabel(chart.x)
    axes.grid(axis="y", alpha=0.3)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    elif min(heights) > 0 and max(heights) / min(heights) > 100:
        axes.set_yscale("log")
        return f"{chart.title}, logarithmic"
    return chart.title


def _bars(bars: Bars, axes: Any) -> str:
    names = [name for name, _ in bars.rows]
    left = [0.0] * len(names)
    for color, part in enumerate(bars.parts):
        widths = [values[color] for _, values in bars.rows]
        axes.barh(names, widths, left=left, color=COLORS[color % len(COLORS)], label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    return bars.title


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
