"""Output of a launcher and its ranks: reports are taken out of it, and the rest is printed."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Sequence

from ringtrain.cluster import exit_cause
from ringtrain.cluster.processes import say, write
from ringtrain.protocol.env import MARK
from ringtrain.protocol.failures import shortened
from ringtrain.protocol.reader import CHATTER, Lines, Reader

# With the launcher's tag, to the end of the line. Before it may be another rank's text without a line end.
REPORT = re.compile(rb"(?:\[[^][<>]*\d\](?:<stderr>:? ?| )|\d+: )?%b:.*" % MARK.encode(), re.DOTALL)
MAX_LAUNCHER_LINES, MAX_SHOWN = 200, 8


class Output:
    """Standard error of a launcher. With `defers_failures`, only the first traceback is shown: see `show_others`."""

    def __init__(self, reports: Reader, defers_failures: bool) -> None:
        self.reports = reports
        self.defers_failures = defers_failures
        self.shows_notices = not os.isatty(2)
        """TensorFlow's own: a terminal does not show them, a file keeps them"""
        self.tails: dict[int, deque[str]] = {}
        """last lines of each rank"""
        self.launcher_lines: deque[str] = deque(maxlen=MAX_LAUNCHER_LINES)
        self._first_rank = -1
        """the first whose traceback is shown; -1: none"""
        self._lines = Lines(MARK.encode())
        self._line_is_open = False

    def add(self, data: bytes) -> None:
        """Prints the lines that some output completes; b"": those that are late."""
        lines = self._lines.add(data) if data else self._lines.late()
        self.take(lines)

    def take(self, lines: Sequence[bytes]) -> None:
        """Parses reports, and prints the other lines."""
        for raw in lines:
            if self.reports.take(raw.decode(errors="replace")):
                before, num_reports = REPORT.subn(b"", raw)
                raw = before if num_reports else b""
                if not raw:
                    continue
            line = raw.decode(errors="replace").removesuffix("\n")
            tagged = exit_cause.rank_of(line)
            words = tagged[1] if tagged else line
            if CHATTER.match(words.encode()):
                if self.shows_notices:
                    self.show(raw)
            elif raw.endswith(b"\r"):
                self.show(raw)  # progress bar: the next text overwrites it
            elif tagged is None:
                self.launcher_lines.append(line)
                self.show(raw)
            else:
                rank = tagged[0]
                self.tails.setdefault(rank, deque(maxlen=exit_cause.TAIL_LINES)).append(shortened(words))
                if not self._is_deferred(rank):
                    self.show(raw)

    def show(self, raw: bytes) -> None:
        write(raw)
        self._line_is_open = not raw.endswith(b"\n")

    def _is_deferred(self, rank: int) -> bool:
        """Returns whether a rank's lines are held back: it has failed, and is not the first with a traceback."""
        failure = self.reports.failures.get(rank)
        if failure is None or not self.defers_failures:
            return False
        if self._first_rank < 0 and failure.has_traceback and not failure.is_consequence:
            self._first_rank = rank
        return rank != self._first_rank

    def show_others(self, named: int) -> None:
        """Says how ranks have failed whose failures are not shown yet. named: Rank in the job's last words."""
        failures = self.reports.failures
        shown = [failures[rank].where for rank in (named, self._first_rank) if rank in failures]
        is_above = self._first_rank in failures and shown.count(failures[self._first_rank].where) == 1
        alike: list[int] = []
        followed: list[int] = []
        for rank, failure in sorted(failures.items()):
            if rank == named or (rank == self._first_rank and is_above) or not self.defers_failures:
                continue
            if failure.is_consequence:
                followed.append(rank)
            elif failure.where in shown:
                alike.append(rank)
            else:
                shown.append(failure.where)
                say(f"rank {rank} on {failure.host}: {failure.last or failure.text}")
        if alike:
            say(f"the same error on {_named(alike)}")
        if followed:
            say(f"follow-up errors, not shown, on {_named(followed)}")

    def drain(self, descriptor: int) -> None:
        """Reads the rest of the output without waiting: other processes may hold the pipe open."""
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, 65536):
                self.add(data)
        self.take(self._lines.rest())
        self.end_line()

    def end_line(self) -> None:
        """Makes the launcher's next line begin at the left, also after a progress bar."""
        if self._line_is_open:
            write(b"\n")
        self._line_is_open = False


def _named(ranks: Sequence[int]) -> str:
    """Ranks for a message."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join([*map(str, ranks[:MAX_SHOWN]), *['...'][: len(ranks) - MAX_SHOWN]])}"
