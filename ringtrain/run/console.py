"""Terminal output of a run: plan, progress, result."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from ringtrain.config import changed_options
from ringtrain.derived import Numbers, in_words, without_effect
from ringtrain.monitor.journal import duration
from ringtrain.optim import schedules
from ringtrain.protocol.env import HOST_SLOTS
from ringtrain.protocol.launchers import PROGRAMS, launched_rank

if TYPE_CHECKING:
    from ringtrain.run.context import Process
    from ringtrain.run.resume import Start

SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_STEPS = 10.0, 0.1
A_CALLBACK = "a callback"
"""why a run was stopped: one of its callbacks has set `stop_training`"""
USUAL = {"accuracy": "{:.2%}", "loss": "{:.4f}"}
"""metrics that are shown with the result, and their format"""
RANKS_WIDTHS = (8, 8, 8, 10, 10)
"""widths of the columns in the table of slow ranks, after the first two, which have 28 characters"""
BAR_WIDTH, RESULT_WIDTH = 40, 72
"""maximum number of columns of the progress bar, and of the rows of a result, where words allow it"""
MIN_INPUT_SHARE, MIN_WAIT_SHARE, MIN_STEPS = 0.1, 0.25, 20
"""shares of the steps waiting for data and for other ranks that are said, of at least so many steps"""


class SteadyConsole(Console):
    """Console that never hides the cursor: a launcher may kill this process before it is shown again.

    Its output never ends a run: if its terminal or the reader of its pipe is gone, it goes to nowhere.
    """

    def show_cursor(self, show: bool = True) -> bool:
        return False

    @property  # type: ignore[misc]
    def file(self) -> IO[str]:
        return cast("IO[str]", _Unfailing(super().file))


class _Unfailing:
    """Stream that raises no OSError."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):
                _lead_to_nowhere(self._stream.fileno())


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


def terminal_of(process: Process) -> Console:
    """Returns this rank's console, which is quiet if the run is."""
    from ringtrain import hvd

    if process.source.is_quiet:
        return console_for(1)
    return console_for(hvd.rank())


