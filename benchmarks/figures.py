"""Writes what `measure_peers.py --out FILE` has measured into docs/performance.md, and the plot of the README.

benchmarks/figures.py peers.json
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, PLOT = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "speed.svg"
BEGIN, END = "<!-- written by benchmarks/figures.py -->\n", "<!-- end -->\n"
HEAD = ("", "images/s", "of ringtrain's", "first step, s", "memory, GB", "weights")
ROW = re.compile(r"^\| ([^|]+) \| ([\d,]+) \(([\d,]+) to ([\d,]+)\) \|", re.MULTILINE)
"""name, median, p10, p90"""
DAY = re.compile(r"\d+ [A-Z][a-z]+ \d{4}")
ONE_CORE = "one core"
"""in the names of trainers that are not in the plot"""


def table(record: Mapping[str, Any]) -> str:
    """Sentence and table of one file of the bench."""
    options, when = record["options"], datetime.fromtimestamp(record["time_s"], UTC)
    model = dict(zip(options["command"][::2], options["command"][1::2], strict=False))["--model.name"]
    about = f"`{model}`, {options['turns']} rounds of {options['steps']} steps, {when:%-d %B %Y}:"
    lines = [about, "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    results = record["results"]
    for found in results.values():
        if "error" in found:
            lines.append(f"| {found['title']} | does not run: {found['error'].partition(':')[0]} | | | | |")
            continue
        ratio = _range(found["ratio"], ".2f") if "over" in found else ""
        other = "ringtrain's"
        if found.get("over", "ringtrain") != "ringtrain":
            other = results[found["over"]]["title"]
            ratio += f" of {other}"
        copies = "equal" if len(found["checksums"]) > 1 else "one copy"
        weights = f"as {other}" if found.get("same_weights") else copies if found["equal"] else "DIFFERENT"
        first_step, memory = f"{found['first_step_s']['median']:.0f}", f"{found['memory_mb']['median'] / 1000:.1f}"
        cells = (found["title"], _range(found["images_per_s"], ",.0f"), ratio, first_step, memory, weights)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _range(spread: Mapping[str, float], form: str) -> str:
    return f"{spread['median']:{form}} ({spread['p10']:{form}} to {spread['p90']:{form}})"


def written(page: str) -> str:
    """Part of the page that this program writes."""
    return page.partition(BEGIN)[2].partition(END)[0]


def speeds(part: str) -> dict[str, list[int]]:
    """Images/s of the trainers on all cores in the part: median, p10, p90."""
    measured = {}
    for name, *numbers in ROW.findall(part):
        if ONE_CORE not in name:
            measured[name] = [int(number.replace(",", "")) for number in numbers]
    return measured


def plot(part: str) -> str:
    """Plot of the part's images/s as SVG."""
    return draw(speeds(part), DAY.findall(part)[0])


def draw(measured: Mapping[str, Sequence[int]], day: str) -> str:
    """Plot of images/s as SVG: a bar per trainer, with a line from p10 to p90."""
    left, width, height = 350, 310, 26
    scale = width / max(high for _, _, high in measured.values())
    total = height * len(measured) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {total}" font-family="sans-serif" font-size="13">',
        f'<rect width="740" height="{total}" fill="#ffffff"/>',
    ]
    for row, (name, (median, low, high)) in enumerate(measured.items()):
        top = 10 + row * height
        middle = top + 9
        start, end = left + low * scale, left + high * scale
        color = "#00796b" if name.startswith("ringtrain") else "#b0bec5"
        parts += [
            f'<text x="{left - 8}" y="{top + 13}" text-anchor="end" fill="#222222">{html.escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{median * scale:.1f}" height="18" fill="{color}"/>',
            f'<path d="M{start:.1f} {middle}H{end:.1f}" stroke="#222222" stroke-width="2"/>',
            f'<text x="{end + 6:.1f}" y="{top + 13}" fill="#222222">{median:,}</text>',
        ]
    caption = f"images/s, cnn, on two CPU cores of one host; median, p10 to p90; {day}"
    parts += [f'<text x="{left - 340}" y="{total - 14}" fill="#555555">{caption}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    part = table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(before + begin + part + end + after, encoding="utf-8")
    PLOT.write_text(plot(part), encoding="utf-8")
    print(PAGE, PLOT)
