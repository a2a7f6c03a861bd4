"""Output of a sweep: a live table or log lines while it runs, then tables and plots."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.lab import plots
from ringtrain.lab.sweep.space import Range, Space
from ringtrain.lab.tables import Table, counted

if TYPE_CHECKING:
    from ringtrain.lab.sweep.runner import Running
    from ringtrain.lab.sweep.study import Study, Trial

BEST = 5
"""best trials shown while it runs"""
REDRAW_S = 0.5


class Shown:
    """Progress of a sweep on standard error, as a context manager."""

    def __init__(self, study: Study, most: int, monitor: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self.study, self.most, self.monitor = study, most, monitor
        self.console = Console(stderr=True)
        # Only this thread draws, since trials are started by forking.
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.drawn_s = 0.0

    def __enter__(self) -> Shown:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        """Prints a permanent line."""
        self.console.print(f"sweep: {text}", highlight=False, markup=False, soft_wrap=True)

    def began(self, one: Running) -> None:
        """Reports that a trial was started."""
        again = ", which goes on" if one.epoch else ""
        self.say(f"trial {one.trial.number}{again}: {in_words(one.values)} on {one.where}")

    def ended(self, one: Trial) -> None:
        """Reports the result of a trial."""
        how = {"complete": f"{self.monitor} {number(one.value)}", "failed": str(one.facts.get("reason"))}
        after = f" after {counted(one.epochs, 'epoch')}" if one.epochs else ""
        seconds = f", {one.facts['seconds']:.1f} s" if "seconds" in one.facts else ""
        self.say(f"trial {one.number} {one.state}{after}{seconds}: {how.get(one.state) or in_words(one.values)}")

    def update(self, running: Sequence[Running]) -> None:
        """Redraws the table, at most every REDRAW_S seconds."""
        if not self.console.is_terminal or time.monotonic() < self.drawn_s + REDRAW_S:
            return
        from rich.table import Table as RichTable
        from rich.text import Text

        self.drawn_s = time.monotonic()
        trials, best = self.study.trials(), self.study.best()[:BEST]
        states = [one.state for one in trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("running", "complete", "pruned", "failed"))
        table = RichTable(
            "trial", "", self.monitor, "epochs", "s", "values", title=f"{counts}, of {self.most}", box=None
        )
        for one in running:
            cells = [str(one.trial.number), "running", number(one.value), str(one.epoch), f"{one.seconds:.0f}"]
            table.add_row(*cells, Text(in_words(one.values), overflow="ellipsis", no_wrap=True))
        for done in best:
            cells = [str(done.number), "best" if done == best[0] else "", number(done.value), str(done.epochs)]
            seconds = f"{done.facts.get('seconds', 0):.0f}"
            table.add_row(*cells, seconds, Text(in_words(done.values), overflow="ellipsis", no_wrap=True), style="dim")
        self.live.update(table, refresh=True)


def in_words(values: Mapping[str, Any]) -> str:
    """Formats values, e.g. "train.batch_size=32 optimizer.learning_rate=0.00123"."""
    return " ".join(f"{option}={number(value)}" for option, value in values.items())


def number(value: Any) -> str:
    """Formats a value with few characters."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return json.dumps(value)
    return str(value)


def show(trials: Sequence[Trial], best: Sequence[Trial], monitor: str, options: Sequence[str]) -> None:
    """Prints all trials: the best first, then those that were pruned or failed.

    The last column is the learning rate after scaling, which batch sizes and optimizers also change.
    """
    rest = sorted((one for one in trials if one not in best), key=lambda one: (one.state != "pruned", one.number))
    rows = []
    for one in [*best, *rest]:
        seconds = f"{one.facts['seconds']:.1f}" if "seconds" in one.facts else ""
        values = [number(one.values.get(option)) for option in options]
        rate = number(one.facts.get("learning_rate"))
        rows.append([str(one.number), one.state, number(one.value), str(one.epochs), seconds, *values, rate])
    head = ("trial", "", monitor, "epochs", "s", *(option.rpartition(".")[2] for option in options), "trained rate")
    Table(head, rows, f"{len(best)} of {len(trials)} trials complete").show()
    for one in rest:
        if one.state == "failed":
            print(f"trial {one.number} failed: {one.facts.get('reason')}")


def draw(folder: Path, trials: Sequence[Trial], monitor: str, minimize: bool, space: Space) -> list[Path]:
    """Draws the objective over trials and over each option, and returns the paths of the plots."""
    known = [one for one in trials if one.value is not None and math.isfinite(one.value)]
    complete = [one for one in known if one.state == "complete"]
    written = []
    for name, one in {"objective": None, **space}.items():
        x = name if one else "trial"
        axes, write_png = plots.canvas(f"{monitor} by {x}", x, monitor, log=False)
        texts: dict[str, int] = {}
        if one and not isinstance(one, Range) and not all(type(value) in (int, float) for value in one.values):
            texts = {number(value): place for place, value in enumerate(one.values)}
            axes.set_xticks([*texts.values()], [*texts])
        if isinstance(one, Range) and one.log:
            axes.set_xscale("log")
        for state, mark in (("complete", "o"), ("pruned", "x")):
            shown = [trial for trial in known if trial.state == state]
            if one:
                shown = [trial for trial in shown if name in trial.values]
                places = [trial.values[name] for trial in shown]
            else:
                places = [trial.number for trial in shown]
            if texts:
                places = [texts[number(value)] for value in places]
            axes.plot(places, [each.value for each in shown], mark, label=f"{state} ({len(shown)})")
        if not one:
            pick = min if minimize else max
            best: list[Any] = []
            for each in complete:
                best.append(pick([*best[-1:], each.value]))
            axes.step([each.number for each in complete], best, where="post", label="best so far")
            axes.xaxis.get_major_locator().set_params(integer=True)
        written.append(folder / f"{name}.png")
        write_png(written[-1])
    return written
