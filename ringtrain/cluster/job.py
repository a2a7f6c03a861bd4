"""Jobs and plans as plain values: what to run where, and the command that runs it."""

from __future__ import annotations

import ipaddress
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from ringtrain.cluster.hosts import Host
from ringtrain.errors import LaunchError
from ringtrain.protocol.placement import PlannedPlacement

NUM_HOSTS_LARGE = 64
"""number of hosts from which on a launcher starts them differently"""
FRESH, FRESH_NAME = "/tmp/ringtrain.XXXXXXXXXX", "ringtrain_folder"
"""as Job.files_folder: directory made by a pasted line, and its variable; a predictable name could be taken already"""
FRESH_ID = "$(cat /proc/sys/kernel/random/uuid)"
"""as Job.id: new at each start of a pasted line"""
MAX_WORD_LETTERS = 32_000
"""of one argument of a generated command line, in characters; the kernel's limit is 131,072"""


@dataclass(frozen=True)
class Job:
    command: tuple[str, ...]
    """program and arguments of every rank"""
    num_ranks: int
    hosts: tuple[Host, ...]
    """with exactly as many slots as ranks: see hosts.take; empty: the launcher gets them from the scheduler"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """of the launching process; environment.forwarded selects the variables that reach ranks"""
    forward: tuple[str, ...] = ()
    """names of variables forwarded besides the usual ones"""
    working_directory: str = ""
    """of the ranks; "": the launcher's"""
    bind: Literal["none", "core"] = "none"
    """none: ranks may use all cores of their host; core: each has cores of its own, one per thread"""
    network: Literal["tcp", "ucx"] = "tcp"
    """TCP, or InfiniBand and RoCE through UCX"""
    subnet: str = ""
    """CIDR of the ranks' network, e.g. 10.1.0.0/16; "": any"""
    own_interfaces: tuple[str, str] = ("", "")
    """parameter by which the user has chosen Open MPI's interfaces, and where it is set; see openmpi.own_interfaces"""
    local_networks: tuple[str, ...] = ()
    """CIDRs of networks that connect no hosts, as host agents find them"""
    ssh_port: int = 0
    """0: ssh's own configuration"""
    threads_per_rank: int = 0
    """CPU threads; 0: the ranks decide"""
    oversubscribe: bool = False
    output: str = ""
    """directory of the logs per rank; "": none"""
    num_servers: int = 0
    """ranks that are parameter servers; 0: as the ranks' command says"""
    yield_when_idle: bool = False
    """MPI yields the processor while it waits: for hosts whose ranks fill their cores"""
    wheel_mpi: str = ""
    """directory of Open MPI from PyPI's wheel, if its mpirun is the first one; "": another MPI"""
    here: frozenset[str] = frozenset()
    """names of hosts that mean the launching machine"""
    grace_s: float = 0.0
    """seconds after SIGTERM for ranks to save, while others have ended; 0: the launcher's own"""
    allow_root: bool = False
    """the launching user is root, which Open MPI refuses without a flag"""
    files_folder: str = "/tmp"
    """directory of a launcher's files (hosts, scripts) if `output` is "" """
    id: str = ""
    """by which its processes are known on every host; "": the job is not supervised"""
    attempt: str = "{}"
    """see protocol.attempt, as JSON"""

    @property
    def planned(self) -> PlannedPlacement:
        return PlannedPlacement(self.num_ranks, tuple((host.name, host.slots) for host in self.hosts))

    @property
    def several_hosts(self) -> bool:
        """Whether ranks run, or may run, on more than one host."""
        return len(self.hosts) != 1

    @property
    def cores_per_rank(self) -> int:
        return self.threads_per_rank or 1


# Reasons that plans of several launchers give.
NUM_RANKS = "ranks in all"
ALL_CORES = "ranks use many threads: bound to a core, all of them would share it"
YIELDS = "ranks fill the cores: waiting ranks yield theirs (1.3 to 1.5 times the speed)"
UCX = "InfiniBand or RoCE, through UCX (--network ucx)"
TAGGED = "tags each line with its rank"
FOLDER = "working directory of the ranks, on every host"
BY_NAME = "variables that ranks on other hosts get, by name: no value is on the command line"
LOGGED = "each rank copies its output to DIR/rank.N/stdout and stderr"


