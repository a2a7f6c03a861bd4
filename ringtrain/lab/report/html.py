"""Tables and charts as one self-contained HTML file, or the tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ringtrain.lab.report.charts import Bars, Chart, draw, draw_bars

NUMBER = re.compile(r"^[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|s|ms|min|h|images/s|times|MB|GB))?$")
# Okabe and Ito's colors, some of them darker on white and brighter on black.
STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --box: #f6f8fa;
 --warn: #fff4d6; --c0: #0067a5; --c1: #d55e00; --c2: #008a65; --c3: #b5568f; --c4: #b07d00; --c5: #2b9fd6; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --text: #e6e9ed; --soft: #9aa4af; --line: #333b45;
 --box: #171c23; --warn: #3a2f10; --c0: #56b4e9; --c1: #ff8b3d; --c2: #2fc99b; --c3: #e08fc0; --c4: #f0c945;
 --c5: #9fc5ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 16px; background: var(--back); color: var(--text);
 font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 8px 0; } h2 { font-size: 18px; margin: 28px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; } p { margin: 6px 0; }
.note { background: var(--warn); border-radius: 6px; padding: 6px 10px; }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); }
figure { margin: 0; padding: 10px; border: 1px solid var(--line); border-radius: 8px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figure > svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); } svg path { fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); margin: 6px 0 0; }
.legend svg { height: 8px; width: auto; margin-right: 5px; }
.grid { stroke: var(--line); } .line { stroke-width: 2; stroke: var(--c, var(--soft)); stroke-linejoin: round;
 stroke-linecap: round; } .dashed { stroke-dasharray: 5 4; stroke-linecap: butt; }
.mark { stroke: var(--c, var(--soft)); stroke-width: 1.5; stroke-dasharray: 2 3; } .fill { fill: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: 8px 0; max-width: max-content; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 4px 12px; text-align: left; vertical-align: top; border-top: 1px solid var(--line);
 max-width: 480px; }
td { min-width: min-content; } tr:first-child > * { border-top: 0; }
th { background: var(--box); font-weight: 600; white-space: nowrap; } .n { text-align: right; white-space: nowrap; }
tr > :first-child { position: sticky; left: 0; background: var(--box); }
summary { cursor: pointer; color: var(--soft); } details { margin: 8px 0; }
@media (max-width: 700px) { body { padding: 10px; } .charts { grid-template-columns: 1fr; } h1 { font-size: 20px; }
 th, td { padding: 4px 8px; max-width: 260px; } }
"""


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; numbers with their units."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    folded: bool = False
    """collapsed until opened by the reader"""


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
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        if parts := _parts(section.filled):
            body += [f"<h2>{escape(section.title)}</h2>" if section.title else "", *parts]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + "\n</body>\n</html>\n"
    )


def _parts(parts: Sequence[Part]) -> list[str]:
    found: list[str] = []
    figures: list[str] = []
    for part in [*parts, None]:
        if isinstance(part, Chart | Bars):
            figures.append(draw(part) if isinstance(part, Chart) else draw_bars(part))
            continue
        if any(figures):
            found.append(f'<div class="charts">{"".join(figures)}</div>')
        figures = []
        if isinstance(part, Table):
            found.append(_table(part))
        elif isinstance(part, Note):
            found.append(f'<p class="note">{escape(part.text)}</p>')
        elif part:
            found.append(f"<p>{escape(part)}</p>")
    return found


def _table(table: Table) -> str:
    # Columns of numbers are right-aligned.
    kinds = [
        ' class="n"' if all(not row[place] or NUMBER.match(row[place]) for row in table.rows) else ""
        for place in range(len(table.head))
    ]
    rows = "".join(f"<tr>{_cells('td', row, kinds)}</tr>\n" for row in table.rows)
    made = f'<div class="box"><table>\n<tr>{_cells("th", table.head, kinds)}</tr>\n{rows}</table></div>'
    if table.folded:
        return f"<details><summary>{escape(table.title)}</summary>{made}</details>"
    return f"<h3>{escape(table.title)}</h3>{made}" if table.title else made


def _cells(tag: str, row: Sequence[str], kinds: Sequence[str]) -> str:
    return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for text, kind in zip(row, kinds, strict=True))


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Renders sentences and tables as Markdown; charts and empty sections are dropped."""
    blocks = [f"# {_plain(title)}"]
    for section in sections:
        parts = [part for part in section.filled if not isinstance(part, Chart | Bars)]
        if parts and section.title:
            blocks.append(f"## {_plain(section.title)}")
        for part in parts:
            if isinstance(part, Table):
                blocks += [f"**{_plain(part.title)}**"] if part.title else []
                rows = [part.head, ["---"] * len(part.head), *part.rows]
                blocks.append("\n".join(f"| {' | '.join(map(_plain, row))} |" for row in rows))
            else:
                blocks.append(_plain(part.text if isinstance(part, Note) else part))
    return "\n\n".join(blocks) + "\n"


def _plain(text: str) -> str:
    """Escapes text for Markdown."""
    text = re.sub(r"([\\`*_|\[\]])", r"\\\1", text) if text != "---" else text
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
