"""Exit cause of a job, as reported by the rank that exited first."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from ringtrain.protocol.failures import Failure
from ringtrain.protocol.reader import TAG, Reader

# Launchers' tags of a rank's output: Open MPI 4 "[1,3]<stderr>:", 5 "[prterun-host1-99@1,3]<stderr>: ", Hydra "[3] ",
# horovodrun over Gloo "[3]<stderr>:", srun "3: ".
TAGGED = re.compile(r"(?:\[(?:[^][<>]*,)?(\d{1,9})\](?:<std(?:err|out)>:? ?| )|(\d{1,9}): )(.*)")
# Launchers' messages about the rank that exited first.
KILLED = re.compile(r"process rank (\d{1,9}) with PID \d+ on node (\S+) exited on\s+signal (\d{1,9})")
EXITED = re.compile(r"Process name: (?:\[.*,)?(\d{1,9})\]?\s+Exit code: +(-?\d{1,9})")
IMPROPERLY = re.compile(r"process rank (\d{1,9}) with PID \d+ on\s+node (\S+) exiting improperly")
EXITED_ELASTIC = re.compile(r"Process name: (\S+)\[\d+\]\s+Exit code: +(\d{1,9})")
# Hydra names processes, not ranks; MPICH prints a signal as an exit code, and as a signal only further below.
HYDRA = re.compile(
    r"PID (\d{1,9}) RUNNING AT (\S+)\n=\s+(?:EXIT CODE|KILLED BY SIGNAL): (\d{1,9})"
    r"(?:.*?EXIT STRING: [^\n]*\(signal (\d{1,9})\))?",
    re.DOTALL,
)
LOST = re.compile(r"Remote daemon: .* on node (\S+)")
TAIL_LINES = 20
HOST_LOST = "a lost host"
MAX_SPEAKERS = 8


@dataclass(frozen=True)
class JobResult:
    exit_code: int
    """of the rank that failed first, 128 + a signal's number, or 0"""
    text: str = ""
    kind: str = ""
    """HOST_LOST, class name of the first exception, or "" """
    _: KW_ONLY
    rank: int = -1
    """first to fail; -1: not known"""
    hosts: tuple[str, ...] = ()
    """hosts of the failure, as the job names them"""
    global_step: int = -1
    """of that rank, else the furthest of any; -1: not known"""
    phase: str = ""
    """of that rank"""
    run_name: str = ""
    stopped: bool = False
    """by a signal to the launcher"""
    not_cleaned_up: tuple[str, ...] = ()
    """hosts that did not confirm the clean-up: processes may run there until the agent's lease expires"""
    out_of_memory: bool = False
    """the kernel of that host killed processes for lack of memory meanwhile"""
    last: str = ""
    """the text as it is printed last, without a traceback's frames in libraries; "": the text itself"""

    @property
    def where(self) -> tuple[int, int, str]:
        """Key that is equal if a job fails twice in the same place."""
        return self.rank, self.global_step, self.text.splitlines()[-1] if self.text else ""

    @property
    def where_in_words(self) -> str:
        """For messages, e.g. "step 20, save"."""
        step = "before its first step"
        if self.global_step >= 0:
            step = f"step {self.global_step}"
        return ", ".join(filter(None, [step, self.phase]))

    @property
    def in_a_line(self) -> str:
        """Exit cause without a traceback."""
        first, *rest = self.text.splitlines() or [f"exit code {self.exit_code}"]
        text = f"{first} {rest[-1].strip()}" if rest and first.endswith(":") else first
        if self.rank >= 0 or self.global_step >= 0:
            return f"{text} ({self.where_in_words})"
        return text


def rank_of(line: str) -> tuple[int, str] | None:
    """Rank that wrote a line, and the line without the launcher's tags; None: the launcher itself."""
    match = TAGGED.match(line)
    return (int(match[1] or match[2]), TAG.sub("", match[3])) if match else None