def console_for(rank: int) -> Console:
    """Returns the console of a rank, which is quiet on all ranks but rank 0.

    It writes to the terminal itself if there is one, also under a launcher on this host, else plain lines to stdout.
    """
    if rank != 0:
        return SteadyConsole(quiet=True)
    terminal = "" if HOST_SLOTS in os.environ else terminal_of_launcher()
    if terminal:
        with contextlib.suppress(OSError):  # another user's terminal, or one outside this container
            stream = open(terminal, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
            width = os.get_terminal_size(stream.fileno()).columns or 100  # some terminals report a width of 0
            return SteadyConsole(file=stream, force_terminal=True, width=width)
    if launched_rank() is not None or not sys.stdout.isatty():
        return SteadyConsole(force_terminal=False, color_system=None, width=120)
    return SteadyConsole()


def terminal_of_launcher(proc: Path = Path("/proc")) -> str:
    """Returns the terminal that a launcher on this host writes to, e.g. "/dev/pts/3", to draw on it directly.

    A launcher gives its ranks a pipe or a pseudo-terminal and copies their output line by line with a prefix, which
    breaks a progress bar. Returns "" if no ancestor of this process is a launcher, if it runs in the background, or if
    its output goes to a file or pipe.
    """
    process, terminal = os.getpid(), ""
    while process > 1:
        try:
            words = (proc / str(process) / "cmdline").read_bytes().split(b"\0")[:3]
            status = (proc / str(process) / "stat").read_text().rpartition(")")[2].split()
            parent, group, foreground = int(status[1]), int(status[2]), int(status[5])
            if any(os.path.basename(word).decode() in ("ringtrain", *PROGRAMS) for word in words):
                output = os.readlink(proc / str(process) / "fd" / "1")
                is_terminal = output.startswith(("/dev/pts/", "/dev/tty"))
                terminal = output if is_terminal and group == foreground else ""
        except OSError:
            return ""
        process = parent
    return terminal


class _StderrAboveBar(io.TextIOBase):
    """Standard error while a bar moves: logs whole lines, and prints them above the bar to leave no copy of it."""

    def __init__(self, console: Console, to_log: Callable[[str], None], stderr: TextIO) -> None:
        self.console, self.to_log, self.stderr = console, to_log, stderr
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Shows complete lines and keeps the rest."""
        *lines, rest = (self._unfinished + text).split("\n")
        self._unfinished = _as_last_written(rest)
        if rest.endswith("\r"):
            self._unfinished += "\r"
        for line in map(_as_last_written, lines):
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self.to_log(line)
        return len(text)

    def fileno(self) -> int:
        """Descriptor of standard error, for child processes."""
        return self.stderr.fileno()


def _as_last_written(line: str) -> str:
    """Returns what a terminal shows of a line that contains carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


class Progress:
    """Progress of a run: a bar if it can move, else a line per epoch and every 10 s. `to_log` writes a line."""

    def __init__(
        self, console: Console, num_steps: int, num_epochs: int, to_log: Callable[[str], None] | None = None
    ) -> None:
        self.console = console
        self.to_log = to_log
        self.stderr = sys.stderr
        self.num_epochs = num_epochs
        self.bar = rich.progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(max_width=BAR_WIDTH)),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
            redirect_stderr=False,  # _StderrAboveBar does that, and writes to the rank's log
            transient=True,
        )
        self.task = self.bar.add_task("epoch 1", total=num_steps, figures="")
        self.last_line_s, self.last_step_s = time.monotonic(), 0.0

    def __enter__(self) -> Progress:
        self.bar.start()
        self.stderr = sys.stderr
        if self.to_log and not self.bar.disable:
            sys.stderr = _StderrAboveBar(self.console, self.to_log, sys.stderr)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.stderr = self.stderr
        self.bar.stop()

    def is_due(self) -> bool:
        """Whether the last step was shown at least SECONDS_BETWEEN_STEPS ago."""
        return time.monotonic() - self.last_step_s >= SECONDS_BETWEEN_STEPS

    def step(self, global_step: int, epoch: int, figures: str) -> None:
        """Shows a completed step with its `figures`, e.g. "loss 0.1234"; `epoch` counts from 0."""
        self.last_step_s = time.monotonic()
        description = f"epoch {epoch + 1}/{self.num_epochs}"
        self.bar.update(self.task, completed=global_step, description=description, figures=figures)
        if not self.console.is_terminal and time.monotonic() - self.last_line_s > SECONDS_BETWEEN_LINES:
            self._line(f"{description}  step {global_step}/{self.bar.tasks[0].total}  {figures}")

    def epoch(self, epoch: int, figures: Sequence[str]) -> None:
        """Prints a line for a completed epoch, counted from 0, without the last figures if the line is too long."""
        shown = [f"epoch {epoch + 1:>{len(str(self.num_epochs))}}/{self.num_epochs}", *figures]
        while self.console.is_terminal and len("  ".join(shown)) > self.console.width and len(shown) > 2:
            shown.pop()
        self._line("  ".join(shown))

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.last_line_s = time.monotonic()


def speed(samples_per_s: float, samples: str = "images") -> str:
    """Formats a speed, e.g. "1,234 images/s". A run of one step has none: the first step is not measured."""
    if not math.isfinite(samples_per_s):
        return "too short to measure speed"
    return f"{samples_per_s:,.0f} {samples}/s"


def show_plan(
    console: Console, process: Process, numbers: Numbers, hosts: Sequence[str], rows: Mapping[str, str] | None = None
) -> None:
    """Prints the plan, with every number derived from the configuration.

    `hosts`: host of each rank; `rows`: replace those of the configuration.
    """
    config, strategy = process.config, process.strategy
    placement = strategy.placement(numbers, process.pinning, hosts)
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
        **(rows or {}),
        **notes,
    }
    _show_rows(console, shown)


def show_start(console: Console, process: Process, start: Start) -> None:
    """Prints where a run resumes, which checkpoints were skipped, and why earlier attempts ended."""
    for number, cause in enumerate(process.attempt.causes, 1):
        console.print(f"attempt {number} ended: {cause}", highlight=False, markup=False, soft_wrap=True)
    for reason in start.refused:
        console.print(f"{'skipped':<14} {reason}", highlight=False, soft_wrap=True)
    if start.source:
        unused = ""
        if process.config.run.init_from:
            unused = " (run.init_from has no effect)"
        _show_rows(console, {"resumes": f"after step {start.global_step:,}, from {start.source}{unused}"})


