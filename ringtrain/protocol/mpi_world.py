"""MPI without Horovod: initialized once, finalized at exit if the process succeeds."""

from __future__ import annotations

import atexit
import functools
from typing import Any

from ringtrain.errors import MissingDependency
from ringtrain.protocol.failures import ended_well


@functools.cache
def start() -> Any:
    """Initializes MPI once and returns mpi4py's module MPI. Raises MissingDependency without mpi4py."""
    try:
        # MPI_Finalize is collective: a failed rank would wait in it for the others, and they for it.
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(f"mpi4py is not installed ({error}): pip install 'ringtrain[train]'") from error
    atexit.register(lambda: MPI.Finalize() if ended_well() else None)
    return MPI
