"""Flags of MPICH and Intel MPI, whose mpirun is Hydra; many of its options are environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringtrain.cluster import job as jobs
from ringtrain.cluster.environment import Setting
from ringtrain.cluster.job import Flag, Job, check_names, words
from ringtrain.cluster.plans.openmpi import WHY_SSH, ssh_options
from ringtrain.errors import LaunchError


def flags(job: Job, intel: bool, names: Sequence[str], hostfile: str, files: dict[str, str]) -> Iterator[Flag]:
    """Arguments after mpirun. hostfile: Existing one, with lines host:4; "": the job's hosts. files: Gets it then."""
    title = "Intel MPI" if intel else "MPICH"
    check_names(job.hosts, title)
    if job.subnet:
        raise LaunchError(
            f"got --subnet {job.subnet}, but {title} knows interfaces by name only: leave it out, or use Open MPI"
        )
    yield words("-np", job.num_ranks, because=jobs.NUM_RANKS)
    if job.hosts and not hostfile:
        text = "".join(f"{host}\n" for host in job.hosts)
        hostfile = jobs.add_file(files, job, "hosts.txt", text)
    if hostfile and intel:
        because = "hosts, each with the ranks it takes; with -f Intel MPI ignores the numbers, -ppn has one for all"
        yield words("-machinefile", hostfile, because=because)
    elif hostfile:
        yield words("-f", hostfile, because="hosts, each with the ranks it takes")
    if not intel and job.bind == "core":  # Intel MPI's binding is in `settings`
        yield words("-bind-to", f"core:{job.cores_per_rank}", because=_own_cores(job))
    elif not intel:
        yield words("-bind-to", "none", because=jobs.ALL_CORES)
    yield words("-prepend-rank", because=jobs.TAGGED)
    if job.working_directory:
        yield words("-wdir", job.working_directory, because=jobs.FOLDER)
    if names:
        yield words("-genvlist", ",".join(names), because=jobs.BY_NAME)
    else:
        yield words("-genvnone", because="none to get")


def settings(job: Job, intel: bool) -> Iterator[Setting]:
    """Options that these MPIs take from environment variables."""
    if job.several_hosts or job.ssh_port:
        name = "HYDRA_LAUNCHER_EXTRA_ARGS"
        if intel:
            name = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
        yield Setting(name, ssh_options(job), WHY_SSH)
    if intel:
        yield Setting("I_MPI_FABRICS", "shm:ofi", "shared memory on a host, libfabric between hosts")
        if job.bind == "core":
            yield Setting("I_MPI_PIN_DOMAIN", str(job.cores_per_rank), _own_cores(job))
        else:
            yield Setting("I_MPI_PIN", "0", jobs.ALL_CORES)
    if job.network == "ucx":
        yield Setting("FI_PROVIDER", "mlx", jobs.UCX) if intel else Setting("MPIR_CVAR_CH4_NETMOD", "ucx", jobs.UCX)
    else:
        yield Setting("FI_PROVIDER", "tcp", "TCP between hosts, where this MPI is built on libfabric")
        if not intel:
            yield Setting("UCX_TLS", "tcp,sm,self", "TCP between hosts, where this MPI is built on UCX")
    if job.yield_when_idle and intel:
        yield Setting("I_MPI_THREAD_YIELD", None, "no setting for yielding is known to help with this MPI")
    elif job.yield_when_idle:
        because = "ranks fill the cores: waiting ranks yield theirs"
        yield Setting("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1", because)


def _own_cores(job: Job) -> str:
    return f"each rank has {job.cores_per_rank} cores of its own (--bind core)"
