"""Flags of Open MPI 4 and 5. Version 5 has another control plane (PRRTE) and silently ignores most names of 4."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.cluster import job as jobs
from ringtrain.cluster.environment import Setting
from ringtrain.cluster.host_agent import OWN_CONNECTION
from ringtrain.cluster.hosts import has_domain
from ringtrain.cluster.job import MAX_WORD_LETTERS, NUM_HOSTS_LARGE, Flag, Job, check_names, words
from ringtrain.errors import LaunchError

SSH_OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=4",
    "-o",
    "ServerAliveCountMax=2",
    *(word for name, value in OWN_CONNECTION.items() for word in ("-o", f"{name}={value}")),
)
WHY_SSH = "ssh never prompts, shares no connection, gives up on a host after 10 s, and on a vanished one after 8 s"
PARAMETERS = "openmpi-mca-params.conf"
INCLUDED, EXCLUDED = "btl_tcp_if_include", "btl_tcp_if_exclude"
EXCLUDED_NETWORKS = "127.0.0.0/8,docker0"
TCP_PIECES, TCP_PIECE_BYTES = "btl_tcp_rdma_pipeline_frag_size", 262144


def is_of_wheel(path: str, prefix: Path = Path(sys.prefix)) -> bool:
    """Returns whether the first mpirun of `path` is the Open MPI of PyPI's wheel in this environment."""
    settings, daemon = prefix / "etc" / PARAMETERS, prefix / "bin" / "orted"
    is_first = shutil.which("mpirun", path=path) == str(prefix / "bin" / "mpirun")
    return is_first and settings.exists() and daemon.exists()


def settings_of_wheel(path: str, prefix: Path = Path(sys.prefix)) -> dict[str, str]:
    """Variables for the Open MPI of PyPI's wheel, if `path` begins with it, where set-up has not configured it."""
    settings = prefix / "etc" / PARAMETERS
    if not is_of_wheel(path, prefix) or "\norte_launch_agent" in settings.read_text(errors="replace"):
        return {}
    return {
        # Without an ssh client it would not even start ranks on this host.
        "OMPI_MCA_plm_rsh_agent": "ssh : rsh : false",
        # On others it would look for its daemon on the short PATH of a login over ssh.
        "OMPI_MCA_orte_launch_agent": f"env OPAL_PREFIX={prefix} PATH={prefix}/bin:$PATH {prefix}/bin/orted",
    }


def own_interfaces(environ: Mapping[str, str], files: Sequence[Path] | None = None) -> tuple[str, str]:
    """Parameter by which the user has chosen the interfaces of Open MPI, and where; two empty texts: none."""
    if files is None:
        program = Path(shutil.which("mpirun", path=environ.get("PATH", os.defpath)) or "").absolute()
        installed = program.parents[1] / "etc" / PARAMETERS
        files = (Path.home() / ".openmpi" / "mca-params.conf", installed, Path("/etc/openmpi", PARAMETERS))
    for name in (INCLUDED, EXCLUDED):
        if f"OMPI_MCA_{name}" in environ:
            return name, f"OMPI_MCA_{name} is set here"
        for file in files:
            with contextlib.suppress(OSError):
                if re.search(rf"^\s*{name}\s*=", file.read_text(errors="replace"), re.MULTILINE):
                    return name, f"{name} is set in {file}"
    return "", ""


def check_interfaces(job: Job) -> None:
    """Raises LaunchError for --subnet beside a parameter that Open MPI does not take with it."""
    name, where = job.own_interfaces
    if job.subnet and name == EXCLUDED:
        raise LaunchError(f"got --subnet {job.subnet}, and {where}, which Open MPI does not take together: unset one")


def settings(job: Job) -> Iterator[Setting]:
    """Row of --explain about the interfaces that the user has chosen."""
    name, where = job.own_interfaces
    if name and not job.subnet and job.several_hosts and job.network == "tcp":
        yield Setting(name, None, f"{where}: ringtrain's own {EXCLUDED} would replace or contradict it: left out")


@dataclass(frozen=True)
class Words:
    title: str
    control: str
    """option that sets a parameter of the control plane"""
    ssh: str
    """component that starts daemons by ssh"""
    shared_memory: str
    tag: tuple[str, ...]
    control_networks: str
    """parameter that limits control connections to networks; "": none that works"""
    kill: str
    """parameter with the seconds between SIGTERM and SIGKILL; "": none"""
    oversubscribe: str
    """mapping by slot if there may be more ranks than slots"""
    full_names: str
    """parameter that keeps host names whole"""


FOUR = Words(
    title="Open MPI 4",
    control="--mca",
    ssh="plm_rsh",
    shared_memory="vader",
    tag=("--tag-output",),
    control_networks="oob_tcp_if",
    kill="odls_base_sigkill_timeout",
    oversubscribe="slot",
    full_names="orte_keep_fqdn_hostnames",
)
# PRRTE 3.0.14 has prte_if_include, but finds no interface by its subnet, and sometimes crashes on two excluded ones.
FIVE = Words(
    title="Open MPI 5",
    control="--prtemca",
    ssh="plm_ssh",
    shared_memory="sm",
    tag=("--output", "tag"),
    control_networks="",
    kill="",
    oversubscribe="slot:OVERSUBSCRIBE",
    full_names="prte_keep_fqdn_hostnames",
)


