"""Draws the diagrams of the pages: python benchmarks/diagrams.py writes run.svg, step.svg and launch.svg."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images"
LINE = 17
"""pixels from one line of text to the next"""
COLORS = {"plain": "#f4f6f8", "rank": "#e3f0fb", "all": "#e4f4e4", "files": "#fbf3dd", "host": "#ffffff"}
"""of a box: a program; a rank; what all ranks do together; files; a host"""


class Drawing:
    """Boxes with lines of text, and arrows between points, in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="sans-serif" font-size="13" role="img" aria-label="{escape(title)}">',
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: int, y: int, width: int, lines: Sequence[str], kind: str = "plain", height: int = 0) -> None:
        """A box whose first line of text is bold; as high as its lines, if no height is given."""
        height = height or 14 + LINE * len(lines)
        shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{COLORS[kind]}" stroke="#999"/>'
        self.parts.append(shape)
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            self.text(x + 10, y + 19 + LINE * number, line, weight)

    def text(self, x: int, y: int, text: str, weight: str = "normal") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" font-weight="{weight}" fill="#222">{escape(text)}</text>')

    def arrow(self, x: int, y: int, to_x: int, to_y: int) -> None:
        place = f'x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"'
        self.parts.append(f'<line {place} stroke="#555" stroke-width="1.5" marker-end="url(#end)"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def run() -> str:
    """The main path of train.py, and where each part of it is."""
    drawing = Drawing(900, 290, "A run: setup, agree, fit, finish")
    drawing.box(20, 20, 240, ["ringtrain.fit", "model and arguments of a script:", "api.py, training/script.py"])
    drawing.box(20, 110, 240, ["python -m ringtrain.train", "those of a configuration:", "training/configured.py"])
    drawing.arrow(260, 50, 300, 60)
    drawing.arrow(260, 140, 300, 90)
    drawing.box(
        300, 20, 260, ["1  setup", "libraries and Horovod, this rank's", "GPU, its strategy, its code"], "rank", 100
    )
    drawing.arrow(560, 70, 610, 70)
    agree = [
        "2  agree",
        "equal code, options and data,",
        "the newest checkpoint, a reduction",
        "that averages, the run's folder",
    ]
    drawing.box(610, 20, 270, agree, "all", 100)
    drawing.arrow(745, 120, 745, 160)
    fit = [
        "3  fit",
        "loop.py: epochs of steps; evaluation",
        "of all rows; the user's callbacks;",
        "stop together, compare the ranks,",
    ]
    drawing.box(610, 160, 270, [*fit, "save (saver.py)"], "all", 110)
    drawing.arrow(610, 215, 560, 215)
    finish = [
        "4  finish",
        "the ranks are compared once more,",
        "rank 0 writes summary.json and",
        "model.keras, the mirror is complete",
    ]
    drawing.box(300, 160, 260, finish, "all", 110)
    drawing.arrow(300, 240, 260, 240)
    drawing.box(20, 205, 240, ["runs/NAME", "checkpoints, logs, metrics,", "summary.json, model.keras"], "files")
    return drawing.svg()


def step() -> str:
    """One step of two ranks."""
    drawing = Drawing(900, 250, "A step on two ranks")
    drawing.box(20, 90, 150, ["batch of 32 rows", "in the order of", "seed and epoch"], "files")
    for rank, (y, rows) in enumerate(((20, "rows 0 to 15"), (150, "rows 16 to 31"))):
        drawing.box(220, y, 190, [f"rank {rank}", f"{rows}: forward", "and backward pass"], "rank", 80)
        drawing.box(710, y, 170, [f"rank {rank}", "one update: clipping,", "slots, weights"], "rank", 80)
        drawing.arrow(170, 122, 220, y + 40)
        drawing.arrow(410, y + 40, 460, 122)
        drawing.arrow(660, 122, 710, y + 40)
    reduced = ["allreduce", "each rank's share of rows,", "masks and weights counts:", "the mean of all 32 rows"]
    drawing.box(460, 80, 200, reduced, "all")
    return drawing.svg()


def launch() -> str:
    """Processes of a job on two hosts, and who starts and tells whom."""
    drawing = Drawing(900, 400, "Who starts and tells whom in a launch")
    drawing.box(
        20, 20, 400, ["ringtrain launch", "hosts and plan; then output, signals, exit cause, restarts"], height=60
    )
    drawing.arrow(420, 50, 480, 50)
    drawing.box(
        480, 20, 400, ["mpirun, horovodrun or srun", "starts the ranks by the command line of the plan"], height=60
    )
    for number, x in ((1, 20), (2, 470)):
        drawing.box(x, 150, 410, [f"host{number}"], "host", 130)
        agent = ["host agent, by ssh", "hands signals on,", "cleans up at the end"]
        drawing.box(x + 15, 190, 165, agent, height=75)
        ranks = ["ranks", "report on standard error,", "status in shared memory"]
        drawing.box(x + 210, 190, 185, ranks, "rank", 75)
        drawing.arrow(x + 180, 227, x + 210, 227)
    drawing.arrow(110, 80, 110, 190)
    drawing.arrow(360, 80, 590, 190)
    drawing.arrow(540, 80, 340, 190)
    drawing.arrow(790, 80, 790, 190)
    ring = [
        "all ranks",
        "gradients by NCCL, MPI or Gloo; heartbeats to rank 0, which names a rank that hangs, and ends the job",
    ]
    drawing.box(20, 325, 860, ring, "all")
    drawing.arrow(320, 265, 320, 325)
    drawing.arrow(770, 265, 770, 325)
    return drawing.svg()


DIAGRAMS = {"run.svg": run, "step.svg": step, "launch.svg": launch}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
