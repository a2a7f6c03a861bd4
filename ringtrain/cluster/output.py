"""Output of a launcher and its ranks: reports are taken out of it, and the rest is printed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Sequence

from ringtrain.cluster import exit_cause
from ringtrain.cluster.processes import write
from ringtrain.protocol.env import MARK
from ringtrain.protocol.reader import Lines, Reader

# With the launcher's tag, to the end of the line. Before it may be another rank's text without a line end.
REPORT = re.compile(rb"(?:\[[^][<>]*\d\](?:<stderr>:? ?| )|\d+: )?%b:.*" % MARK.encode(), re.DOTALL)
# Long messages of Open MPI, PRRTE and Hydra about the end of a rank. The job's last line has more information.
DIVIDER = re.compile(rb"[-=]{20,}\s*")
REDUNDANT = re.compile(
    rb"Primary job +terminated normally|detected that one or more processes exited|noticed that process"
    rb"|exiting improperly|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
)
BLOCK_S = 1.0  # for the rest of such a block
MAX_LAUNCHER_LINES = 200


class Output:
    """Standard error of a launcher. defers_failures: A rank's failure is held back, for the job's last line."""

    def __init__(self, reports: Reader, defers_failures: bool) -> None:
        self.reports = reports
        self.defers_failures = defers_failures
        self.tails: dict[int, deque[str]] = {}
        """last lines of each rank"""
        self.launcher_lines: deque[str] = deque(maxlen=MAX_LAUNCHER_LINES)
        self.deferred: list[tuple[str, bytes]] = []
        """text of a failure, and a line of it"""
        self.is_silent = False
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
            if raw.endswith(b"\r"):
                self.show(raw)  # progress bar: the next text overwrites it
            elif tagged is None:
                self.launcher_lines.append(line)
                self._show_unless_redundant(raw)
            else:
                self.tails.setdefault(tagged[0], deque(maxlen=exit_cause.TAIL_LINES)).append(tagged[1])
                failure = self.reports.failures.get(tagged[0])
                if self.defers_failures and failure and tagged[1].strip() in failure.lines_for_a_person():
                    self.deferred.append((failure.text, raw))
                else:
                    self.show(raw)
        if self._block and time.monotonic() > self._block_since_s + BLOCK_S:
            self.show_block()

    def show(self, raw: bytes) -> None:
        if self.is_silent:
            return
        write(raw)
        self._line_is_open = not raw.endswith(b"\n")

    def show_deferred(self, text: str) -> None:
        """Prints the lines of failures that are not part of a text."""
        for failure, raw in self.deferred:
            if failure not in text:
                self.show(raw)  # another rank's failure, or another exit cause

    def _show_unless_redundant(self, raw: bytes) -> None:
        """Prints a line of the launcher, unless it is in a block between dashes about the job's end."""
        is_divider = DIVIDER.fullmatch(raw) is not None
        if not self._block and not is_divider:
            return self.show(raw)
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
