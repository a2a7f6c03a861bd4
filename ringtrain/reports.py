"""What a job's launcher and its ranks tell each other: the plan in the environment, reports as lines on standard error.

Standard library only. Both halves know this page and nothing else of each other.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import socket
import stat
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ringtrain.json_text import INVALID, parse_json

JOB = "RINGTRAIN_JOB"
"""variable with the job's id, which every process of the job inherits"""
PLAN = "RINGTRAIN_PLAN"
"""variable with the plan as JSON"""
ATTEMPT = "RINGTRAIN_ATTEMPT"
"""variable with what came of earlier starts of the job, as JSON"""
FIRST_PROCESS = "RINGTRAIN_FIRST_PROCESS"
"""variable with the id of the process that a rank's command was started as"""
HOST_SLOTS = "RINGTRAIN_HOST_SLOTS"
"""variable with the slots of a host that several jobs share, each on some of them; none of them has the terminal"""
FEED = "RINGTRAIN_FEED"
"""variable of a rank that is fed its samples: a pipe's descriptor, rank, size, numbers of samples and of classes"""
COLLECTIVES = "RINGTRAIN_COLLECTIVES"
"""variable with what ranks talk to each other by: mpi4py, else Horovod"""
ALONE = "nothing"
"""a value of it: training is this rank's alone, the others serve it"""
SERVERS = "RINGTRAIN_SERVERS"
"""variable with the number of ranks that hold weights, where the launcher was told one"""
BOXES = "/dev/shm/ringtrain"
"""how the names of ranks' boxes begin; the job's id and the rank follow"""
BOX_LETTERS = 80
MARK = "ringtrain-report"
PIECE_LETTERS = 600  # launchers cut longer lines in two
MAX_PIECES = 1000
MAX_FAILURE_BYTES = 1 << 20
MAX_PLAN_LETTERS = 100_000  # the kernel takes 131,072 per variable
MAX_ROWS = 16
CONSEQUENCE = re.compile(
    r"Horovod has been shut down|(UnknownError|HorovodInternalError)\b.*Horovod|grpc_status:14\b", re.DOTALL
)
TAG = re.compile(r"\[[^][<>]*\d\]<stderr>:? ?")  # a launcher's, also in the middle of a line that it took in two parts

# A rank's number, in the words of a shell: each launcher has its own name for it.
OWN_RANK = "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${HOROVOD_RANK:-${PMIX_RANK:-$SLURM_PROCID}}}}"
# Runs a rank's command, in the same process, after a line that says where: one write, so that no other rank's line
# comes in between. Each dialect of MPI has its own names for the same three numbers.
STARTER = (
    f"printf '{MARK}:%s:seat:%s:%s:%s:%s:%s\\n' \"${JOB}\""
    f' "{OWN_RANK}"'
    ' "${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${HOROVOD_SIZE:-$SLURM_NTASKS}}}"'
    ' "${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${HOROVOD_LOCAL_RANK:-$SLURM_LOCALID}}}"'
    f' $$ "$(uname -n)" >&2; export {FIRST_PROCESS}=$$; exec "$@"'
)


# ---- where ranks are ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """Where one rank runs."""

    rank: int
    size: int
    """ranks in its world"""
    host: str
    """as the host calls itself"""
    local_rank: int = -1
    """-1: not known"""
    device: str = ""
    """of which no two ranks of a host may have the same; empty: none of its own"""
    process: int = 0
    """its id on its host; 0: not known"""


