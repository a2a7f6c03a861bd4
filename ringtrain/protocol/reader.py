"""The launcher's side: reads what ranks report on standard error."""

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
TAG = re.compile(r"\[[^][<>]*\d\]<stderr>:? ?")  # a launcher's, also in the middle of a line that it took in two parts


class Lines:
    """Divides what processes write into lines. A progress bar's carriage return ends one as well; each keeps its end.

    Args:
        mark: of lines that are for a program: text that may be the beginning of one is given out with its end only.
    """

    WAIT_S = 0.2
    """after which unfinished text is given out as it is"""
    MAX_BYTES = 65536
    """of unfinished text"""

    def __init__(self, mark: bytes) -> None:
        self.unfinished = b""
        self._beginnings = tuple(mark[:length] for length in range(1, len(mark) + 1))
        self._since_s = 0.0

    def add(self, data: bytes) -> list[bytes]:
        """The lines that this completes."""
        lines = (self.unfinished + data).splitlines(keepends=True)
        if len(lines) != 1 or not self.unfinished:
            self._since_s = time.monotonic()
        self.unfinished = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        return lines

    def late(self) -> list[bytes]:
        """Unfinished text that has waited long enough, or is too long to wait."""
        text = self.unfinished
        if len(text) < self.MAX_BYTES and (
            not text
            or time.monotonic() < self._since_s + self.WAIT_S
            or self._beginnings[-1] in text
            or text.endswith(self._beginnings)
        ):
            return []
        return self.rest()

    def rest(self) -> list[bytes]:
        """Unfinished text, if there is any; after the end."""
        text, self.unfinished = self.unfinished, b""
        return [text] if text else []


class Reader:
    """Takes the reports of one job out of what its ranks write.

    Attributes:
        failures: by rank; the first of each.
        run_name: of the run, empty until rank 0 has said it.
        boxes: step and phase of ranks that have ended, where their launcher says so.
        processes: the process that trains, by host and first process of a rank, where these are two processes.
    """

    def __init__(self, job: str) -> None:
        self.seats: list[RankPlacement] = []
        self.failures: dict[int, Failure] = {}
        self.run_name = ""
        self.boxes: dict[int, tuple[int, str]] = {}
        self.processes: dict[tuple[str, int], int] = {}
        self._pieces: dict[int, dict[str, str]] = {}
        self._mark = f"{MARK}:{job}:"

    def take(self, line: str) -> bool:
        """Reads a line, and says whether it was a report."""
        whole = TAG.sub("", line)  # the tag may stand within the mark
        if self._mark not in whole:
            return False
        kind, _, rest = whole.partition(self._mark)[2].strip().partition(":")
        try:
            if kind == "seat":
                rank, size, local_rank, process, host = rest.split(":", 4)
                self.seats.append(
                    RankPlacement(int(rank), int(size), host, int(local_rank or -1), process=int(process))
                )
            elif kind == "process":
                first, process, host = rest.split(":", 2)
                self.processes[host, int(first)] = int(process)
            elif kind == "recovery":
                self.failures.clear()
                self._pieces.clear()
            elif kind == "run" and rest.endswith(":"):
                self.run_name = base64.b64decode(rest[:-1], validate=True).decode()
            elif kind == "box":
                rank, step, phase = rest.split(":", 2)
                self.boxes[int(rank)] = int(step), phase.strip()
            elif kind == "failure":
                self._take_piece(*rest.split(":", 2))
        except (*INVALID, zlib.error):
            pass  # torn
        return True

    def _take_piece(self, rank: str, number: str, text: str) -> None:
        pieces = self._pieces.setdefault(int(rank), {})
        pieces[number] = text
        count = int(number.partition("/")[2])
        wanted = [f"{index}/{count}" for index in range(1, min(count, MAX_PIECES) + 1)]
        if all(name in pieces for name in wanted) and int(rank) not in self.failures:
            data = base64.b64decode("".join(pieces[name] for name in wanted), validate=True)
            told = parse_json(zlib.decompressobj().decompress(data, MAX_FAILURE_BYTES))
            words = {name: str(told[name]) for name in ("host", "kind", "text")}
            failure = Failure(
                int(told["rank"]), time_s=float(told["time_s"]), exit_code=int(told["exit_code"]), **words
            )
            if 0 <= failure.exit_code < 256:
                self.failures[int(rank)] = failure

    def first_failure(self) -> Failure | None:
        """The earliest; one that is only the consequence of another's end never wins over a cause."""
        return min(self.failures.values(), key=lambda failure: (failure.is_consequence, failure.time_s), default=None)
