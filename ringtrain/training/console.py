"""Terminal output of a run: plan, progress, result."""

from __future__ import annotations

import errno
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.config.derived import in_words, without_effect
from ringtrain.config.sections import changed_options
from ringtrain.monitor.journal import duration
from ringtrain.optim import schedules

if TYPE_CHECKING:
    from ringtrain.training.run import Run

SECONDS_BETWEEN_LINES = 10.0
A_CALLBACK = "a callback"
"""why a run was stopped: one of its callbacks has set `stop_training`"""
USUAL = {"accuracy": "{:.2%}", "loss": "{:.4f}"}
"""metrics that are shown with the result, and their format"""


class Terminal:
    """Standard output of rank 0, of others nothing; it never ends a run: without its reader, it goes to nowhere."""

    def __init__(self, is_quiet: bool) -> None:
        self.is_quiet = is_quiet

    def print(self, text: str = "") -> None:
        if self.is_quiet:
            return
        try:
            print(text, flush=True)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):
                _lead_to_nowhere(sys.stdout.fileno())


def leave_closed_terminal() -> None:
    """Makes standard output and error lead to nowhere if their terminal is closed."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            _lead_to_nowhere(descriptor)


def _lead_to_nowhere(descriptor: int) -> None:
    """Lets all other output to a descriptor succeed, and Python exit as if it had."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def terminal_of(run: Run) -> Terminal:
    """Returns the output of this rank, which is quiet if the run is."""
    from ringtrain import hvd

    return Terminal(run.source.is_quiet or hvd.rank() != 0)


class Progress:
    """Progress of a run: a line per epoch and every 10 s."""

    def __init__(self, terminal: Terminal, num_steps: int, num_epochs: int) -> None:
        self.terminal, self.num_steps, self.num_epochs = terminal, num_steps, num_epochs
        self.last_line_s = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether the last line was printed at least SECONDS_BETWEEN_LINES ago."""
        return time.monotonic() - self.last_line_s >= SECONDS_BETWEEN_LINES

    def step(self, global_step: int, epoch: int, figures: str) -> None:
        """Prints a line for a completed step with its `figures`, e.g. "loss 0.1234"; `epoch` counts from 0."""
        self._line(f"epoch {epoch + 1}/{self.num_epochs}  step {global_step}/{self.num_steps}  {figures}")

    def epoch(self, epoch: int, figures: Sequence[str]) -> None:
        """Prints a line for a completed epoch, counted from 0."""
        self._line("  ".join([f"epoch {epoch + 1:>{len(str(self.num_epochs))}}/{self.num_epochs}", *figures]))

    def _line(self, text: str) -> None:
        self.terminal.print(text)
        self.last_line_s = time.monotonic()


def speed(samples_per_s: float, samples: str = "images") -> str:
    """Formats a speed, e.g. "1,234 images/s". A run of one step has none: the first step is not measured."""
    if not math.isfinite(samples_per_s):
        return "too short to measure speed"
    return f"{samples_per_s:,.0f} {samples}/s"


def show_plan(run: Run) -> None:
    """Prints the plan, with every number derived from the configuration, for which the job may have others."""
    config, strategy, numbers = run.config, run.strategy, run.job.numbers
    placement = strategy.placement(numbers, run.pinning, run.hosts)
    rates = schedules.in_words(schedules.schedule_of(config, numbers), numbers.steps_per_epoch)
    notes: dict[str, str] = {}
    for sentence in without_effect(config):
        key = "note".ljust(len("note") + len(notes))  # no row may have the key of another
        notes[key] = sentence
    options = ", ".join(f"{name}={value}" for name, value in changed_options(config).items()) or "defaults"
    # The name of a strategy that no other row says, with what a user must know.
    name = config.strategy.name
    named: dict[str, str] = {}
    if name not in ("ring", strategy.copies_name):
        named["strategy"] = name
        if strategy.over_grpc:
            named["strategy"] += "; its servers obey every user of these hosts"
    shown = {
        **placement,
        "data": f"{config.data.name}: {numbers.num_train:,} to train, {numbers.num_test:,} to test",
        **named,
        "model": config.model.name,
        **in_words(config, numbers),
        **rates,
        "seed": str(config.seed),
        "options": options,
        **run.job.plan,
        **notes,
    }
    _show_rows(run.terminal, shown)


def show_start(run: Run) -> None:
    """Prints where a run resumes, which checkpoints were skipped, and why earlier attempts ended."""
    terminal, start = run.terminal, run.start
    for number, cause in enumerate(run.attempt.causes, 1):
        terminal.print(f"attempt {number} ended: {cause}")
    for reason in start.refused:
        terminal.print(f"{'skipped':<14} {reason}")
    if start.source:
        _show_rows(terminal, {"resumes": f"after step {start.global_step:,}, from {start.source}"})


def show_complete(terminal: Terminal, folder: Path, summary: Mapping[str, Any]) -> None:
    """Prints that a run was complete and stays unchanged."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary["started"] + summary["fit_s"]))
    more = f"raise --train.epochs above {summary['config']['train']['epochs']}"
    if summary["stopped_by"]:
        more = f"{summary['stopped_by']} ended it: give another name"
    elif summary["config"]["schedule"]["name"] in ("cosine", "polynomial"):
        more = "give another --run.name: its learning rate depends on --train.epochs"
    elif "script" in summary:
        more = "raise epochs, or give another name"
    rows = {"complete": f"since {since}, after step {summary['global_step']:,}"}
    if summary["test_accuracy"] is not None:
        rows["test accuracy"] = f"{summary['test_accuracy']:.2%}"
    rows["to train more"] = more
    rows["unchanged"] = str(folder)
    _show_rows(terminal, rows)


