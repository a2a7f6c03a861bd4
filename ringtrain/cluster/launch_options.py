"""Options of `ringtrain launch` and of the commands that start ranks as it does: each stands here once."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ringtrain.config.options import (
    AT_LEAST_0,
    FILE,
    LIST,
    NAME,
    SECONDS,
    Argument,
    Given,
    Group,
    N,
    NotWith,
    Parser,
    add,
    check,
    options_of,
    read,
    title_of,
)
from ringtrain.errors import LaunchError
from ringtrain.protocol import as_main


@dataclass(frozen=True)
class Launcher:
    """Program that starts ranks."""

    program: str = ""
    """which must be on PATH"""
    over_ssh: bool = False
    """host agents supervise its hosts"""
    submits: bool = False
    """the job to a scheduler, which then supervises it"""


LAUNCHERS = {
    "mpirun": Launcher("mpirun", over_ssh=True),
    "horovodrun": Launcher("horovodrun", over_ssh=True),
    "horovodrun-gloo": Launcher("horovodrun", over_ssh=True),
    "srun": Launcher("srun"),
    "sbatch": Launcher(submits=True),
    "mpijob": Launcher(submits=True),
    "trainjob": Launcher(submits=True),
    "spark": Launcher(),
}


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Hosts."""

    hostfile: Annotated[str | None, FILE] = None
    """hosts and slots, in any of the usual formats"""
    hosts: Annotated[str | None, Argument("LIST", ("-H", "--hosts")), NotWith("hostfile")] = None
    """the same in a line: host1:4,host2:4"""
    include: Annotated[str, LIST] = ""
    """use only these hosts or slots, counted from 0: host1,host2:0-1 (all)"""
    exclude: Annotated[str, LIST] = ""
    """use all but these: host1:3"""
    ssh_port: Annotated[int, Argument("PORT")] = 0
    """port of every host's sshd; 0: as ssh itself has it configured"""
    subnet: Annotated[str, Argument("CIDR")] = ""
    """network of the ranks, e.g. 10.1.0.0/16 (any)"""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Ranks."""

    np: Annotated[int | None, Argument("N", ("-np",))] = None
    """number of ranks (all slots)"""
    ps: Annotated[int | None, Argument("P")] = None
    """number of ranks that are parameter servers; the others train"""
    launcher: Annotated[str, Argument("NAME", choices=tuple(LAUNCHERS))] = "mpirun"
    """program that starts the ranks"""
    bind: Literal["none", "core"] = "none"
    """core: --threads cores for each rank"""
    network: Literal["tcp", "ucx"] = "tcp"
    """TCP, or InfiniBand and RoCE"""
    network_interface: Annotated[str, NAME] = ""
    """interface of all hosts, for horovodrun (searched for)"""
    threads: Annotated[int, N] = 0
    """CPU threads of a rank; 0: the rank decides"""
    forward: Annotated[tuple[str, ...], Argument("NAME", is_repeated=True)] = ()
    """forward a variable besides the usual ones; may be repeated"""
    oversubscribe: bool = False
    """allow more ranks than slots"""
    output: Annotated[str, Argument("DIR")] = ""
    """keep a log per rank"""
    tuned: Annotated[str, FILE] = ""
    """best.json of ringtrain sweep, whose values the command trains with"""
    start_timeout: Annotated[float, Argument("S"), SECONDS] = 60
    """seconds for hosts to answer and for ranks to start"""
    grace: Annotated[float, Argument("S"), SECONDS] = 8
    """seconds after SIGTERM for ranks to save before they are killed"""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What is printed instead of a start."""

    dry_run: bool = False
    """print the command, script or manifest and exit"""
    explain: Annotated[bool, NotWith("dry_run")] = False
    """print every flag and variable with its reason and exit"""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Files of the other hosts, by rsync."""

    sync: bool = False
    """send this folder to all other hosts before ranks start, to the same path, without runs/, .git, .venv, __pycache__
    and what a .gitignore names; nothing is deleted there; hosts that join an elastic job later do not get it"""
    sync_environment: bool = False
    """send this folder, and the environment that ringtrain runs in"""


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """With --launcher spark."""

    master: Annotated[str, Argument("URL")] = ""
    """e.g. local[2] (as in spark-defaults.conf)"""
    spark_data: Annotated[str, Argument("MODULE:FUNCTION")] = ""
    """function that returns DataFrames for --data.name spark of ranks"""
    spark_conf: Annotated[tuple[str, ...], Argument("NAME=VALUE", is_repeated=True)] = ()
    """setting of Spark; may be repeated"""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """With --launcher mpijob or trainjob."""

    image: Annotated[str, NAME] = ""
    """image of all containers (ringtrain)"""
    job_name: Annotated[str, NAME] = ""
    """name of the job (ringtrain)"""
    namespace: Annotated[str, NAME] = ""
    """namespace of the job (kubectl's)"""
    gpus: Annotated[int, N] = 0
    """GPUs of each worker"""
    resources: Annotated[str, LIST] = ""
    """limits of each worker, for namespaces with a quota: cpu=8,memory=32Gi (none)"""


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """When the job fails."""

    max_restarts: Annotated[int, N, AT_LEAST_0] = 0
    """restart it up to N times, from its newest checkpoint"""
    min_np: Annotated[int, N] = 1
    """continue with fewer ranks, down to N; -np's number keeps hosts in which two of the last five failures began"""


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """Hosts that join and leave."""

    elastic: bool = False
    """continue with the hosts that are available, over Gloo"""
    max_np: Annotated[int | None, N] = None
    """maximum number of ranks (all slots at the start)"""
    host_discovery: Annotated[str, Argument("PROGRAM")] = ""
    """program that prints the current hosts: host:slots"""
    blacklist_cooldown: Annotated[tuple[int, int], Argument(("S", "MAX"))] = (15, 600)
    """the slot of a failed rank is used again after about twice S seconds, longer each time; 0 0: never"""


PLAIN = (HostOptions, JobOptions, ShowOptions)
"""groups without a title in the help"""
GROUPS = (*PLAIN, SyncOptions, SparkOptions, KubernetesOptions, RestartOptions, ElasticOptions)
IN_KUBERNETES = ("mpijob", "trainjob")
ONLY_WITH = {SparkOptions: ("spark",), KubernetesOptions: IN_KUBERNETES}
"""launchers of a group of options"""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(
    HostOptions,
    JobOptions,
    ShowOptions,
    SyncOptions,
    SparkOptions,
    KubernetesOptions,
    RestartOptions,
    ElasticOptions,
):
    """Options of `ringtrain launch`: the command, its hosts and its ranks."""

    command: tuple[str, ...] = ()
    """of every rank"""
    environ: Mapping[str, str] = field(default_factory=dict)
    """variables for the ranks besides those of the launching environment"""

    @classmethod
    def of(cls, given: Given) -> LaunchOptions:
        """Options of a command line; those that its command does not have are at their defaults."""
        return read(cls, given.values, command=given.command)

    @property
    def started_by(self) -> Launcher:
        return LAUNCHERS[self.launcher]

    def checked(self) -> LaunchOptions:
        """These options. Raises LaunchError for invalid ones."""
        if not self.command:
            raise LaunchError("got no command to run: ringtrain launch [options] python -m ringtrain.train ...")
        if as_main.reads_its_program(self.command):
            raise LaunchError(
                f"got {shlex.join(self.command)}, which reads its program from standard input, which ranks do not have:"
                f" write the program to a file, and give its name"
            )
        check(self)
        if self.bind == "core" and self.threads < 1:
            raise LaunchError("got --bind core without --threads: give --threads N, the number of cores of each rank")
        self._check_launcher()
        if self.ps is not None:
            self._check_servers(self.ps)
        return self

    def _check_launcher(self) -> None:
        for group, launchers in ONLY_WITH.items():
            if self.launcher in launchers:
                continue
            for name in options_of(group):
                if getattr(self, name):
                    expected = " or ".join(launchers)
                    raise LaunchError(
                        f"got {_flag(name)} with --launcher {self.launcher}, expected --launcher {expected}"
                    )
        syncs = next((name for name in ("sync", "sync_environment") if getattr(self, name)), "")
        if syncs and not self.started_by.over_ssh:
            raise LaunchError(
                f"got {_flag(syncs)} with --launcher {self.launcher}, which reaches its hosts without ssh:"
                f" leave it out, and use a folder that they share, or an image"
            )
        if self.max_restarts and self.started_by.submits:
            raise LaunchError(
                f"got --max-restarts with --launcher {self.launcher}, which submits the job and does not supervise it:"
                f" leave it out; Slurm's --requeue and Kubernetes' backoffLimit do the same there"
            )
        if not self.elastic:
            return
        if self.launcher not in ("mpirun", "horovodrun-gloo"):
            raise LaunchError(
                f"got --launcher {self.launcher} with --elastic, which runs horovodrun over Gloo: leave it out"
            )
        if self.ps:
            raise LaunchError("got --ps with --elastic, whose ranks are all alike: leave it out")

    def _check_servers(self, num_servers: int) -> None:
        if self.launcher in ("horovodrun-gloo", "spark"):
            raise LaunchError(f"got --ps with --launcher {self.launcher}, whose ranks have no MPI")
        if num_servers < 1:
            raise LaunchError(f"got --ps {num_servers}, expected 1 or more")
        if self.np is not None and self.np <= num_servers:
            raise LaunchError(f"got --ps {num_servers} with -np {self.np}: no rank is left to be a worker")


def add_options(
    parser: Parser, groups: Iterable[type] = GROUPS, without: Collection[str] = (), plain: Group | None = None
) -> None:
    """Adds the options of groups, except `without`; `plain` takes those of groups without a title, else the parser."""
    for group in groups:
        options = [option for name, option in options_of(group).items() if name not in without]
        if group in PLAIN:
            add(plain or parser, options)
        else:
            add(parser.add_argument_group(title_of(group)), options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
