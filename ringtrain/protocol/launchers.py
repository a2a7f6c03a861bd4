"""Environment variables with which each launcher tells a process its place in the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankVariables:
    """Names of the variables; "" if the launcher sets none."""

    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


# In order of precedence: a rank of mpirun in a job of Slurm has Slurm's variables as well.
RANK_VARIABLES = {
    "Open MPI": RankVariables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "Hydra": RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Gloo": RankVariables("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "PMIx": RankVariables("PMIX_RANK"),
    # SLURM_NTASKS and SLURM_PROCID are set in a batch script as well, which is no rank.
    "Slurm": RankVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def names(field: str) -> tuple[str, ...]:
    """Names of one variable under all launchers, e.g. of "local_rank"."""
    variables = [getattr(row, field) for row in RANK_VARIABLES.values()]
    return tuple(filter(None, variables))


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Rank of this process as set by its launcher, before Horovod knows it; None without a launcher."""
    launchers = (row.rank for name, row in RANK_VARIABLES.items() if name != "Slurm")  # a batch script has its rank 0
    return next((int(environ[name]) for name in launchers if name in environ), None)


def launched_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of ranks as set by the launcher of this process; 1 without a launcher."""
    if launched_rank(environ) is None:
        return 1
    return next((int(environ[name]) for name in names("size") if environ.get(name, "").isdecimal()), 1)


def launched_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of ranks of this host as set by its launcher; 0: unknown, as under Slurm."""
    return next((int(environ[name]) for name in names("local_size") if environ.get(name, "").isdecimal()), 0)


def other_launcher(environ: Mapping[str, str], mpi: str) -> str:
    """Reason why a rank of MPICH's or Intel MPI's launcher cannot use a library built with `mpi`, or ""."""
    hydra, open_mpi = RANK_VARIABLES["Hydra"], RANK_VARIABLES["Open MPI"]
    # Open MPI would end the process with an error of its own, or take it for a job of one rank.
    if "Open MPI" not in mpi or hydra.local_size not in environ or open_mpi.rank in environ:
        return ""
    text = "this rank was started by the mpirun of MPICH or Intel MPI, but Horovod is built with Open MPI"
    return f"{text}: start it by Open MPI's mpirun, or by ringtrain launch"


def in_shell(field: str) -> str:
    """Shell expression with the value of one variable under any launcher; empty without a launcher."""
    text = ""
    for name in reversed(names(field)):
        text = f"${{{name}:-{text}}}" if text else f"${name}"
    return text
