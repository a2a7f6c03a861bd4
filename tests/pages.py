"""Scripts in the README and in pages of docs/, and the README's picture of a run of its script.

python tests/pages.py            # runs the README's script on two ranks, and writes the picture to docs/images/

docs/images/report.png has the first charts of that run's report.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import launching
from rich.console import CONSOLE_SVG_FORMAT, Console

TERMINAL = launching.ROOT / "docs" / "images" / "terminal.svg"
LIMIT_S = 300
TAG = re.compile(r"\[1,\d+\]<stdout>:")
VARIES = re.compile(r"\([^()]*: 2\)|threads?|[0-9a-f]{16}|[\d.,]*\d%?")
"""parts of a run's output that depend on the machine and the day"""


def scripts(page: str) -> list[str]:
    """Python of a page that is a whole script: the blocks that import what they use."""
    text = (launching.ROOT / page).read_text()
    return re.findall(r"^```python\n(import keras\n.*?)^```", text, re.MULTILINE | re.DOTALL)


def command(page: str, number: int = 0) -> list[str]:
    """Command of a page that starts a script on two ranks: the last one before that script, else the first."""
    text = (launching.ROOT / page).read_text()
    pattern = r"^ringtrain launch -np 2 python \w+\.py"
    commands = re.findall(pattern, text, re.MULTILINE)
    earlier = re.findall(pattern, text[: text.index(scripts(page)[number])], re.MULTILINE)
    return shlex.split(earlier[-1] if earlier else commands[0])


def start(page: str, folder: Path, number: int = 0) -> tuple[str, dict[str, Any]]:
    """Runs a script of a page by the page's command; returns what it prints, and the summary of its run, if any."""
    words = command(page, number)
    (folder / words[-1]).write_text(scripts(page)[number])
    launch = [sys.executable, "-m", *words[: words.index("python")], "--", sys.executable, words[-1]]
    ended = launching.run(0, launch, LIMIT_S, cwd=folder, warm=True)
    if ended.returncode:
        raise RuntimeError(f"{page}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    summaries = [json.loads(file.read_text()) for file in folder.glob("runs/*/summary.json")]
    return TAG.sub("", ended.stdout), *(summaries or [{}])


def before(script: str) -> str:
    """Script without its changes: without lines that end in "# new", and with the text after "# was: " for others."""
    kept = [line for line in script.splitlines() if not line.endswith("# new")]
    return "".join(f"{line.partition('# was: ')[2] or line}\n" for line in kept)


def shown(picture: str) -> list[str]:
    """Lines of text in a picture of a terminal."""
    lines: dict[int, str] = {}
    for number, text in re.findall(r'<text [^>]*-line-(\d+)\)">([^<]*)</text>', picture):
        lines[int(number)] = lines.get(int(number), "") + html.unescape(text).replace("\xa0", " ")
    return [line.rstrip() for line in lines.values()]


def alike(line: str) -> str:
    """A line of output without what depends on the machine and the day."""
    return VARIES.sub("#", line.strip())


def draw(output: str) -> str:
    """Picture of a terminal with the README's command and its output; the last line is bold, as a run prints it."""
    lines = ["$ " + " ".join(command("README.md")), *output.strip("\n").splitlines()]
    console = Console(record=True, file=open("/dev/null", "w"), width=max(map(len, lines)))  # noqa: SIM115
    for line in lines:
        console.print(line, style="bold" if line in (lines[0], lines[-1]) else "", highlight=False, markup=False)
    # Without the fonts that Rich would load from a server: a viewer has one of its own.
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=command("README.md")[-1], code_format=form, unique_id="terminal")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        TERMINAL.write_text(draw(start("README.md", Path(scratch))[0]))
    print(TERMINAL)
