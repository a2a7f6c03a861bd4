"""MPI without Horovod: started once, ended with the process if that ends well."""

from __future__ import annotations

import atexit
import functools
from typing import Any

from ringtrain.errors import MissingDependency
from ringtrain.protocol.failures import ended_well


@functools.cache
def start() -> Any:
    """Starts MPI.

    Returns:
        mpi4py's module MPI.

    Raises:
        MissingDependency: mpi4py is not there.
    """
    try:
        # MPI's end is a meeting of all ranks: one that has failed would wait there for the others, and they for it.
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(f"mpi4py is not installed ({error}): pip install 'ringtrain[train]'") from error
    atexit.register(lambda: MPI.Finalize() if ended_well() else None)
    return MPI
