"""Output of a launcher and its ranks: reports are taken out of it, and the rest is printed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Sequence

from ringtrain.cluster import exit_cause
from ringtrain.cluster.processes import say, write
from ringtrain.protocol.env import MARK
from ringtrain.protocol.failures import Failure, shortened
from ringtrain.protocol.reader import CHATTER, Lines, Reader

# With the launcher's tag, to the end of the line. Before it may be another rank's text without a line end.
REPORT = re.compile(rb"(?:\[[^][<>]*\d\](?:<stderr>:? ?| )|\d+: )?%b:.*" % MARK.encode(), re.DOTALL)
# Long messages of Open MPI, PRRTE and Hydra about the end of a rank. The job's last line has more information.
DIVIDER = re.compile(rb"[-=]{20,}\s*")
REDUNDANT = re.compile(
    rb"Primary job +terminated normally|detected that one or more processes exited|noticed that process"
    rb"|exiting improperly|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
)
BLOCK_S = 1.0  # for the rest of such a block
MAX_LAUNCHER_LINES, MAX_HELD_LINES, MAX_SHOWN = 200, 1000, 8
# horovodrun's own words about the end of a rank, over Gloo; an empty line is the last.
OF_HOROVODRUN = re.compile(rb"Horovod detected that one or more processes exited|Process name: |Exit code: ")


class Output:
    """Standard error of a launcher.

    defers_failures: The first traceback is shown, and what ranks print after failures of the same kind is held back,
    for the job's last lines.
    """

    def __init__(self, reports: Reader, defers_failures: bool) -> None:
        self.reports = reports
        self.defers_failures = defers_failures
        self.shows_notices = not os.isatty(2)
        """TensorFlow's own: a terminal does not show them, a file keeps them"""
        self.tails: dict[int, deque[str]] = {}
        """last lines of each rank"""
        self.launcher_lines: deque[str] = deque(maxlen=MAX_LAUNCHER_LINES)
        self.held: dict[int, deque[bytes]] = {}
        """lines of ranks that have failed"""
        self._first_rank = -1
        """the first whose traceback is shown; -1: none"""
        self._lines = Lines(MARK.encode())
        self._line_is_open = False
        self._block: list[bytes] = []
        self._block_since_s = 0.0

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
                self._show_unless_redundant(raw)
            else:
                rank = tagged[0]
                self.tails.setdefault(rank, deque(maxlen=exit_cause.TAIL_LINES)).append(shortened(words))
                if self._is_held(rank):
                    self.held.setdefault(rank, deque(maxlen=MAX_HELD_LINES)).append(raw)
                else:
                    self.show(raw)
        if self._block and time.monotonic() > self._block_since_s + BLOCK_S:
            self.show_block()

    def show(self, raw: bytes) -> None:
        write(raw)
        self._line_is_open = not raw.endswith(b"\n")

    def _is_held(self, rank: int) -> bool:
        """Whether a rank's lines are held back: it has reported a failure, and is not the first with a traceback."""
        failure = self.reports.failures.get(rank)
        if failure is None or not self.defers_failures:
            return False
        if self._first_rank < 0 and failure.has_traceback and not failure.is_consequence:
            self._first_rank = rank
        return rank != self._first_rank

    def show_held(self, told: str, named: int = -1) -> None:
        """Prints the held lines that are not in the job's last words, and in one line which ranks failed alike.

        named: Rank in the last words.
        """
        shown: list[list[str]] = []
        if self._first_rank >= 0:
            shown.append(self.reports.failures[self._first_rank].where)
        alike: list[int] = []
        followed: list[int] = []
        for rank, lines in sorted(self.held.items()):
            failure = self.reports.failures[rank]
            if failure.is_consequence:
                followed.append(rank)
            elif failure.has_traceback and failure.where in shown:
                alike.append(rank)
            else:
                shown.append(failure.where)
                self._show_failure(failure, lines, told)
        if alike:
            others = sorted({*alike, self._first_rank} - {named, -1})
            say(f"the same error on {_named(others)}")
        if followed:
            say(f"follow-up errors, not shown, on {_named(followed)}")

    def _show_failure(self, failure: Failure, lines: Sequence[bytes], told: str) -> None:
        is_told = (failure.last or failure.text) in told
        for raw in lines:
            _, words = exit_cause.rank_of(raw.decode(errors="replace").removesuffix("\n")) or (0, "")
            if not (is_told and words.strip() in failure.lines_for_a_person()):
                self.show(raw)

    def _show_unless_redundant(self, raw: bytes) -> None:
        """Prints a line of the launcher, unless it is in a block between dashes about the job's end."""
        is_divider = DIVIDER.fullmatch(raw) is not None
        if not self._block and not is_divider:
            if not OF_HOROVODRUN.match(raw):
                self.show(raw)
            return
        self._block_since_s = time.monotonic()
        self._block.append(raw)
        if is_divider and len(self._block) > 1 and REDUNDANT.search(b"".join(self._block)):
            self._block.clear()
        elif is_divider and len(self._block) > 1:
            self.show_block()

    def show_block(self) -> None:
        for raw in self._block:
            self.show(raw)
        self._block.clear()

    def drain(self, descriptor: int) -> None:
        """Reads the rest of the output without waiting: other processes may hold the pipe open."""
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, 65536):
                self.add(data)
        self.take(self._lines.rest())
        self.show_block()
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
