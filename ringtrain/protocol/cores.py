"""Cores of a host, and the share of a rank in them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from ringtrain.errors import ConfigError
from ringtrain.protocol.env import HOST_SLOTS
from ringtrain.protocol.for_script import ForScript
from ringtrain.protocol.launchers import launched_local_size

INTRA_OP, INTER_OP = "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"
"""threads of TensorFlow, which reads the variables when it makes its devices"""
THREADS = ("OMP_NUM_THREADS", INTRA_OP, INTER_OP)
"""variables with the threads of a rank"""
QUOTA, PROCESSES = Path("/sys/fs/cgroup/cpu.max"), Path("/proc")
WRAPPERS = ("sh", "bash", "dash", "ksh", "zsh", "uv", "conda", "mamba", "micromamba", "time")
"""programs that may be between a launcher and a rank"""


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets TensorFlow start with this rank's share of the host's cores, in place of all of them on each rank."""
    local_size = launched_local_size(environ)
    eager = sys.modules.get("tensorflow.python.eager.context")
    # The user has chosen threads, TensorFlow has started, or the launcher does not tell the ranks of the host.
    if not local_size or INTRA_OP in environ or INTER_OP in environ or (eager and eager.context()._initialized):
        return
    own, _ = count_cores()
    share = max(1, min(own, cores_of_job(local_size, environ) // local_size))
    with contextlib.suppress(ConfigError):  # which is raised when a script calls what reads it
        if ForScript.from_environment(environ).options.get("train.virtual_ranks"):
            share = 1  # bits must not depend on the number of ranks
    environ.update({INTRA_OP: str(share), INTER_OP: str(share)})


def num_threads(configured: int) -> int:
    """Threads with which TensorFlow computes an operation in this process. configured 0: the environment decides."""
    of_variable = os.environ.get(INTRA_OP, "")
    return configured or (int(of_variable) if of_variable.isdecimal() else 0) or count_cores()[0]


def cores_of_job(local_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Cores of this host that the job's ranks may use together: other jobs may have slots on it."""
    _, host_cores = count_cores()
    slots = int(environ.get(HOST_SLOTS, 0))
    if slots:
        return host_cores * local_size // max(slots, local_size)
    return host_cores


def count_cores(quota: Path = QUOTA) -> tuple[int, int]:
    """Counts the cores that this rank, and that all ranks of its host together, may use."""
    own = os.sched_getaffinity(0)
    together = set(own)
    # A launcher that binds ranks to cores is not bound itself: its cores are the host's.
    for process in _launching():
        try:
            together |= os.sched_getaffinity(process)
        except OSError:
            break
    try:
        allowed_us, period_us = quota.read_text().split()  # of CPU time per period, e.g. "200000 100000"
        limit = max(1, int(allowed_us) // int(period_us))
    except (OSError, ValueError):  # no control groups, or "max"
        limit = len(together)
    return min(len(own), limit), min(len(together), limit)


def _launching() -> Iterator[int]:
    """Processes from this one's parent up to the first that is no wrapper of a rank, which may be its launcher."""
    process = os.getppid()
    while process > 1:
        yield process
        try:
            name = (PROCESSES / str(process) / "comm").read_text().strip()
            if name not in WRAPPERS:
                return
            # The name in parentheses may have spaces.
            process = int((PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return
