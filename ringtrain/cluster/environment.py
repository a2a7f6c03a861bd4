"""Variables of the launching environment that reach ranks, and those that a job sets besides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringtrain.cluster.job import Flag, Job, words
from ringtrain.errors import LaunchError
from ringtrain.protocol.cores import THREADS
from ringtrain.protocol.env import ATTEMPT, JOB, PLAN, SERVERS

USUAL = re.compile(
    # TF_VAR_, TF_TOKEN_ and TF_CLI_ are Terraform's.
    r"PATH|PYTHON(PATH|USERBASE|NOUSERSITE|SAFEPATH|UNBUFFERED|FAULTHANDLER|WARNINGS|HASHSEED)|LD_LIBRARY_PATH|VIRTUAL_ENV"
    r"|(NCCL|HOROVOD|TF(?!_(?:VAR|TOKEN|CLI)_)|XLA|OMP|KMP|KERAS|RINGTRAIN|UCX|FI|MPIR|I_MPI)_[A-Za-z0-9_]*"
    r"|CUDA_(?!VISIBLE_DEVICES|HOME|PATH)[A-Za-z0-9_]*"
)
# Needed on the launching host itself, and set by the login on any other: for horovodrun, ssh (GSSAPI has tickets in
# KRB5CCNAME), mpirun, schedulers' commands, and its own ranks.
OF_THE_LAUNCHER = re.compile(
    r"HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|_|TERM|TZ|TMPDIR|LANG|LANGUAGE|SSH_AUTH_SOCK|SSH_AGENT_PID|KRB5[A-Z0-9_]*"
    r"|CUDA_(VISIBLE_DEVICES|HOME|PATH)[A-Za-z0-9_]*|PYTHON[A-Z0-9_]*"
    r"|(LC|XDG|OMPI|OPAL|ORTE|PRTE|PMIX|HYDRA|HWLOC|MPIEXEC|MPICH|MPIR|I_MPI|FI|UCX|SLURM|PBS|LSB|LSF|KUBERNETES)_[A-Za-z0-9_]*"
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|APIKEY|COOKIE|JWT|(^|_)(KEY|KEYS|PAT|AUTH|PWD|PASS|DSN)(_|$)",
    re.IGNORECASE,
)
NOT_SECRET = ("PWD", "OLDPWD", "SSH_AUTH_SOCK")


@dataclass(frozen=True)
class Setting:
    """A variable that a job sets, or deliberately leaves unchanged."""

    name: str
    value: str | None
    """None: unchanged"""
    reason: str


def is_secret(name: str) -> bool:
    """Returns whether a variable's name marks its value as secret."""
    return name not in NOT_SECRET and SECRET.search(name) is not None


def is_private(name: str, job: Job) -> bool:
    """Returns whether a value stays out of files: it is secret by its name, or forwarded by --forward alone."""
    return is_secret(name) or (name in job.forward and not USUAL.fullmatch(name))


def forwarded(job: Job) -> tuple[str, ...]:
    """Names of the variables that ranks get. Raises LaunchError if --forward names an invalid or unset one."""
    for name in job.forward:
        if not NAME.fullmatch(name):
            raise LaunchError(
                f"got --forward {name.partition('=')[0]!r}..., expected a variable's name, without a value"
            )
        if name not in job.environment:
            raise LaunchError(f"got --forward {name}, which is not set here: export {name}=... first, or leave it out")
    return tuple(sorted(name for name in job.environment if name in job.forward or USUAL.fullmatch(name)))


def withheld(job: Job) -> tuple[str, ...]:
    """Names hidden from a launcher that passes on everything: horovodrun to all ranks, mpirun to those of its host."""
    kept = {*forwarded(job)}
    if job.hosts and all(host.name in job.here for host in job.hosts):
        return ()  # all ranks have this host's whole environment
    return tuple(sorted(name for name in job.environment if name not in kept and not OF_THE_LAUNCHER.fullmatch(name)))


def clean_start(job: Job, launcher: str, folder: str = "") -> list[Flag]:
    """Arguments before a launcher that set its directory, if one is given, and remove the withheld variables."""
    hidden = withheld(job)
    if not hidden and not folder:
        return []
    flags = [words("env", because=f"prepares {launcher}'s start")]
    if folder:
        flags.append(words("-C", folder, because=f"ranks start in the directory of {launcher}"))
    if hidden:
        because = f"ranks of this host inherit all variables of {launcher}: these are not for ranks"
        flags.append(Flag(tuple(word for name in hidden for word in ("-u", name)), because))
    return flags


def settings(job: Job) -> Iterator[Setting]:
    if job.id:
        because = "ID of the job, by which its processes are found on every host; new at each start"
        yield Setting(JOB, job.id, because)
        yield Setting(PLAN, job.planned.to_json(), "planned placement, with which each rank compares its own")
        yield Setting(ATTEMPT, job.attempt, "number of this attempt, and exit causes of earlier ones")
    if job.wheel_mpi:
        yield Setting("OPAL_PREFIX", job.wheel_mpi, "where Open MPI finds its files, if no mpirun starts the ranks")
    if job.threads_per_rank:
        for name in THREADS:
            yield Setting(name, str(job.threads_per_rank), "threads of a rank, as asked for (--threads)")
    if job.num_servers:
        yield Setting(SERVERS, str(job.num_servers), "ranks that are parameter servers (--ps)")
    for name in ("NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        if job.environment.get(name):
            because = f"set here: ranks get {job.environment[name]!r}, which every host must have"
            yield Setting(name, None, because)
        elif job.subnet:
            because = f"knows interfaces by name only, and {job.subnet} is a subnet: it chooses for itself"
            yield Setting(name, None, because)


def as_mapping(settings: Sequence[Setting]) -> tuple[dict[str, str], dict[str, str]]:
    values = {setting.name: setting.value for setting in settings if setting.value is not None}
    return values, {setting.name: setting.reason for setting in settings}


def names_for_ranks(job: Job, values: Mapping[str, str]) -> tuple[str, ...]:
    """Names of all variables that ranks get, from the launching environment or set by the job."""
    return tuple(sorted({*forwarded(job), *values}))