def show_complete(console: Console, folder: Path, summary: Mapping[str, Any]) -> None:
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
    _show_rows(console, rows)


def show_result(console: Console, folder: Path, summary: Mapping[str, Any], proof: str, total_s: float) -> None:
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
        rows |= waiting(summary.get("ranks", ()))
    if failed:
        rows["not saved"] = "; ".join(save["error"] for save in failed)
    if "not_exported" in summary:
        rows["not exported"] = summary["not_exported"]
    if restarts:
        rows["restarts"] = f"{restarts}, the reasons are in summary.json"
    wrap = functools.partial(textwrap.wrap, width=RESULT_WIDTH - 15, break_long_words=False, break_on_hyphens=False)
    rows = {name: f"\n{'':<15}".join(wrap(value)) for name, value in rows.items()}
    rows |= {"files": f"{folder}/", "next": f"ringtrain report {shlex.quote(str(folder))}"}  # whole, to be pasted
    console.print()
    _show_rows(console, rows)
    # A terminal breaks it between words: the checksum stays in one piece. Programs that read it get one line.
    width = min(RESULT_WIDTH, console.width) if console.is_terminal else None
    console.print(proof, highlight=False, markup=False, soft_wrap=width is None, width=width, style="bold")


def _metrics_rows(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the metrics of the evaluation, the usual ones first."""
    formats: dict[str, str] = {}
    for prefix in ("test", "val"):
        formats |= {f"{prefix}_{name}": text for name, text in USUAL.items()}
    for name in metrics:
        if name.startswith(("test_", "val_")):
            formats.setdefault(name, "{:.4g}")
    return {name.replace("_", " "): text.format(metrics[name]) for name, text in formats.items() if name in metrics}


def waiting(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Rows about the shares of the steps that ranks wait for data and for each other, where they are large."""
    measured = [entry for entry in ranks if _is_measured(entry)]
    totals = [entry["totals"] for entry in measured]
    input_shares = [entry["input_s"] / entry["step_s"] for entry in totals]
    wait_shares = [entry["wait_s"] / entry["step_s"] for entry in totals]
    rows = {}
    if max(input_shares, default=0.0) >= MIN_INPUT_SHARE:
        rows["input"] = (
            f"a rank waits {max(input_shares):.0%} of its steps for data: num_parallel_calls in the maps of a pipeline"
            f" and prefetch at its end, or more threads per rank"
        )
    # One process has no allreduce, and may use the same cores.
    on_one_host = len({entry["host"] for entry in measured}) == 1 < len(measured)
    on_cpus = all(entry["device"].startswith("CPU") for entry in measured)
    if on_one_host and on_cpus and min(wait_shares) >= MIN_WAIT_SHARE:
        rows["allreduce"] = (
            f"ranks wait {min(wait_shares):.0%} of their steps for it: one process with all cores may be faster"
        )
    return rows


def _is_measured(times: Mapping[str, Any]) -> bool:
    return bool(times) and times["totals"]["num_steps"] >= MIN_STEPS and times["totals"]["step_s"] > 0


def show_ranks(console: Console, ranks: Sequence[Mapping[str, Any]], slow: Sequence[int]) -> None:
    """Prints how each rank spent its time, if one was slow. `ranks`: medians per step, as in summary.json."""
    if not slow:
        return
    console.print()
    parts = ("step", "input", "compute", "callbacks", "wait")
    _line_of(console, "ms per step", ["host", *parts])
    for entry in ranks:
        figures = [f"{1000 * entry[f'{part}_s']:.1f}" for part in parts]
        title = f"rank {entry['rank']}"
        if entry["rank"] in slow:
            title += " slow"
        _line_of(console, title, [entry["host"], *figures])


def _line_of(console: Console, first: str, cells: Sequence[str]) -> None:
    text = f"{first:<14} {cells[0]:<13}"
    text += "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], RANKS_WIDTHS, strict=True))
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _show_rows(console: Console, rows: Mapping[str, str]) -> None:
    for name, value in rows.items():
        console.print(f"{name:<14} {value}", highlight=False, markup=False, soft_wrap=True)
    console.print()
