"""Options of `ringtrain launch` and of the commands that start ranks as it does: each stands here once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal

from ringtrain.errors import LaunchError


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
    "spark": Launcher(),
}
HOSTS, JOB, SHOW = "hosts", "job", "show"
SPARK, MPIJOB = "with --launcher spark (docs/clusters.md)", "with --launcher mpijob (docs/docker.md)"
SYNC = "files of the other hosts, by rsync (docs/launching.md)"
RESTARTS, ELASTIC = "when the job fails", "hosts that join and leave (docs/elastic.md)"
ONLY_WITH = {SPARK: "spark", MPIJOB: "mpijob"}
"""launcher of a group of options"""
ONE_OF = (("hostfile", "hosts"), ("dry_run", "explain"))
KINDS: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int},
    "int | None": {"type": int},
    "float": {"type": float},
    "tuple[str, ...]": {"action": "append"},
    "tuple[int, int]": {"type": int, "nargs": 2},
}


def option(group: str, default: Any, metavar: Any, text: str, *flags: str, **more: Any) -> Any:
    """Field that is an option. flags: Instead of `--` and the field's name; more: Keywords of add_argument."""
    return field(default=default, metadata={"group": group, "flags": flags, "metavar": metavar, "help": text, **more})


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of `ringtrain launch`: the command, its hosts and its ranks."""

    command: tuple[str, ...] = ()
    """of every rank"""
    environ: Mapping[str, str] = field(default_factory=dict)
    """variables for the ranks besides those of the launching environment"""

    hostfile: str | None = option(HOSTS, None, "FILE", "hosts and slots, in any of the usual formats")
    hosts: str | None = option(HOSTS, None, "LIST", "the same in a line: host1:4,host2:4", "-H", "--hosts")
    include: str = option(HOSTS, "", "LIST", "use only these hosts or slots, counted from 0: host1,host2:0-1 (all)")
    exclude: str = option(HOSTS, "", "LIST", "use all but these: host1:3")
    ssh_port: int = option(HOSTS, 0, "PORT", "port of every host's sshd (as ssh itself has it configured)")
    subnet: str = option(HOSTS, "", "CIDR", "network of the ranks, e.g. 10.1.0.0/16 (any)")

    np: int | None = option(JOB, None, "N", "number of ranks (all slots)", "-np")
    ps: int | None = option(JOB, None, "P", "number of ranks that are parameter servers (docs/strategies.md)")
    workers: int | None = option(JOB, None, "W", "number of ranks that train besides them; -np is the sum of both")
    launcher: str = option(JOB, "mpirun", None, "program that starts the ranks (mpirun)", choices=tuple(LAUNCHERS))
    bind: Literal["none", "core"] = option(
        JOB, "none", None, "core: --threads cores for each rank (none)", choices=("none", "core")
    )
    network: Literal["tcp", "ucx"] = option(
        JOB, "tcp", None, "TCP, or InfiniBand and RoCE (tcp)", choices=("tcp", "ucx")
    )
    network_interface: str = option(JOB, "", "NAME", "interface of all hosts, for horovodrun (searched for)")
    threads: int = option(JOB, 0, "N", "CPU threads of a rank (the rank decides)")
    forward: tuple[str, ...] = option(JOB, (), "NAME", "forward a variable besides the usual ones; may be repeated")
    oversubscribe: bool = option(JOB, False, None, "allow more ranks than slots")
    require_init: bool = option(JOB, False, None, "exit with 2 if no rank has called hvd.init() (a warning)")
    output: str = option(JOB, "", "DIR", "keep a log per rank")
    timeline: str = option(JOB, "", "FILE", "write timelines of all ranks of ringtrain.train, for Perfetto")
    start_timeout: float = option(JOB, 60, "S", "seconds for hosts to answer and for ranks to start (60)")
    grace: float = option(JOB, 8, "S", "seconds after SIGTERM for ranks to save before they are killed (8)")

    sync: bool = option(
        *(SYNC, False, None),
        "send this folder to all other hosts before ranks start, to the same path, without runs/, .git, .venv,"
        " __pycache__ and what a .gitignore names; nothing is deleted there; hosts that join an elastic job later do"
        " not get it",
    )
    sync_environment: bool = option(SYNC, False, None, "send this folder, and the environment that ringtrain runs in")
    sync_delete: bool = option(
        SYNC, False, None, "delete in these folders of the other hosts what is not here, except what is not sent"
    )

    master: str = option(SPARK, "", "URL", "e.g. local[2] (as in spark-defaults.conf)")
    spark_data: str = option(
        SPARK, "", "MODULE:FUNCTION", "function that returns DataFrames for --data.name spark of ranks"
    )
    spark_conf: tuple[str, ...] = option(SPARK, (), "NAME=VALUE", "setting of Spark; may be repeated")

    image: str = option(MPIJOB, "", "NAME", "image of all containers (ringtrain)")
    job_name: str = option(MPIJOB, "", "NAME", "name of the MPIJob (ringtrain)")
    namespace: str = option(MPIJOB, "", "NAME", "namespace of the MPIJob (kubectl's)")
    gpus: int = option(MPIJOB, 0, "N", "GPUs of each worker (0)")
    resources: str = option(
        MPIJOB, "", "LIST", "limits of each worker, for namespaces with a quota: cpu=8,memory=32Gi (none)"
    )

    max_restarts: int = option(RESTARTS, 0, "N", "restart it up to N times, from its newest checkpoint (0)")
    restart_on: str = option(RESTARTS, "", "REGEX", "restart on any failure whose message matches")
    give_up_on: str = option(RESTARTS, "", "REGEX", "never restart on a match")
    keep_hosts: bool = option(RESTARTS, False, None, "never exclude a host that has failed twice")
    min_np: int = option(RESTARTS, 1, "N", "continue with fewer ranks, down to N (1)")

    elastic: bool = option(ELASTIC, False, None, "continue with the hosts that are available, over Gloo")
    max_np: int | None = option(ELASTIC, None, "N", "maximum number of ranks (all slots at the start)")
    host_discovery: str = option(ELASTIC, "", "PROGRAM", "program that prints the current hosts: host:slots")
    blacklist_cooldown: tuple[int, int] = option(
        *(ELASTIC, (15, 600), ("S", "MAX")),
        "the slot of a failed rank is used again after about twice S seconds, longer each time (15 600); 0 0: never",
    )

    dry_run: bool = option(SHOW, False, None, "print the command, script or manifest and exit")
    explain: bool = option(SHOW, False, None, "print every flag and variable with its reason and exit")

    @classmethod
    def of(cls, given: argparse.Namespace) -> LaunchOptions:
        """Options of a parsed command line; those that its command does not have are at their defaults."""
        names = {one.name for one in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in vars(given).items() if name in names}
        return cls(**values | {name: tuple(value) for name, value in values.items() if isinstance(value, list)})

    @property
    def started_by(self) -> Launcher:
        return LAUNCHERS[self.launcher]

    def checked(self) -> LaunchOptions:
        """These options, with -np set if some ranks are parameter servers. Raises LaunchError for invalid ones."""
        if not self.command:
            raise LaunchError("got no command to run: ringtrain launch [options] python -m ringtrain.train ...")
        for name in ("start_timeout", "grace"):
            if not 0 < getattr(self, name) < math.inf:
                raise LaunchError(f"got {_flag(name)} {getattr(self, name):g}, expected a number of seconds above 0")
        for name in ("restart_on", "give_up_on"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                got = f"{_flag(name)} {getattr(self, name)!r}"
                raise LaunchError(f"got {got}, expected a regular expression: {error}") from None
        if self.bind == "core" and self.threads < 1:
            raise LaunchError("got --bind core without --threads: give --threads N, the number of cores of each rank")
        self._check_launcher()
        return self if self.ps is None and self.workers is None else self._with_roles()

    def _check_launcher(self) -> None:
        for one in fields(self):
            launcher = ONLY_WITH.get(one.metadata.get("group", ""), self.launcher)
            if launcher != self.launcher and getattr(self, one.name):
                raise LaunchError(
                    f"got {_flag(one.name)} with --launcher {self.launcher}, expected --launcher {launcher}"
                )
        if self.max_restarts < 0:
            raise LaunchError(f"got --max-restarts {self.max_restarts}, expected 0 or more")
        if self.require_init and self.started_by.submits:
            raise LaunchError(f"got --require-init with --launcher {self.launcher}, which only submits: leave it out")
        syncs = next((name for name in ("sync", "sync_environment", "sync_delete") if getattr(self, name)), "")
        if syncs and not self.started_by.over_ssh:
            raise LaunchError(
                f"got {_flag(syncs)} with --launcher {self.launcher}, which reaches its hosts without ssh:"
                f" leave it out, and use a folder that they share, or an image"
            )
        if syncs == "sync_delete":
            raise LaunchError("got --sync-delete, expected --sync or --sync-environment with it")
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
        if self.timeline:
            raise LaunchError("got --timeline with --elastic, whose ranks join and leave: leave it out")
        if self.ps or self.workers:
            raise LaunchError("got --ps or --workers with --elastic, whose ranks are all alike: leave them out")

    def _with_roles(self) -> LaunchOptions:
        if self.launcher in ("horovodrun-gloo", "spark"):
            raise LaunchError(f"got --ps or --workers with --launcher {self.launcher}, whose ranks have no MPI")
        num_servers = 1 if self.ps is None else self.ps
        if num_servers < 1 or (self.workers is not None and self.workers < 1):
            raise LaunchError(f"got --ps {num_servers} --workers {self.workers}, expected 1 or more of each")
        if self.workers is None:
            if self.np is not None and self.np <= num_servers:
                raise LaunchError(f"got --ps {num_servers} with -np {self.np}: no rank is left to be a worker")
            return replace(self, ps=num_servers)
        if self.np not in (None, num_servers + self.workers):
            raise LaunchError(
                f"got -np {self.np} with --ps {num_servers} --workers {self.workers}: leave out one of the three"
            )
        return replace(self, ps=num_servers, np=num_servers + self.workers)


def add_options(
    parser: argparse._ActionsContainer,
    groups: Collection[str] = (),
    hidden: Collection[str] = (),
    hidden_groups: Collection[str] = (),
) -> None:
    """Adds the options of some groups, all by default. hidden: Accepted, but not in the help of the command."""
    sections: dict[str, Any] = {HOSTS: parser, JOB: parser, SHOW: parser}
    exclusive: dict[tuple[str, str], Any] = {}
    for one in fields(LaunchOptions):
        keywords = {name: value for name, value in one.metadata.items() if value is not None}
        group = keywords.pop("group", "")
        keywords.pop("flags", None)
        if not group or (groups and group not in groups):
            continue
        if group not in sections:
            sections[group] = parser.add_argument_group(group) if group not in hidden_groups else parser
        section = sections[group]
        for names in ONE_OF:
            if one.name in names:
                exclusive.setdefault(names, None)
                exclusive[names] = section = exclusive[names] or section.add_mutually_exclusive_group()
        if one.name in hidden or group in hidden_groups:
            keywords["help"] = argparse.SUPPRESS
        keywords = {"default": [] if one.default == () else one.default, **KINDS.get(str(one.type), {}), **keywords}
        section.add_argument(*flags_of(one), **keywords)


def flags_of(one: Field[Any]) -> tuple[str, ...]:
    """Command-line flags of an option."""
    return one.metadata["flags"] or (_flag(one.name),)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