@dataclass(frozen=True)
class Flag:
    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """Command, environment and files of one launcher."""

    flags: tuple[Flag, ...]
    """the launcher's arguments in order, without the ranks' command"""
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """added to the launcher's own environment"""
    env_reasons: Mapping[str, str] = field(default_factory=dict)
    """by name; for a name that is not in env: why it is left unchanged"""
    files: Mapping[str, str] = field(default_factory=dict)
    """path and text of files to write before the start"""

    @property
    def argv(self) -> tuple[str, ...]:
        return (*(word for flag in self.flags for word in flag.words), *self.command)

    def shell(self) -> str:
        """Command as a line that can be pasted into a shell; it writes its files first."""
        folders = dict.fromkeys(str(PurePath(path).parent) for path in self.files)
        writes = []
        for folder in folders:
            if folder == FRESH:
                writes.append(f"{FRESH_NAME}=$(mktemp -d {FRESH}) &&")
            else:
                writes.append(f"mkdir -p -- {shlex.quote(folder)} &&")
        for path, text in self.files.items():
            lines = shlex.join(text.removesuffix("\n").split("\n"))
            writes.append(f"printf '%s\\n' {lines} >{_in_shell(path)} &&")
        settings = [f"{name}={_value(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*writes, *settings, *map(_in_shell, self.argv)])


def _in_shell(word: str) -> str:
    """Argument, quoted for a shell; FRESH in it becomes its variable."""
    parts = [shlex.quote(part) if part else "" for part in word.split(FRESH)]
    return f'"${FRESH_NAME}"'.join(parts) or "''"


def _value(text: str) -> str:
    """Value of a variable, quoted for a shell."""
    return f'"{text}"' if text == FRESH_ID else _in_shell(text)


def explain(plan: Plan) -> list[tuple[str, str]]:
    """Rows of arguments and reason for each part of a plan: files, environment, flags, the ranks' command."""
    rows = []
    for path, text in plan.files.items():
        num_lines = text.count("\n")
        rows.append((f"file {path}", f"{num_lines} lines, written before the start"))
    for name, reason in plan.env_reasons.items():
        if name in plan.env:
            setting = f"{name}={_value(plan.env[name])}"
        else:
            setting = f"{name} unchanged"
        rows.append((setting, reason))
    rows += [(shlex.join(flag.words), flag.reason) for flag in plan.flags]
    if plan.command:
        rows.append((shlex.join(plan.command), "command of every rank"))
    return rows


def check(job: Job) -> None:
    """Raises LaunchError for a job that no launcher can run, or that one would misread."""
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
    for text in texts:
        if not text.isascii() and text.encode(errors="replace").decode() != text:
            raise LaunchError(f"got {text!r} in the command or a path, expected UTF-8: rename it, or use a script")
    if job.threads_per_rank < 0:
        raise LaunchError(
            f"got {job.threads_per_rank} threads per rank, expected 1 or more, or 0 for the ranks to decide"
        )
    if not 0 <= job.ssh_port < 65536:
        raise LaunchError(f"got --ssh-port {job.ssh_port}, expected 1 to 65535, or 0 for what ssh has configured")
    check_subnet(job.subnet)


def check_subnet(subnet: str) -> None:
    try:
        ipaddress.ip_network(subnet or "::/0", strict=False)
    except ValueError as error:
        raise LaunchError(f"got --subnet {subnet!r}, expected a network such as 10.1.0.0/16") from error


def check_names(hosts: Iterable[Host], launcher: str, pattern: str = r"[A-Za-z0-9_][A-Za-z0-9._-]*") -> None:
    """Raises LaunchError for the first host whose name the launcher does not accept."""
    allowed = re.compile(pattern)
    for host in hosts:
        if not allowed.fullmatch(host.name):
            raise LaunchError(
                f"{host.name}: {launcher} takes names of letters, digits, '.' and '-' only: give the host such a name"
                f" in ~/.ssh/config or /etc/hosts"
            )


def add_file(files: dict[str, str], job: Job, kind: str, text: str) -> str:
    """Adds a launcher's file of a kind such as "hosts.txt"; its path is distinct for each job: each deletes its own."""
    folder = PurePath(job.output or job.files_folder)
    stem, _, suffix = kind.partition(".")
    owner = job.environment.get("USER", "")
    number = zlib.crc32(f"{owner} {text}{job.id}".encode(errors="surrogateescape"))
    path = str(folder / f"ringtrain-{stem}-{number:08x}.{suffix}")
    files[path] = text
    return path


def words(*flags: str | int, because: str) -> Flag:
    return Flag(tuple(str(word) for word in flags), because)
