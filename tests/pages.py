"""Scripts in the README and in pages of docs/, and the README's picture of a terminal, which shows a run of its script.

python tests/pages.py            # runs the README's script on two ranks, and writes docs/images/terminal.svg
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
ALL = "import runpy, sys\nfor script in sys.argv[1:]: runpy.run_path(script, run_name='__main__')"
TAG = re.compile(r"^\[1,\d+\]<stdout>:", re.MULTILINE)
VARIES = re.compile(r"\([^()]*: 2\)|threads?|[0-9a-f]{16}|[\d.,]*\d%?")
"""parts of a run's output that depend on the machine and the day"""


def scripts(page: str) -> list[str]:
    """Python of a page that is a whole script: the blocks that import what they use."""
    text = (launching.ROOT / page).read_text()
    return re.findall(r"^```python\n(import keras\n.*?)^```", text, re.MULTILINE | re.DOTALL)


def command(page: str) -> list[str]:
    """First command of a page that starts a script on two ranks."""
    text = (launching.ROOT / page).read_text()
    return shlex.split(re.search(r"^ringtrain launch -np 2 python \w+\.py", text, re.MULTILINE)[0])


def start(page: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Runs the scripts of a page by its command, one after the other; returns what they print, and the last summary."""
    words, files = command(page), []
    for number, script in enumerate(scripts(page)):
        files.append(folder / f"{number}-{words[-1]}")
        files[-1].write_text(script)
    program = files if len(files) == 1 else ["-c", ALL, *files]
    launch = [sys.executable, "-m", *words[: words.index("python")], "--", sys.executable, *program]
    ended = launching.run(0, launch, LIMIT_S, cwd=folder, warm=True)
    if ended.returncode:
        raise RuntimeError(f"{page}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    (run,) = (folder / "runs").iterdir()
    return TAG.sub("", ended.stdout), json.loads((run / "summary.json").read_text())


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