def decide(
    returncode: int,
    reports: Reader,
    launcher_output: str,
    tails: Mapping[int, Sequence[str]],  # last lines of each rank
    launcher: str,
    silent: Sequence[str] = (),  # hosts that did not answer at the end
) -> JobResult:
    """Exit code and cause of the rank that exited first: its exception, else its signal or exit code and last lines."""
    code = returncode if returncode >= 0 else 128 - returncode
    lost = LOST.search(launcher_output)
    # Open MPI 5 exits with 0 after it has lost a host, also if that host answers again.
    if code == 0 and not silent and not lost:
        return JobResult(0)
    failure = reports.first_failure()
    if failure and not failure.is_consequence:
        last = _in_its_words(failure, failure.last)
        return JobResult(failure.exit_code, _in_its_words(failure), failure.kind, rank=failure.rank, last=last)
    by_launcher = _cut_off(reports) or _named_by_launcher(launcher_output, code, reports, tails, failure)
    if by_launcher:
        return by_launcher
    if silent:
        lost_hosts = ", ".join(silent)
        return JobResult(2, f"lost {lost_hosts} while the job ran: its host or network failed")
    left = [rank for rank in reports.left if rank not in reports.failures]
    if failure and left:
        return _left(left[0], "", code, reports, tails)
    if failure:
        # The launcher's own code is that of the rank that exited first.
        advice = (
            "this is a follow-up error: another rank exited before without a report: it called exit, was killed, or its"
            " host was lost: check its output and the host's kernel log"
        )
        return JobResult(
            code or failure.exit_code,
            f"{_in_its_words(failure)}\n{advice}",
            last=f"{_in_its_words(failure, failure.last)}\n{advice}",
        )
    if lost:
        return JobResult(
            code or 2, f"{launcher} lost its daemon on {lost[1]}: the host or its network failed, or it was killed"
        )
    if returncode < 0:
        return JobResult(code, f"{launcher} was killed by {signal_name(-returncode)}")
    return _unnamed(code, reports, launcher_output, tails, launcher)


def _unnamed(
    code: int, reports: Reader, launcher_output: str, tails: Mapping[int, Sequence[str]], launcher: str
) -> JobResult:
    """Result of a job of which neither a rank nor its launcher names the rank that exited first."""
    # Open MPI 4 sometimes does not name the rank if it was on another host.
    host_of = {rank.rank: rank.host for rank in reports.ranks}
    last = []
    for rank, tail in tails.items():
        if tail and rank in host_of:
            last.append(f"  rank {rank} on {host_of[rank]}: {tail[-1]}")
    if last:
        lines = "\n".join(last[-MAX_SPEAKERS:])
        return JobResult(code, f"a rank exited with code {code}, {launcher} does not name it; last errors:\n{lines}")
    if any(line.startswith("ringtrain: ") for line in launcher_output.splitlines()):  # printed by ringtrain itself
        return JobResult(code)
    how = f"{launcher} exited with code {code}"
    if code - 128 in signal.valid_signals():
        how += f": a rank was killed by {signal_name(code - 128)}, or exited with its code; {launcher} does not name it"
    return JobResult(code, how)


def without_init(num_ranks: int, reports: Reader) -> str:
    """Message about a job that ended well and none of whose ranks called hvd.init(), which they have; else ""."""
    if num_ranks < 2 or reports.initialized or not reports.not_initialized:
        return ""
    return (
        f"{num_ranks} ranks ran without meeting: they import ringtrain.hvd, and none called hvd.init(). Unless they"
        f" connect by other means, each trained a model of its own: call ringtrain.hvd.init() first, or start one"
        f" process"
    )


