"""What to run where, and the command that does: plain values, of which everything before run.py is a function."""

from __future__ import annotations

import ipaddress
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from ringtrain.cluster.hosts import Host
from ringtrain.errors import LaunchError
from ringtrain.protocol.env import JOB

NUM_HOSTS_LARGE = 64
"""from here on a launcher starts hosts differently"""
FRESH, FRESH_NAME = "/tmp/ringtrain.XXXXXXXXXX", "ringtrain_folder"
"""as Job.files_folder: a folder that a pasted line makes, and its variable; a name that can be guessed may be taken"""
MAX_WORD_LETTERS = 32_000
"""of one word of a command line that we make; the kernel takes 131,072"""


@dataclass(frozen=True)
class Job:
    """What to run where."""

    command: tuple[str, ...]
    """program and arguments that every rank runs"""
    num_ranks: int
    hosts: tuple[Host, ...]
    """with exactly as many slots used as there are ranks: see hosts.take; empty: the scheduler tells the launcher"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """of the launching process; what of it reaches the ranks is decided by environment.forwarded"""
    forward: tuple[str, ...] = ()
    """names handed on besides the usual ones"""
    working_directory: str = ""
    """folder that ranks start in; empty: where the launcher stands"""
    bind: Literal["none", "core"] = "none"
    """none: ranks may use all cores of their host; core: each has cores of its own, one per thread"""
    network: Literal["tcp", "ucx"] = "tcp"
    """TCP, or InfiniBand and RoCE through UCX"""
    subnet: str = ""
    """CIDR of the network that ranks talk over, e.g. 10.1.0.0/16; empty: any"""
    local_networks: tuple[str, ...] = ()
    """CIDRs of networks that lead from no host to another one, as host agents find them"""
    ssh_port: int = 0
    """0: as ssh itself has it configured"""
    threads_per_rank: int = 0
    """CPU threads; 0: left to the ranks"""
    oversubscribe: bool = False
    """more ranks than slots are allowed"""
    output: str = ""
    """folder that keeps a log per rank; empty: none"""
    num_servers: int = 0
    """ranks that are parameter servers; 0: what the ranks' command says"""
    timeline: str = ""
    """file for the timelines of all ranks; empty: none"""
    yield_when_idle: bool = False
    """MPI gives the processor away while it waits: for hosts whose ranks fill their cores"""
    here: frozenset[str] | None = None
    """names of its hosts that mean the launching machine; None: to be looked up"""
    allow_root: bool = False
    """the launching user is root, which Open MPI refuses to be without being told"""
    files_folder: str = "/tmp"
    """where a launcher's files go (hosts, scripts) if there is no folder for output"""

    @property
    def several_hosts(self) -> bool:
        """Whether ranks are on more hosts than one, or may be."""
        return len(self.hosts) != 1

    @property
    def cores_per_rank(self) -> int:
        """Cores that a bound rank has."""
        return self.threads_per_rank or 1