@dataclass(frozen=True)
class Expected:
    """Where all ranks shall run."""

    size: int
    hosts: tuple[tuple[str, int], ...] = ()
    """name and slots, filled in this order; empty: anywhere"""
    source: str = "ringtrain launch"
    """who said so"""

    def seats(self) -> list[tuple[str, int]]:
        """Host and local rank of each rank; nothing if they may be anywhere."""
        seats = ((name, local_rank) for name, slots in self.hosts for local_rank in range(slots))
        return list(itertools.islice(seats, max(0, self.size)))

    def counts(self, rank: int) -> dict[str, int]:
        """What a rank should find around it; without hosts only how many ranks there are."""
        seats = self.seats()
        if rank >= len(seats):
            return {"ranks": self.size}
        host, local_rank = seats[rank]
        sizes = Counter(name for name, _ in seats)
        return {
            "ranks": self.size,
            "local rank": local_rank,
            "ranks on this host": sizes[host],
            "hosts with such a rank": sum(size > local_rank for size in sizes.values()),
        }

    def to_json(self) -> str:
        """The plan as text; without its hosts where they would be too long for the environment."""
        text = json.dumps(asdict(self))
        return text if len(text) < MAX_PLAN_LETTERS else json.dumps({"size": self.size, "source": self.source})

    @classmethod
    def from_json(cls, text: str) -> Expected:
        """Reads what to_json wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            fields = parse_json(text)
            hosts = tuple((str(name), int(slots)) for name, slots in fields.get("hosts", ()))
            return cls(int(fields["size"]), hosts, str(fields.get("source", cls.source)))
        except INVALID as error:
            raise ValueError(f"{PLAN}={text[:200]!r}: expected what ringtrain launch writes: unset it") from error


def difference(expected: Expected, seats: Iterable[Seat]) -> str:
    """Compares where ranks are with where they shall be.

    Hosts may call themselves otherwise than the plan does, as long as each planned host is one host, and no two of them
    are the same.

    Args:
        expected: the plan.
        seats: of all ranks, or of those that are known yet.

    Returns:
        A table of what differs, with a line that says how to mend it; empty: nothing does.
    """
    planned = expected.seats()
    short = Counter(_short(name) for name, _ in expected.hosts)
    by_name = {_short(name): name for name, _ in expected.hosts if short[_short(name)] == 1}
    found_of: dict[str, str] = {}
    planned_of: dict[str, str] = {}
    taken: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    rows: list[tuple[str, str, str]] = []
    seats = sorted(seats, key=lambda seat: seat.rank)
    for seat in seats:
        if seat.size != expected.size or seat.rank >= expected.size or seat.rank in seen:
            rows.append((str(seat.rank), f"one of {expected.size}", f"{_ranks(seat.size)}, on {seat.host}"))
            continue
        seen.add(seat.rank)
        if seat.rank < len(planned):
            name, local_rank = planned[seat.rank]
            named = by_name.get(_short(seat.host), name)
            same = found_of.setdefault(name, seat.host) == seat.host
            own = planned_of.setdefault(seat.host, name) == name
            if not (same and own and named == name) or seat.local_rank not in (-1, local_rank):
                local = f", local rank {seat.local_rank}" if seat.local_rank >= 0 else ""
                rows.append((str(seat.rank), f"{name}, local rank {local_rank}", f"{seat.host}{local}"))
        first = taken.setdefault((seat.host, seat.device), seat.rank)
        if seat.device and first != seat.rank:
            rows.append((str(seat.rank), "a GPU of its own", f"{seat.device}, which rank {first} has"))
    if not rows:
        return ""
    lines = table(("rank", "planned", "found"), rows)
    return f"ranks are not where {expected.source} has them\n{lines}\n{_advice(expected, seats)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, as plain text; of many rows the first."""
    shown = [head, *rows[:MAX_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    lines = [
        "  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    if len(rows) > MAX_ROWS:
        lines.append(f"  ... and {len(rows) - MAX_ROWS} more")
    return "\n".join(lines)


def _advice(expected: Expected, seats: Sequence[Seat]) -> str:
    if expected.size > 1 and all(seat.size == 1 for seat in seats):
        return "each process is alone: use the mpirun of the MPI that Horovod (or mpi4py) was built with"
    if len(expected.hosts) > 1 and len({seat.host for seat in seats}) == 1:
        return f"all run on {seats[0].host}: the launcher did not get the hosts, or their names mean one machine"
    if any(seat.device for seat in seats):
        return "give each rank of a host a GPU of its own (hvd.local_rank()), or let them share: --device.share-gpus"
    return "look for settings of the launcher's own (a hostfile, OMPI_MCA_* or PRTE_MCA_*) that win over the plan"


def _short(host: str) -> str:
    numeric = host.replace(".", "").isdigit() or ":" in host
    return host if numeric else host.partition(".")[0].lower()


def _ranks(size: int) -> str:
    return f"one of {size}" if size > 1 else "alone in its world"


# ---- why a rank ended ---------------------------------------------------------------------------------------------

_failures: list[BaseException] = []


@dataclass(frozen=True)
class Failure:
    """Why one rank ended."""

    rank: int
    host: str
    time_s: float
    """since 1970, by its host's clock"""
    kind: str
    """of the exception"""
    text: str
    """one line, or the traceback"""
    exit_code: int = 1

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank has ended before."""
        return bool(CONSEQUENCE.search(self.text))

    def lines_for_a_person(self) -> list[str]:
        """The lines in which the rank itself says it, without indentation; a traceback's are others."""
        said = f"ringtrain: {self.text.removeprefix(f'{self.kind}: ')}"
        return [line.strip() for line in said.splitlines()]

    def lines(self, job: str) -> list[str]:
        """The failure as short lines for standard error."""
        text = base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode(), 9)).decode()
        pieces = [text[start : start + PIECE_LETTERS] for start in range(0, len(text), PIECE_LETTERS)]
        return [
            f"{MARK}:{job}:failure:{self.rank}:{number}/{len(pieces)}:{piece}"
            for number, piece in enumerate(pieces, start=1)
        ]


def report_failure(error: BaseException, rank: int, exit_code: int, with_traceback: bool, host: str = "") -> None:
    """Tells the launcher why a rank ends; does nothing without a launcher that listens.

    Args:
        error: what ended it.
        rank: its number; this process', unless it speaks for one that cannot.
        exit_code: that it will end with.
        with_traceback: for a bug; without it the message says everything.
        host: of the rank; empty: this one.
    """
    _failures.append(error)
    job = os.environ.get(JOB)
    if not job:
        return
    text = "".join(traceback.format_exception(error)) if with_traceback else f"{type(error).__name__}: {error}"
    text = text if len(text) < 20_000 else f"{text[:10_000]}\n...\n{text[-10_000:]}"
    failure = Failure(rank, host or socket.gethostname(), time.time(), type(error).__name__, text.rstrip(), exit_code)
    sys.stderr.flush()
    for _ in range(2):  # twice: in the output of many ranks a line may get torn
        for line in failure.lines(job):
            os.write(2, f"{line}\n".encode())
            time.sleep(0.002)  # so that the launcher reads line by line


def ended_well() -> bool:
    """Whether this process has met nothing so far that ends it: no failure was reported, no exception left uncaught."""
    return not _failures and getattr(sys, "last_value", None) is None


def report_uncaught(rank: Callable[[], int], environ: Mapping[str, str] = os.environ) -> None:
    """From now on an exception that nobody catches is also told to the launcher, if one listens."""
    if JOB not in environ or getattr(sys.excepthook, "is_ringtrains", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            report_failure(error.with_traceback(trace), rank(), 1, with_traceback=True)

    hook.is_ringtrains = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report_process(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tells the launcher which process trains, where the rank's command is a script or program that has started it.

    In a namespace of its own a process has another number than the launcher's host has for it, and tells nothing.

    Args:
        environ: names the job and the process of the command; what this process starts is not told the latter.
    """
    first = environ.pop(FIRST_PROCESS, "")
    if environ.get(JOB) and first in _ancestors():
        sys.stderr.flush()
        for _ in range(2):  # as failures
            os.write(2, f"{MARK}:{environ[JOB]}:process:{first}:{os.getpid()}:{socket.gethostname()}\n".encode())
            time.sleep(0.002)


def _ancestors() -> Iterator[str]:
    """The processes that have started this one, from the nearest on, as /proc has them."""
    process = str(os.getppid())
    with contextlib.suppress(OSError):
        while process != "0":
            yield process
            status = Path("/proc", process, "status").read_text(errors="replace")
            process = status.partition("\nPPid:")[2].split()[0]


# ---- where a rank stands ------------------------------------------------------------------------------------------


class Box:
    """Says which step a rank is at, in a line that is there also when the process has been killed.

    In memory that the host keeps after the process' end: the launcher's keeper reads it, and removes it. Without a
    launcher that listens, it is nowhere; nor where something else has its name. Training never fails for it.

    Args:
        rank: of this process.
        environ: says for which job.
    """

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            if environ.get(JOB):
                name = f"{BOXES}-{environ[JOB]}-{rank}"
                # Not to block: a FIFO without a reader would.
                descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
                    self._descriptor = descriptor
                else:
                    os.close(descriptor)

    def put(self, global_step: int, phase: str) -> None:
        """Says where this rank stands now.

        Args:
            global_step: steps done.
            phase: a word.
        """
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):  # /dev/shm is full, as with the 64 MB that Docker gives it
            os.pwrite(self._descriptor, f"{global_step} {phase}".ljust(BOX_LETTERS - 1).encode() + b"\n", 0)


def report_recovery(environ: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher that the ranks go on, so that what was reported before is no reason for their end any more.

    Args:
        environ: says for which job.
    """
    if environ.get(JOB):
        sys.stderr.flush()
        os.write(2, f"{MARK}:{environ[JOB]}:recovery:\n".encode())


def report_run(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher what the run is called, so that it can be given to the next start; by rank 0.

    Args:
        name: of the run.
        environ: says for which job.
    """
    if environ.get(JOB):
        text = base64.b64encode(name.encode()).decode()
        sys.stderr.flush()
        for _ in range(2):  # as failures
            os.write(2, f"{MARK}:{environ[JOB]}:run:{text}:\n".encode())
            time.sleep(0.002)


# ---- what an earlier start left -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How often a job has been started, and what came of it."""

    number: int = 0
    """starts before this one"""
    causes: tuple[str, ...] = ()
    """why each of them ended, a line each"""
    run_name: str = ""
    """that the first start gave its run; empty: none was known yet"""
    num_ranks: int = 0
    """of the first start; 0: as many as now"""

    def to_json(self) -> str:
        """The attempt as text for the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Attempt:
        """What the launcher says; without one, or by another program's word: a first start."""
        try:
            fields = parse_json(environ.get(ATTEMPT, "{}"))
            causes = tuple(str(cause) for cause in fields.get("causes", ()))
            number, num_ranks = int(fields.get("number", 0)), int(fields.get("num_ranks", 0))
            return cls(number=number, causes=causes, run_name=str(fields.get("run_name", "")), num_ranks=num_ranks)
        except INVALID:
            return cls()


# ---- what the launcher reads --------------------------------------------------------------------------------------


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
        seats: by rank and process.
        failures: by rank; the first of each.
        run_name: of the run, empty until rank 0 has said it.
        boxes: step and phase of ranks that have ended, where their launcher says so.
        processes: the process that trains, by host and first process of a rank, where these are two processes.
    """

    def __init__(self, job: str) -> None:
        self.seats: list[Seat] = []
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
                self.seats.append(Seat(int(rank), int(size), host, int(local_rank or -1), process=int(process)))
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
