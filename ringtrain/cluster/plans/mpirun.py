"""mpirun's command line: a row per dialect, identified by the output of `mpirun --version`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ringtrain.cluster.environment import Setting, as_mapping, clean_start, names_for_ranks, settings
from ringtrain.cluster.job import Flag, Job, Plan, check, words
from ringtrain.cluster.plans import hydra, openmpi
from ringtrain.cluster.plans.rank_start import logged, reported
from ringtrain.errors import LaunchError
from ringtrain.protocol.launchers import RANK_VARIABLES


@dataclass(frozen=True)
class Dialect:
    title: str
    version: re.Pattern[str]
    """beginning of the output of `mpirun --version`"""
    flags: Callable[[Job, Sequence[str], str, dict[str, str]], Iterable[Flag]]
    """from a job, names of the ranks' variables, an existing hostfile, and a dictionary that gets files to write"""
    settings: Callable[[Job], Iterable[Setting]] = lambda job: ()
    rank_variable: str = ""
    """variable with the rank, if this MPI cannot both show and log a rank's output; else "" """


DIALECTS = {
    "openmpi4": Dialect(
        title="Open MPI 4",
        version=re.compile(r"mpirun \(Open MPI\) 4\."),
        flags=lambda job, *more: openmpi.flags(job, openmpi.FOUR, *more),
        settings=openmpi.settings,
    ),
    "openmpi5": Dialect(
        title="Open MPI 5",
        version=re.compile(r"mpirun \(Open MPI\) 5\."),
        flags=lambda job, *more: openmpi.flags(job, openmpi.FIVE, *more),
        settings=openmpi.settings,
        rank_variable=RANK_VARIABLES["Open MPI"].rank,
    ),
    "mpich": Dialect(
        title="MPICH",
        version=re.compile(r"HYDRA build details:"),
        flags=lambda job, *more: hydra.flags(job, False, *more),
        settings=lambda job: hydra.settings(job, False),
        rank_variable=RANK_VARIABLES["Hydra"].rank,
    ),
    "intel": Dialect(
        title="Intel MPI",
        version=re.compile(r"Intel\(R\) MPI Library"),
        flags=lambda job, *more: hydra.flags(job, True, *more),
        settings=lambda job: hydra.settings(job, True),
        rank_variable=RANK_VARIABLES["Hydra"].rank,
    ),
}


def identify(version_text: str) -> str:
    """Key of DIALECTS for the output of `mpirun --version`. Raises LaunchError for an unsupported MPI."""
    text = version_text.strip()
    for name, dialect in DIALECTS.items():
        if dialect.version.match(text):
            return name
    first = text.splitlines()[0] if text else ""
    titles = ", ".join(dialect.title for dialect in DIALECTS.values())
    raise LaunchError(
        f"mpirun --version printed {first!r}, expected {titles}: put one of these first on PATH, or use --launcher"
        f" horovodrun-gloo"
    )


def plan(job: Job, dialect: str, program: str = "mpirun", hostfile: str = "") -> Plan:
    """Command that starts a job by mpirun. hostfile: Existing one in the dialect's format; "": the job's hosts."""
    check(job)
    row = DIALECTS[dialect]
    values, reasons = as_mapping([*settings(job), *row.settings(job)])
    files: dict[str, str] = {}
    flags = [*row.flags(job, names_for_ranks(job, values), hostfile, files)]
    if job.output and row.rank_variable:
        because = f"{row.title} would not show what it logs: each rank copies it to DIR/rank.N/stdout and stderr"
        flags.append(logged(job.output, row.rank_variable, because))
    # By the path of `program` Open MPI finds its programs on other hosts; by its name only if ssh finds it on PATH.
    start = [*clean_start(job, "mpirun"), words(program, because=f"starts ranks; this one is {row.title}")]
    return Plan((*start, *flags, *reported(job)), job.command, values, reasons, files)