def show_result(terminal: Terminal, folder: Path, summary: Mapping[str, Any], proof: str, total_s: float) -> None:
    """Prints the result; what was verified (`proof`) comes last. `total_s`: from the start, with libraries and data."""
    failed, restarts = summary["saves"]["failed"], summary["restarts"]
    resume = ""
    if summary["config"]["run"]["resume"] not in ("auto", "must"):
        resume = " --run.resume auto"
    stopped = f"by {summary['stopped_by']}; to resume, repeat the command with --run.name {folder.name}{resume}"
    if summary["stopped_by"] == A_CALLBACK:
        stopped = f"by {A_CALLBACK}"
    elif "script" in summary:
        stopped = f"by {summary['stopped_by']}; to resume, start the script again with name={folder.name!r}"
    rows = {}
    if summary["stopped_by"]:
        rows["stopped"] = f"after step {summary['global_step']:,}, {stopped}"
    if not summary["stopped_by"].startswith("SIG"):  # after Ctrl-C: what is saved, and how to resume
        rows |= _metrics_rows(summary["metrics"])
        rows["speed"] = speed(summary["images_per_s"], summary.get("samples", "images"))
        rows["time"] = f"{duration(summary['fit_s'])} of training, {duration(total_s)} in all"
    if failed:
        rows["not saved"] = "; ".join(save["error"] for save in failed)
    if "not_exported" in summary:
        rows["not exported"] = summary["not_exported"]
    if restarts:
        rows["restarts"] = f"{restarts}, the reasons are in summary.json"
    rows |= {"files": f"{folder}/", "next": f"ringtrain report {shlex.quote(str(folder))}"}
    terminal.print()
    _show_rows(terminal, rows)
    terminal.print(proof)


def _metrics_rows(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the metrics of the evaluation, the usual ones first."""
    formats: dict[str, str] = {}
    for prefix in ("test", "val"):
        formats |= {f"{prefix}_{name}": text for name, text in USUAL.items()}
    for name in metrics:
        if name.startswith(("test_", "val_")):
            formats.setdefault(name, "{:.4g}")
    return {name.replace("_", " "): text.format(metrics[name]) for name, text in formats.items() if name in metrics}


def _show_rows(terminal: Terminal, rows: Mapping[str, str]) -> None:
    for name, value in rows.items():
        terminal.print(f"{name:<14} {value}")
    terminal.print()
