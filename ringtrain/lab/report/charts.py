"""Charts as inline SVG in the colors of the page: line charts and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 6
"""defined in html.py for light and dark mode; distinguishable with color blindness"""
MAX_POINTS = 400
"""of a line"""
WIDTH, HEIGHT = 380.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 8.0, 14.0, 32.0
BAR, NAME, NUMBER = 22.0, 96.0, 52.0

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
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def draw(chart: Chart) -> str:
    """Draws a line chart with its legend as a figure."""
    lines = [line for line in chart.lines if any(_is_finite(y) for _, y in line.points)]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if y is not None and _is_finite(y)]
    if not ys:
        return ""
    marks = [(x, colour) for x, colour in chart.marks if x <= max(xs)]
    is_log = min(ys) > 0 and max(ys) / min(ys) > 100 and not chart.from_zero
    y_ticks = _decades(min(ys), max(ys)) if is_log else ticks(0.0 if chart.from_zero else min(ys), max(ys))
    x_ticks = ticks(0.0, max(xs))

    def across(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        scale = math.log10 if is_log else float
        low, high = scale(y_ticks[0]), scale(y_ticks[-1])
        return HEIGHT - BOTTOM - (scale(y) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    drawn = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(chart.title)}">']
    for tick in y_ticks[:: 1 + len(y_ticks) // 8]:
        drawn.append(f'<path class="grid" d="M{LEFT:g} {up(tick):.1f}H{WIDTH - RIGHT:g}"/>')
        drawn.append(f'<text x="{LEFT - 5:g}" y="{up(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        anchor = "end" if across(tick) > WIDTH - 2 * RIGHT else "middle"
        drawn.append(f'<text x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 14:g}" text-anchor="{anchor}">')
        drawn.append(f"{number(tick)}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text x="{middle:g}" y="{HEIGHT - 4:g}" text-anchor="middle">{escape(chart.x)}</text>')
    for x, colour in marks:
        drawn.append(f'<path class="mark c{colour % COLOURS}" d="M{across(x):.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>')
    for line in lines:
        path, pen = [], "M"
        for x, y in _thinned(line.points):
            if y is None or not _is_finite(y):
                pen = "M"
                continue
            # A single point is drawn as a dot.
            path.append(f"{pen}{across(x):.1f} {up(y):.1f}{'h0' if pen == 'M' else ''}")
            pen = "L"
        drawn.append(f'<path class="{_class(line)}" d="{"".join(path)}"><title>{escape(line.name)}</title></path>')
    drawn.append("</svg>")
    named = [(line.name, _class(line)) for line in lines if not (chart.dashes and line.dashed)]
    named += [(chart.dashes, "line dashed")] if chart.dashes else []
    named += [(chart.marked, "mark")] if marks else []
    keys = "".join(
        f'<span><svg viewBox="0 0 26 8"><path class="{style}" d="M1 4H25"/></svg>{escape(name)}</span>'
        for name, style in named
    )
    log = ", logarithmic" if is_log else ""
    legend = f'<p class="legend">{keys}</p>' if len(named) > 1 else ""
    return f"<figure><figcaption>{escape(chart.title)}{log}</figcaption>{''.join(drawn)}{legend}</figure>"


def draw_bars(bars: Bars) -> str:
    """Draws stacked bars with their legend as a figure."""
    longest = max((sum(values) for _, values in bars.rows), default=0.0) or 1.0
    height = BAR * len(bars.rows)
    drawn = [f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(bars.title)}">']
    for place, (name, values) in enumerate(bars.rows):
        left, top = NAME, place * BAR + 3
        shown = name if len(name) < 17 else f"{name[:15]}…"
        drawn.append(f'<text x="{NAME - 6:g}" y="{top + 12:g}" text-anchor="end">{escape(shown)}</text>')
        for part, (what, value) in enumerate(zip(bars.parts, values, strict=True)):
            width = value / longest * (WIDTH - NAME - NUMBER)
            drawn.append(f'<rect class="fill c{part % COLOURS}" x="{left:.1f}" y="{top:g}" width="{width:.1f}"')
            drawn.append(f' height="{BAR - 6:g}"><title>{escape(f"{name}: {what} {number(value)}")}</title></rect>')
            left += width
        drawn.append(f'<text x="{left + 5:.1f}" y="{top + 12:g}">{number(sum(values))}</text>')
    drawn.append("</svg>")
    keys = "".join(
        f'<span><svg viewBox="0 0 12 8"><rect class="fill c{part % COLOURS}" width="12" height="8"/></svg>'
        f"{escape(name)}</span>"
        for part, name in enumerate(bars.parts)
    )
    return f'<figure><figcaption>{escape(bars.title)}</figcaption>{"".join(drawn)}<p class="legend">{keys}</p></figure>'


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round, evenly spaced numbers, the first not above low and the last not below high."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = (0.0, 2 * high) if high > 0 else (low - 1, high + 1)
    rough = (high - low) / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    stride = math.ceil(len(points) / MAX_POINTS)
    return [*points[:-1:stride], points[-1]] if stride > 1 else points


def _class(line: Line) -> str:
    return f"line c{line.colour % COLOURS}{' dashed' if line.dashed else ''}"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