def _named_by_launcher(
    text: str, code: int, reports: Reader, tails: Mapping[int, Sequence[str]], consequence: Failure | None
) -> JobResult | None:
    """Cause by the launcher's message about the rank that exited first; None without one."""
    hosts = {rank.rank: rank.host for rank in reports.ranks}
    match = HYDRA.search(text)
    if match:
        return _by_hydra(match, code, reports, consequence)
    killed = KILLED.search(text)
    if killed:
        rank, number = int(killed[1]), int(killed[3])
        where = hosts.get(rank, killed[2])
        text = f"rank {rank} on {where} was killed by {signal_name(number)}"
        return JobResult(_code(128 + number), text, rank=rank)
    exited = EXITED.search(text)
    if exited and int(exited[1]) not in reports.failures:
        rank, rank_code = int(exited[1]), int(exited[2])
        if rank_code < 0:
            rank_code = 128 - rank_code
        where = f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"
        return JobResult(_code(rank_code), f"{where} {_how(rank_code)}{_last_lines(rank, tails)}", rank=rank)
    improperly = IMPROPERLY.search(text)
    if improperly:
        return _left(int(improperly[1]), improperly[2], code, reports, tails)
    match = EXITED_ELASTIC.search(text)
    if match:
        output = f"; its output:\n{consequence.last or consequence.text}" if consequence else ""
        return JobResult(_code(int(match[2])), f"of the last ranks, one on {match[1]} {_how(int(match[2]))}{output}")
    return None


def _cut_off(reports: Reader) -> JobResult | None:
    """Result of a job of which an ssh was killed; None if none was."""
    for rank, number in reports.cut.items():
        where = next((f" on {placement.host}" for placement in reports.ranks if placement.rank == rank), "")
        text = f"the ssh from this host to rank {rank}{where} was killed by {signal_name(number)}, not the rank itself"
        return JobResult(_code(128 + number), text, rank=rank)
    return None


def _left(rank: int, host: str, code: int, reports: Reader, tails: Mapping[int, Sequence[str]]) -> JobResult:
    """Result of a job of which a rank has exited as if all were well, while the others waited for it."""
    host = next((placement.host for placement in reports.ranks if placement.rank == rank), host)
    text = (
        f"rank {rank} on {host} exited first, by itself and without an error, while the others waited for it: all ranks"
        f" need the same number of steps{_last_lines(rank, tails)}"
    )
    return JobResult(_code(code), text, rank=rank)


def _last_lines(rank: int, tails: Mapping[int, Sequence[str]]) -> str:
    """Last lines of a rank's output, to follow a sentence."""
    tail = "\n".join(f"  {line}" for line in tails.get(rank, ()))
    return f"; its last lines:\n{tail}".rstrip() if tail else ""


def _code(number: int) -> int:
    """Exit code of a failure; 1 for a number that is none, as a rank may have printed it."""
    return number if 0 < number < 256 else 1


def _how(exit_code: int) -> str:
    """Description of an exit code; a shell reports a signal as 128 + its number."""
    if exit_code - 128 in signal.valid_signals():
        return f"was killed by {signal_name(exit_code - 128)}, or exited with its code"
    return f"exited first, with exit code {exit_code}"


def _by_hydra(match: re.Match[str], code: int, reports: Reader, consequence: Failure | None) -> JobResult:
    process, host, number = int(match[1]), match[2], int(match[3])
    placement = next((rank for rank in reports.ranks if rank.process == process), None)
    who, rank = f"process {process} on {host}", -1
    if placement:
        who, rank = f"rank {placement.rank} on {placement.host}", placement.rank
    if "KILLED BY SIGNAL" in match[0] or match[4]:
        number = int(match[4] or number)
        return JobResult(_code(128 + number), f"{who} was killed by {signal_name(number)}", rank=rank)
    output = f"; its output:\n{consequence.last or consequence.text}" if consequence else ""
    return JobResult(_code(number or code), f"{who} exited first, with exit code {number}{output}", rank=rank)


def signal_name(number: int) -> str:
    """Name and number, e.g. "SIGKILL (signal 9)"."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def _in_its_words(failure: Failure, words: str = "") -> str:
    words = words or failure.text
    between = "\n" if "\n" in words else " "
    return f"rank {failure.rank} on {failure.host} failed first:{between}{words}"
