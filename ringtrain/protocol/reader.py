"""The launcher's parser of the ranks' reports on standard error."""

from __future__ import annotations

import base64
import re
import time
import zlib

from ringtrain.protocol.env import MARK
from ringtrain.protocol.failures import Failure
from ringtrain.protocol.json_text import INVALID, parse_json
from ringtrain.protocol.placement import RankPlacement

MAX_PIECES = 1000
MAX_FAILURE_BYTES = 1 << 20
TAG = re.compile(r"\[[^][<>]*\d\]<stderr>:? ?")  # a launcher's, also within a line that it read in two parts

# Notices of TensorFlow and absl that a terminal does not show.
CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog"
    rb"|E\d{4} .*(Unable to register|failed call to cuInit)"
    rb"|[IW]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\] "  # absl: I0000 00:00:1795168715.773533  4855 port.cc:153]
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [IW] \S+:\d+\] "  # TensorFlow's own format before it used absl
    rb"|To enable the following instructions: "
    rb"|/job:worker/replica:\d+/task:\d+\s*$"  # second line of a message about waiting for workers
    rb"|\t \[\[\{\{node Assert\}\}\]\]$"  # of a row that cannot be read, which an error names
    rb"|Improper call to JPEG library|Corrupt JPEG data: |Premature end of JPEG file"  # these do not name the file
)


class Lines:
    """Splits the output of processes into lines with their ends, of which a progress bar's carriage return is one."""

    WAIT_S = 0.2
    """delay after which an incomplete line is returned"""
    MAX_BYTES = 65536
    """of an incomplete line"""

    def __init__(self, mark: bytes) -> None:
        self.unfinished = b""
        self._beginnings = tuple(mark[:length] for length in range(1, len(mark) + 1))
        self._since_s = 0.0

    def add(self, data: bytes) -> list[bytes]:
        """Lines that the data completes."""
        lines = (self.unfinished + data).splitlines(keepends=True)
        if len(lines) != 1 or not self.unfinished:
            self._since_s = time.monotonic()
        self.unfinished = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        return lines

    def late(self) -> list[bytes]:
        """Incomplete line, if it is over WAIT_S old or longer than MAX_BYTES."""
        text = self.unfinished
        if len(text) < self.MAX_BYTES and (
            not text
            or time.monotonic() < self._since_s + self.WAIT_S
            or self._beginnings[-1] in text  # it may contain a report: it is held back until its end
            or text.endswith(self._beginnings)
        ):
            return []
        return self.rest()

    def rest(self) -> list[bytes]:
        """Incomplete line, if there is one; for the end of the output."""
        text, self.unfinished = self.unfinished, b""
        return [text] if text else []


class Reader:
    """Extracts the reports of one job from the output of its ranks."""

    def __init__(self, job: str) -> None:
        self.ranks: list[RankPlacement] = []
        self.failures: dict[int, Failure] = {}  # the first of each rank
        self.run_name = ""  # until rank 0 has reported it
        self.initialized = False  # a rank has called hvd.init()
        self.not_initialized = False  # a process has imported ringtrain.hvd, and exited without hvd.init()
        self.left: list[int] = []  # ranks that have exited by themselves, in order
        self.cut: dict[int, int] = {}  # ranks whose ssh was killed, with the signal
        self.status: dict[int, tuple[int, str]] = {}  # step and phase of ranks that have exited
        self.processes: dict[tuple[str, int], int] = {}  # that trains, by host and first process, if they differ
        self._pieces: dict[int, dict[str, str]] = {}
        self._mark = f"{MARK}:{job}:"

    def take(self, line: str) -> bool:
        """Parses a line and returns whether it was a report."""
        whole = TAG.sub("", line)  # the tag may be within the mark
        if self._mark not in whole:
            return False
        kind, _, rest = whole.partition(self._mark)[2].strip().partition(":")
        try:
            if kind == "seat":
                rank, size, local_rank, process, host = rest.split(":", 4)
                self.ranks.append(
                    RankPlacement(_count(rank), _count(size), host, int(local_rank or -1), process=_count(process))
                )
            elif kind == "process":
                first, process, host = rest.split(":", 2)
                self.processes[host, _count(first)] = _count(process)
            elif kind == "recovery":
                self.failures.clear()
                self.left.clear()
                self._pieces.clear()
            elif kind == "run" and rest.endswith(":"):
                self.run_name = base64.b64decode(rest[:-1], validate=True).decode()
            elif kind in ("init", "no-init") and rest.isdecimal():
                self.initialized |= kind == "init"
                self.not_initialized |= kind == "no-init"
            elif kind == "left" and rest.isdecimal():
                self.left.append(int(rest))
            elif kind == "cut" and rest.endswith(":"):
                rank, number = rest[:-1].split(":")
                self.cut[_count(rank)] = _count(number)
            elif kind == "box":
                rank, step, phase = rest.split(":", 2)
                self.status[_count(rank)] = int(step), phase.strip()
            elif kind == "failure":
                self._take_piece(*rest.split(":", 2))
        except (*INVALID, zlib.error):
            pass  # an incomplete report
        return True

    def _take_piece(self, rank: str, number: str, text: str) -> None:
        pieces = self._pieces.setdefault(_count(rank), {})
        pieces[number] = text
        count = int(number.partition("/")[2])
        wanted = [f"{index}/{count}" for index in range(1, min(count, MAX_PIECES) + 1)]
        if all(name in pieces for name in wanted) and int(rank) not in self.failures:
            data = base64.b64decode("".join(pieces[name] for name in wanted), validate=True)
            fields = parse_json(zlib.decompressobj().decompress(data, MAX_FAILURE_BYTES))
            texts = {name: str(fields[name]) for name in ("host", "kind", "text", "last")}
            failure = Failure(
                _count(fields["rank"]), time_s=float(fields["time_s"]), exit_code=int(fields["exit_code"]), **texts
            )
            if 0 <= failure.exit_code < 256:
                self.failures[int(rank)] = failure

    def first_failure(self) -> Failure | None:
        """Earliest failure; a follow-up error only if there is no other."""
        # Clocks of hosts differ: between hosts the order of arrival counts, on the first one its clock.
        arrived = [self.failures[rank] for rank in self._pieces if rank in self.failures]
        failures = [failure for failure in arrived if not failure.is_consequence] or arrived
        on_first_host = [failure for failure in failures if failure.host == failures[0].host]
        return min(on_first_host, key=lambda failure: failure.time_s, default=None)


def _count(value: object) -> int:
    """Number of 0 or more. Raises ValueError for anything else."""
    number = int(str(value))
    if number < 0:
        raise ValueError(f"got {number}, expected 0 or more")
    return number
