"""Flags of MPICH and Intel MPI, whose mpirun is Hydra; many of its options are environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringtrain.cluster.environment import Setting
from ringtrain.cluster.job import Flag, Job, check_names, file_path, words
from ringtrain.cluster.plans.openmpi import SSH_OPTIONS, WHY_SSH
from ringtrain.errors import LaunchError


def flags(job: Job, intel: bool, names: Sequence[str], hostfile: str = "") -> tuple[list[Flag], dict[str, str]]:
    """Arguments after mpirun, and files to write. hostfile: Existing one, with lines host:4; "": write one."""
    title = "Intel MPI" if intel else "MPICH"
    check_names(job.hosts, title, r"[A-Za-z0-9_][A-Za-z0-9._-]*")
    if job.subnet:
        raise LaunchError(
            f"got --subnet {job.subnet}, but {title} knows interfaces by name only: leave it out, or use Open MPI"
        )
    files: dict[str, str] = {}
    found = [words("-np", job.num_ranks, because="ranks in all")]
    if job.hosts and not hostfile:
        text = "".join(f"{host.name}:{host.slots}\n" for host in job.hosts)
        hostfile = file_path(job, "hosts.txt", text)
        files[hostfile] = text
    if hostfile and intel:
        because = "hosts, each with the ranks it takes; with -f Intel MPI passes over the numbers, -ppn has one for all"
        found.append(words("-machinefile", hostfile, because=because))
    elif hostfile:
        found.append(words("-f", hostfile, because="hosts, each with the ranks it takes"))
    if not intel:
        found += binding(job)
    found.append(words("-prepend-rank", because="each line says which rank wrote it"))
    if job.working_directory:
        found.append(words("-wdir", job.working_directory, because="ranks start in this folder, on every host"))
    because = "variables that ranks on other hosts get, by name: no value is on the command line"
    found.append(
        words("-genvlist", ",".join(names), because=because) if names else words("-genvnone", because="none to get")
    )
    return found, files


def binding(job: Job) -> Iterator[Flag]:
    """Core binding of MPICH; Intel MPI's is in `settings`."""
    if job.bind == "core":
        because = f"each rank has {job.cores_per_rank} cores of its own (--bind core)"
        yield words("-bind-to", f"core:{job.cores_per_rank}", because=because)
    else:
        yield words("-bind-to", "none", because="ranks use many threads: bound to a core, all of them would share it")


def settings(job: Job, intel: bool) -> Iterator[Setting]:
    """Options that these MPIs take from environment variables."""
    options = " ".join([*SSH_OPTIONS, *(("-p", str(job.ssh_port)) if job.ssh_port else ())])
    if job.several_hosts or job.ssh_port:
        if intel:
            yield Setting("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", options, WHY_SSH)
        else:
            yield Setting("HYDRA_LAUNCHER_EXTRA_ARGS", options, WHY_SSH)
    if intel:
        yield Setting("I_MPI_FABRICS", "shm:ofi", "shared memory on a host, libfabric between hosts")
        if job.bind == "core":
            because = f"each rank has {job.cores_per_rank} cores of its own (--bind core)"
            yield Setting("I_MPI_PIN_DOMAIN", str(job.cores_per_rank), because)
        else:
            yield Setting("I_MPI_PIN", "0", "ranks use many threads: bound to a core, all of them would share it")
    if job.network == "ucx":
        because = "InfiniBand or RoCE, through UCX (--network ucx)"
        yield Setting("FI_PROVIDER", "mlx", because) if intel else Setting("MPIR_CVAR_CH4_NETMOD", "ucx", because)
    else:
        yield Setting("FI_PROVIDER", "tcp", "TCP between hosts, where this MPI is built on libfabric")
        if not intel:
            yield Setting("UCX_TLS", "tcp,sm,self", "TCP between hosts, where this MPI is built on UCX")
    if job.yield_when_idle:
        because = "ranks fill the cores: waiting ones give theirs away"
        if intel:
            yield Setting("I_MPI_THREAD_YIELD", None, "this MPI has no yielding that is known to help")
        else:
            yield Setting("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1", because)