@dataclass(frozen=True)
class Flag:
    """Some words of a command line, and why they are there."""

    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """A command, as one launcher wants it."""

    flags: tuple[Flag, ...]
    """the launcher's words in their order, without the ranks' command"""
    command: tuple[str, ...]
    """program and arguments that every rank runs"""
    env: Mapping[str, str] = field(default_factory=dict)
    """what the launcher's own environment gets besides what it has"""
    env_reasons: Mapping[str, str] = field(default_factory=dict)
    """why, by name; a name that is not in env: why it is left as it is"""
    files: Mapping[str, str] = field(default_factory=dict)
    """files to be written before it starts: path and text"""

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line."""
        return (*(word for flag in self.flags for word in flag.words), *self.command)

    def shell(self) -> str:
        """The command as a line that can be pasted into a shell; it writes its files first."""
        folders = dict.fromkeys(str(PurePath(path).parent) for path in self.files)
        writes = [
            f"{FRESH_NAME}=$(mktemp -d {FRESH}) &&" if folder == FRESH else f"mkdir -p -- {shlex.quote(folder)} &&"
            for folder in folders
        ]
        for path, text in self.files.items():
            lines = shlex.join(text.removesuffix("\n").split("\n"))
            writes.append(f"printf '%s\\n' {lines} >{_in_shell(path)} &&")
        settings = [f"{name}={_in_shell(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*writes, *settings, *map(_in_shell, self.argv)])


def _in_shell(word: str) -> str:
    """A word, quoted for a shell; the fresh folder stands in it by its variable."""
    return f'"${FRESH_NAME}"'.join(shlex.quote(part) if part else "" for part in word.split(FRESH)) or "''"


def explain(plan: Plan) -> list[tuple[str, str]]:
    """Every part of a plan with its reason.

    Returns:
        Rows of words and reason: files, environment, flags, the ranks' command.
    """
    rows = [
        (f"file {path}", f"{text.count(chr(10))} lines, written before the start") for path, text in plan.files.items()
    ]
    for name, reason in plan.env_reasons.items():
        rows.append((f"{name}={shlex.quote(plan.env[name])}" if name in plan.env else f"{name} as it is", reason))
    rows += [(shlex.join(flag.words), flag.reason) for flag in plan.flags]
    return [*rows, (shlex.join(plan.command), "what every rank runs")] if plan.command else rows


def check(job: Job) -> None:
    """Refuses what no launcher can run, or what it would take for something else.

    Raises:
        LaunchError: says which part of the job it is.
    """
    if not job.command or not job.command[0] or job.command[0].startswith("-"):
        raise LaunchError(f"got the command {shlex.join(job.command)!r}, expected it to begin with a program's name")
    if ":" in job.command:
        raise LaunchError(
            "got ':' as an argument of its own, which mpirun takes for the end of the command: put the command in a"
            " script"
        )
    texts = (*job.command, job.working_directory, job.output, job.files_folder)
    if any("\0" in text for text in texts):
        raise LaunchError("got a zero byte in the command or a path, expected text")
    if job.num_ranks < 1:
        raise LaunchError(f"got -np {job.num_ranks}, expected at least 1")
    num_slots = sum(host.slots for host in job.hosts)
    if job.hosts and num_slots != job.num_ranks:
        raise LaunchError(f"got {job.num_ranks} ranks and hosts with {num_slots} slots in use, expected as many")
    if job.threads_per_rank < 0:
        raise LaunchError(
            f"got {job.threads_per_rank} threads per rank, expected 1 or more, or 0 for the ranks to decide"
        )
    if not 0 <= job.ssh_port < 65536:
        raise LaunchError(f"got --ssh-port {job.ssh_port}, expected 1 to 65535, or 0 for what ssh has configured")
    if job.subnet:
        try:
            ipaddress.ip_network(job.subnet, strict=False)
        except ValueError as error:
            raise LaunchError(f"got --subnet {job.subnet!r}, expected a network such as 10.1.0.0/16") from error


def check_names(hosts: Iterable[Host], launcher: str, pattern: str = r"[A-Za-z0-9][A-Za-z0-9.-]*") -> None:
    """Refuses hosts that a launcher cannot name.

    Raises:
        LaunchError: names the first.
    """
    allowed = re.compile(pattern)
    for host in hosts:
        if not allowed.fullmatch(host.name):
            raise LaunchError(
                f"{host.name}: {launcher} takes names of letters, digits, '.' and '-' only: give the host such a name"
                f" in ~/.ssh/config or /etc/hosts"
            )


def file_path(job: Job, kind: str, text: str) -> str:
    """A path for a file of the launcher: jobs that run have their own, since each takes its files away at its end.

    Args:
        kind: the name's beginning and end, e.g. "hosts.txt".
    """
    folder = PurePath(job.output or job.files_folder)
    stem, _, suffix = kind.partition(".")
    owner = job.environment.get("USER", "")
    number = zlib.crc32(f"{owner} {text}{job.environment.get(JOB, '')}".encode(errors="surrogateescape"))
    return str(folder / f"ringtrain-{stem}-{number:08x}.{suffix}")


def words(*flags: str | int, because: str) -> Flag:
    """A flag of words, with its reason."""
    return Flag(tuple(str(word) for word in flags), because)


def named_hosts(hosts: Sequence[Host]) -> str:
    """Hosts as -H wants them: host1:4,host2:2."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
