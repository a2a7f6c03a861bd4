"""Where the names come from that ringtrain.hvd takes from Horovod: from Horovod, or from mpi4py without it.

`RINGTRAIN_COLLECTIVES=mpi4py`, set before ringtrain.hvd is imported, asks for the second: `mpi_backend.py`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ringtrain.config import HvdConfig
from ringtrain.errors import ConfigError
from ringtrain.protocol.env import ALONE, COLLECTIVES

WITH_HOROVOD = os.environ.get(COLLECTIVES) not in ("mpi4py", ALONE)

if TYPE_CHECKING or WITH_HOROVOD:
    import horovod.tensorflow as horovod
    from horovod.common.elastic import ObjectState as ObjectState
    from horovod.common.elastic import notification_manager as notification_manager
    from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
    from horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from horovod.runner.common.util import network as network
else:
    from ringtrain.hvd import mpi_backend as horovod


def __getattr__(name: str) -> Any:
    return getattr(horovod, name)


def configure(options: HvdConfig, environ: MutableMapping[str, str] | None = None) -> None:
    """Hands the configuration's section to Horovod; call it before `init`, on every rank.

    In deterministic mode nothing is fused: which tensors meet in Horovod's buffer depends on timing, and with more than
    two ranks the order in which an element's values are added depends on its place in the buffer.

    Args:
        options: What is set in it wins over the environment.
        environ: To change; None: this process'.

    Raises:
        ConfigError: Deterministic mode, and Horovod's autotuning is on, which changes how it adds while it runs.
    """
    environ = os.environ if environ is None else environ
    if options.fusion_mb >= 0:
        environ["HOROVOD_FUSION_THRESHOLD"] = str(round(options.fusion_mb * 2**20))
    if options.cycle_time_ms >= 0:
        environ["HOROVOD_CYCLE_TIME"] = str(options.cycle_time_ms)
    if options.deterministic:
        if environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
            raise ConfigError(
                "hvd.deterministic: HOROVOD_AUTOTUNE changes the order of additions while it tries settings: unset it"
            )
        environ["HOROVOD_FUSION_THRESHOLD"] = "0"


def check_op(options: HvdConfig) -> None:
    """Raises ConfigError, on every rank, where Horovod has no such reduction for the ranks that were started."""
    size = horovod.size()
    if options.op == "adasum" and size & (size - 1):
        raise ConfigError(f"hvd.op: adasum needs a number of ranks that is a power of two, this run has {size}")
    if options.op == "adasum" and size > 1 and not horovod.mpi_enabled():
        raise ConfigError("hvd.op: adasum needs MPI, this run is over Gloo: use mpirun or horovodrun --mpi")
