"""Output of a sweep: lines while it runs, then tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain.lab.tables import Table, counted

if TYPE_CHECKING:
    from ringtrain.lab.sweep.runner import Running
    from ringtrain.lab.sweep.study import Trial


class Shown:
    """Progress of a sweep on standard error."""

    def __init__(self, objective: str) -> None:
        from rich.console import Console

        self.objective = objective
        self.console = Console(stderr=True)

    def say(self, text: str) -> None:
        """Prints a permanent line."""
        self.console.print(f"sweep: {text}", highlight=False, markup=False, soft_wrap=True)

    def began(self, one: Running) -> None:
        """Reports that a trial was started."""
        again = ", which goes on" if one.epoch else ""
        self.say(f"trial {one.trial.number}{again}: {in_words(one.values)} on {one.where}")

    def ended(self, one: Trial) -> None:
        """Reports the result of a trial."""
        how = {"complete": f"{self.objective} {number(one.value)}", "failed": str(one.facts.get("reason"))}
        after = f" after {counted(one.epochs, 'epoch')}" if one.epochs else ""
        seconds = f", {one.facts['seconds']:.1f} s" if "seconds" in one.facts else ""
        self.say(f"trial {one.number} {one.state}{after}{seconds}: {how.get(one.state) or in_words(one.values)}")


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
