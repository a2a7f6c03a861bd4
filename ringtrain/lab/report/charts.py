"""Charts as inline SVG in the colors of the page: line charts and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 6
"""defined in page.css for light and dark mode; distinguishable with color blindness"""
MAX_POINTS = 400
"""of a line"""
WIDTH, HEIGHT = 380.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 8.0, 14.0, 32.0
BAR, NAME, NUMBER = 22.0, 96.0, 52.0
NUM_TICKS = 5
"""about as many for an axis"""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """Line of a chart; a value of None interrupts it."""

    name: str
    points: Sequence[Point]
    colour: int = 0
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


def number(value: float) -> str:
    """Formats a number with few characters: 1,200; 0.0025; 1e-06."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def draw(chart: Chart) -> str:
    """Draws a line chart with its legend as a figure; empty without a point."""
    lines = [line for line in chart.lines if _heights(line)]
    xs: list[float] = []
    ys: list[float] = []
    for line in lines:
        xs += [x for x, _ in line.points]
        ys += _heights(line)
    if not ys:
        return ""
    marks = [(x, colour) for x, colour in chart.marks if x <= max(xs)]
    is_log = min(ys) > 0 and max(ys) / min(ys) > 100 and not chart.from_zero
    if is_log:
        y_ticks = _decades(min(ys), max(ys))
    elif chart.from_zero:
        y_ticks = ticks(0.0, max(ys))
    else:
        y_ticks = ticks(min(ys), max(ys))
    axes = _Axes(ticks(0.0, max(xs)), y_ticks, is_log)

    drawn = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(chart.title)}">']
    drawn += axes.grid(chart.x)
    for x, colour in marks:
        path = f"M{axes.across(x):.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"
        drawn.append(f'<path class="mark c{colour % COLOURS}" d="{path}"/>')
    for line in lines:
        path = _path(line, axes)
        drawn.append(f'<path class="{_style(line)}" d="{path}"><title>{escape(line.name)}</title></path>')
    drawn.append("</svg>")

    title = escape(chart.title)
    if is_log:
        title += ", logarithmic"
    legend = _legend(chart, lines, has_marks=bool(marks))
    return f"<figure><figcaption>{title}</figcaption>{''.join(drawn)}{legend}</figure>"


@dataclass(frozen=True)
class _Axes:
    """Place of a point in the drawing."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    is_log: bool

    def across(self, x: float) -> float:
        left, right = self.x_ticks[0], self.x_ticks[-1]
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        if self.is_log:
            low, y, high = math.log10(low), math.log10(y), math.log10(high)
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def grid(self, x_title: str) -> list[str]:
        """Horizontal lines, and the numbers and the title at the edges."""
        drawn: list[str] = []
        for tick in self.y_ticks[:: 1 + len(self.y_ticks) // 8]:
            y = self.up(tick)
            drawn.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}"/>')
            drawn.append(f'<text x="{LEFT - 5:g}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in self.x_ticks:
            x = self.across(tick)
            anchor = "end" if x > WIDTH - 2 * RIGHT else "middle"
            drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14:g}" text-anchor="{anchor}">{number(tick)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        drawn.append(f'<text x="{middle:g}" y="{HEIGHT - 4:g}" text-anchor="middle">{escape(x_title)}</text>')
        return drawn


def _path(line: Line, axes: _Axes) -> str:
    """SVG's commands for a line: M moves the pen, L draws to a point."""
    commands: list[str] = []
    is_down = False
    for x, y in _thinned(line.points):
        if y is None or not math.isfinite(y):
            is_down = False
            continue
        point = f"{axes.across(x):.1f} {axes.up(y):.1f}"
        if is_down:
            commands.append(f"L{point}")
        else:
            # A single point is drawn as a dot.
            commands.append(f"M{point}h0")
        is_down = True
    return "".join(commands)


def _legend(chart: Chart, lines: Sequence[Line], has_marks: bool) -> str:
    """Names of the lines; empty if there is only one."""
    entries: list[tuple[str, str]] = []
    for line in lines:
        if not (chart.dashes and line.dashed):
            entries.append((line.name, _style(line)))
    if chart.dashes:
        entries.append((chart.dashes, "line dashed"))
    if has_marks:
        entries.append((chart.marked, "mark"))
    if len(entries) < 2:
        return ""
    keys = ""
    for name, style in entries:
        keys += f'<span><svg viewBox="0 0 26 8"><path class="{style}" d="M1 4H25"/></svg>{escape(name)}</span>'
    return f'<p class="legend">{keys}</p>'


def draw_bars(bars: Bars) -> str:
    """Draws stacked bars with their legend as a figure."""
    longest = max((sum(values) for _, values in bars.rows), default=0.0) or 1.0
    height = BAR * len(bars.rows)
    drawn = [f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(bars.title)}">']
    for index, (name, values) in enumerate(bars.rows):
        left, top = NAME, index * BAR + 3
        shown = name if len(name) < 17 else f"{name[:15]}…"
        drawn.append(f'<text x="{NAME - 6:g}" y="{top + 12:g}" text-anchor="end">{escape(shown)}</text>')
        for colour, (part, value) in enumerate(zip(bars.parts, values, strict=True)):
            width = value / longest * (WIDTH - NAME - NUMBER)
            drawn.append(f'<rect class="fill c{colour % COLOURS}" x="{left:.1f}" y="{top:g}" width="{width:.1f}"')
            drawn.append(f' height="{BAR - 6:g}"><title>{escape(f"{name}: {part} {number(value)}")}</title></rect>')
            left += width
        drawn.append(f'<text x="{left + 5:.1f}" y="{top + 12:g}">{number(sum(values))}</text>')
    drawn.append("</svg>")
    keys = ""
    for colour, part in enumerate(bars.parts):
        square = f'<svg viewBox="0 0 12 8"><rect class="fill c{colour % COLOURS}" width="12" height="8"/></svg>'
        keys += f"<span>{square}{escape(part)}</span>"
    return f'<figure><figcaption>{escape(bars.title)}</figcaption>{"".join(drawn)}<p class="legend">{keys}</p></figure>'


def ticks(low: float, high: float) -> list[float]:
    """Round, evenly spaced numbers, the first not above low and the last not below high."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        if high > 0:
            low, high = 0.0, 2 * high
        else:
            low, high = low - 1, high + 1
    least_step = (high - low) / NUM_TICKS
    power = 10 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least_step * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, last + 1)]


def _heights(line: Line) -> list[float]:
    return [y for _, y in line.points if y is not None and math.isfinite(y)]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    stride = math.ceil(len(points) / MAX_POINTS)
    if stride > 1:
        return [*points[:-1:stride], points[-1]]
    return points


def _style(line: Line) -> str:
    style = f"line c{line.colour % COLOURS}"
    if line.dashed:
        style += " dashed"
    return style
