"""Environment variables of a job (RINGTRAIN_*), and the shell line that each rank starts with."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ringtrain.protocol.launchers import in_shell, names

JOB = "RINGTRAIN_JOB"
"""ID of the job, inherited by all its processes"""
PLAN = "RINGTRAIN_PLAN"
"""planned placement as JSON"""
ATTEMPT = "RINGTRAIN_ATTEMPT"
"""number of the attempt and exit causes of earlier ones, as JSON"""
FIRST_PROCESS = "RINGTRAIN_FIRST_PROCESS"
"""ID of the process that a rank's command was started as"""
RANK_PROCESS = "RINGTRAIN_RANK_PROCESS"
"""ID of the process that has started Horovod or MPI as its launcher's rank"""
HOST_SLOTS = "RINGTRAIN_HOST_SLOTS"
"""slots of a host that several jobs share, each on some of them; none of these jobs uses the terminal"""
SLOT = "RINGTRAIN_SLOT"
"""number of a rank's slot on its host, in an elastic job: unlike its local rank, it does not change"""
FEED = "RINGTRAIN_FEED"
"""for a rank whose rows Spark streams: descriptor of a pipe, rank, size, number of samples and of classes"""
COLLECTIVES = "RINGTRAIN_COLLECTIVES"
"""library of the ranks' collectives: mpi4py, else Horovod"""
ALONE = "nothing"
"""value of COLLECTIVES if this rank trains alone and the others serve it"""
SERVERS = "RINGTRAIN_SERVERS"
"""number of parameter-server ranks, if the launcher was given one"""
PROVE = "RINGTRAIN_PROVE_ROWS"
"""folder in which the ranks of `ringtrain prove` record the samples of every step"""
FOR_SCRIPT = "RINGTRAIN_FOR_SCRIPT"
"""options that a command such as `ringtrain sweep` gives the script that it starts, as JSON: for_script.py"""
LEASE = "RINGTRAIN_LEASE_S"
"""seconds without the launcher's heartbeat after which a host ends its part of the job"""
YIELDING = "OMPI_MCA_mpi_yield_when_idle"
"""with it, waiting ranks of Open MPI yield their cores"""
OF_A_RANK = re.compile(
    rf"(OMPI|PMIX|PMI|PRTE|HYDI|HOROVOD)_\w*|MPI_LOCAL\w*|SLURM_(PROCID|LOCALID|NODEID|TASK_PID|GTIDS|STEP|PMI)\w*"
    rf"|{JOB}|{PLAN}|{ATTEMPT}|{FIRST_PROCESS}|{SLOT}|{FEED}|{SERVERS}"
)
"""variables by which a process takes itself for a rank"""
MARK = "ringtrain-report"
# Prints a line with the rank's placement and runs its command in the same process. The line is one write, so that
# lines of other ranks do not mix with it. Python underlines no parts of a traceback's lines, which are long enough.
STARTER = (
    f"printf '{MARK}:%s:seat:%s:%s:%s:%s:%s\\n' \"${JOB}\""
    f' "{in_shell("rank")}" "{in_shell("size")}" "{in_shell("local_rank")}"'
    f' $$ "$(uname -n)" >&2; export {FIRST_PROCESS}=$$ PYTHONNODEBUGRANGES=1; exec "$@"'
)


def mark_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Marks this process as its launcher's rank, if it has one, for the processes that it starts: see leave_rank."""
    if any(name in environ for name in names("rank")):
        environ[RANK_PROCESS] = str(os.getpid())


def has_left_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process was started by a rank, and so is none."""
    return environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid())


def leave_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Removes what a process has inherited from the rank that has started it: it is alone, as without a launcher."""
    if has_left_rank(environ):
        for name in [*filter(OF_A_RANK.fullmatch, environ)]:
            del environ[name]


def path_with_own(environ: Mapping[str, str] = os.environ) -> str:
    """PATH with the programs of this interpreter's environment first."""
    folder, path = str(Path(sys.executable).parent), environ.get("PATH", os.defpath)
    if folder in path.split(os.pathsep):
        return path
    return f"{folder}{os.pathsep}{path}"


def is_activated(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether an environment is activated: a variable names it, and its programs are on PATH."""
    prefixes = (environ.get("VIRTUAL_ENV"), environ.get("CONDA_PREFIX"))
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    # The kernel of a notebook may inherit the variable alone.
    return any(prefix and str(Path(prefix, "bin")) in folders for prefix in prefixes)


def installer(wanted: Mapping[str, Any] | None = None) -> list[str]:
    """Arguments of the command that installs a package in this Python's environment, without the package."""
    # Uses `os` and `sys` alone: hosts of `ringtrain doctor` run this source.
    project = os.path.dirname(sys.prefix)
    made_by = os.path.join(sys.prefix, "pyvenv.cfg")
    if os.path.exists(made_by):
        with open(made_by, encoding="utf-8") as file:
            is_from_uv = any(line.partition("=")[0].strip() == "uv" for line in file)
        if is_from_uv and os.path.exists(os.path.join(project, "uv.lock")):
            return ["uv", "add", "--project", project]
        if is_from_uv:
            return ["uv", "pip", "install", "--python", sys.prefix]
    return [sys.executable, "-m", "pip", "install"]  # conda's environments have pip as well


def install(package: str = "") -> str:
    """Shell command that installs a package in this environment, by default all that training needs."""
    if Path(sys.prefix, "setup", "stamp").exists():
        return "launch/setup.sh"
    return f"{shlex.join(installer())} {shlex.quote(package) if package else ALL_OF_IT}"


def for_this_environment(text: str) -> str:
    """Message with the installer of this environment in place of pip."""
    return text.replace("pip install ", f"{shlex.join(installer())} ")


ALL_OF_IT = "WHEELS/*.whl 'ringtrain[cpu]'"  # WHEELS: the folder with ringtrain's wheels