def flags(job: Job, dialect: Words, names: Sequence[str], hostfile: str, files: dict[str, str]) -> Iterator[Flag]:
    """Arguments after mpirun. hostfile: Existing one; "": the job's hosts. files: Gets those to write."""
    check_names(job.hosts, dialect.title, r"[A-Za-z0-9][A-Za-z0-9.-]*")
    listed = ",".join(map(str, job.hosts))
    yield words("-np", job.num_ranks, because=jobs.NUM_RANKS)
    if hostfile:
        yield words("--hostfile", hostfile, because="hosts and slots; given, since the default differs by version")
    elif len(listed) > MAX_WORD_LETTERS:
        text = "".join(f"{host.name} slots={host.slots}\n" for host in job.hosts)
        because = "hosts with the ranks they take: too many for the command line"
        yield words("--hostfile", jobs.add_file(files, job, "hosts.txt", text), because=because)
    elif listed:
        yield words("-H", listed, because="hosts, each with the ranks it takes")
    if job.allow_root:
        yield words("--allow-run-as-root", because="Open MPI runs as root only with this flag")
    yield from placement(job, dialect)
    yield from network(job, dialect)
    yield from control(job, dialect, hostfile)
    yield from output(job, dialect)
    if job.working_directory:
        yield words("-wdir", job.working_directory, because=jobs.FOLDER)
    if names:
        yield Flag(tuple(word for name in names for word in ("-x", name)), jobs.BY_NAME)


def ssh_options(job: Job) -> str:
    return " ".join([*SSH_OPTIONS, *(("-p", str(job.ssh_port)) if job.ssh_port else ())])


def placement(job: Job, dialect: Words) -> Iterator[Flag]:
    by_slot = dialect.oversubscribe if job.oversubscribe else "slot"
    if job.oversubscribe and by_slot == "slot":
        yield words("--oversubscribe", because="more ranks than slots are allowed, as asked for")
    if job.bind == "core":
        slots, *rest = by_slot.split(":")
        mapped = ":".join([slots, f"PE={job.cores_per_rank}", *rest])
        yield words("--bind-to", "core", because="each rank has cores of its own (--bind core)")
        yield words("--map-by", mapped, because=f"ranks fill a host before the next, {job.cores_per_rank} cores each")
    else:
        yield words("--bind-to", "none", because=jobs.ALL_CORES)
        yield words("--map-by", by_slot, because="ranks fill a host before the next, in the order given")


def network(job: Job, dialect: Words) -> Iterator[Flag]:
    if job.network == "ucx":
        yield words("--mca", "pml", "ucx", because=jobs.UCX)
        if dialect is FOUR:
            yield words("--mca", "btl", "^openib", because="disables the old InfiniBand transport, in favor of UCX")
        return
    yield words("--mca", "pml", "ob1", because="messages over the transports named next, and no others")
    transports = f"self,{dialect.shared_memory},tcp"
    yield words("--mca", "btl", transports, because="shared memory on a host, TCP between hosts")
    if job.subnet:
        also = ""
        if not dialect.control_networks:
            also = "; control connections use any: PRRTE finds none by its subnet"
        check_interfaces(job)
        yield words("--mca", INCLUDED, job.subnet, because=f"by subnet: interface names differ{also}")
    elif job.several_hosts and not job.own_interfaces[0]:
        because = "interfaces that each host has for itself alone lead to no other host"
        if job.id and not job.local_networks:
            because += "; further ones that host agents find are added at the start"
        excluded = ",".join([EXCLUDED_NETWORKS, *job.local_networks])
        yield words("--mca", EXCLUDED, excluded, because=because)
    if job.several_hosts and f"OMPI_MCA_{TCP_PIECES}" not in job.environment:
        because = "large messages go in pieces: whole ones that cross wait for each other, at half the link's rate"
        yield words("--mca", TCP_PIECES, TCP_PIECE_BYTES, because=because)


def control(job: Job, dialect: Words, hostfile: str = "") -> Iterator[Flag]:
    """Arguments of the control plane. hostfile: Existing one, whose names are not known; "": the job's hosts."""
    set_to = dialect.control
    if hostfile or any(has_domain(host.name) for host in job.hosts):
        because = "hosts by their full names: it would cut them at the first dot"
        yield words(set_to, dialect.full_names, 1, because=because)
    if job.several_hosts or job.ssh_port:
        yield words(set_to, f"{dialect.ssh}_args", ssh_options(job), because=WHY_SSH)
    if dialect.control_networks and job.subnet:
        because = "control connections by subnet as well"
        yield words(set_to, f"{dialect.control_networks}_include", job.subnet, because=because)
    if job.several_hosts:
        for name, seconds in (("time", 4), ("intvl", 2), ("probes", 3)):
            because = "a vanished host is noticed in 4 + 3 x 2 s, not in 8 minutes"
            yield words(set_to, f"oob_tcp_keepalive_{name}", seconds, because=because)
    if dialect.kill:
        # Open MPI waits as long before SIGTERM, too. Ranks of supervised jobs hear of signals from the host agents.
        seconds = 1 if job.id else 2
        yield words(set_to, dialect.kill, seconds, because=f"ranks that ignore SIGTERM are killed after {seconds} s")
    if len(job.hosts) >= NUM_HOSTS_LARGE:
        because = "the launcher reaches every host itself: hosts need no ssh keys for each other"
        yield words(set_to, f"{dialect.ssh}_no_tree_spawn", 1, because=because)
        because = "its ssh connections stay open: with fewer at a time than hosts it would wait for ever"
        yield words(set_to, f"{dialect.ssh}_num_concurrent", len(job.hosts), because=because)
    if job.yield_when_idle:
        yield words("--mca", "mpi_yield_when_idle", 1, because=jobs.YIELDS)


def output(job: Job, dialect: Words) -> Iterator[Flag]:
    yield Flag(dialect.tag, jobs.TAGGED)
    if job.output and dialect is FOUR:
        if ":" in job.output:
            raise LaunchError(f"got --output {shlex.quote(job.output)}: Open MPI 4 ends a path at ':': choose another")
        because = "keeps DIR/1/rank.N/stdout and stderr, besides showing them"
        yield words("--output-filename", job.output, because=because)
