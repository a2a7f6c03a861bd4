"""Tables and charts as one self-contained HTML file; charts are SVG by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ringtrain.lab.tables import Table

COLORS = ("#0067a5", "#d55e00", "#008a65", "#b5568f", "#b07d00", "#2b9fd6")
"""Okabe and Ito's, some darker; distinguishable with color blindness"""
STYLE = {"svg.fonttype": "none", "font.size": 9}
"""of matplotlib: text stays text"""
SIZE = (4.6, 2.7)
"""inches"""
CSS = """
body { margin: 0 auto; max-width: 1200px; padding: 16px; font: 15px/1.45 system-ui, sans-serif; color: #1b1f24;
 background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin: 28px 0 8px; }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; margin: 8px 0; display: block; overflow-x: auto; }
th, td { padding: 4px 12px; text-align: left; vertical-align: top; border: 1px solid #d0d7de; }
"""


@dataclass(frozen=True)
class Line:
    """Line of a chart."""

    label: str
    color: int
    style: str
    """of matplotlib: "-", or "--" """
    xs: Sequence[float]
    ys: Sequence[float]


def html(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """One HTML file without scripts or external resources, of elements by heading; empty sections are dropped."""
    body = [f"<h1>{escape(title)}</h1>"]
    for heading, elements in sections.items():
        present = [element for element in elements if element]
        if present and heading:
            body.append(f"<h2>{escape(heading)}</h2>")
        body += present
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>"
    )
    content = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{content}\n</body>\n</html>\n'


def sentence(text: str) -> str:
    """Paragraph."""
    return f"<p>{escape(text)}</p>"


def table(content: Table) -> str:
    """Table; empty without rows."""
    if not content.rows:
        return ""
    rows = [_row("th", content.head), *(_row("td", row) for row in content.rows)]
    caption = f"<caption>{escape(content.title)}</caption>\n" if content.title else ""
    return f"<table>\n{caption}{''.join(rows)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def charts(drawn: Sequence[str]) -> str:
    """Charts side by side; empty without one."""
    present = [chart for chart in drawn if chart]
    return f'<div class="charts">{"".join(present)}</div>' if present else ""


def chart(title: str, lines: Sequence[Line]) -> str:
    """Chart of lines over the epochs of runs; empty without a point."""
    lines = [line for line in lines if line.xs]
    if not lines:
        return ""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot(xlabel="epoch")
        for line in lines:
            marker = "." if len(line.xs) == 1 else ""
            color = COLORS[line.color % len(COLORS)]
            axes.plot(line.xs, line.ys, line.style, marker=marker, color=color, label=line.label)
        axes.grid(axis="y", alpha=0.3)
        if len(lines) > 1:
            figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = file.getvalue()
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg[svg.index('<svg') :]}</figure>"
