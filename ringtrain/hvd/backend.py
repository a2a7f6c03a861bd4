"""Source of Horovod's names: Horovod, or `mpi_backend.py` if RINGTRAIN_COLLECTIVES=mpi4py is set before the import."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.config.sections import HvdConfig
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.protocol.env import ALONE, COLLECTIVES, for_this_environment
from ringtrain.protocol.launchers import other_launcher

WITH_HOROVOD = os.environ.get(COLLECTIVES) not in ("mpi4py", ALONE)

if WITH_HOROVOD and importlib.util.find_spec("ringtrain_horovod"):
    import ringtrain_horovod

    # Installed after this process began, as by a cell of a notebook: Python has not read its .pth file.
    if importlib.util.find_spec("horovod") is None:
        sys.path.append(str(Path(ringtrain_horovod.__file__).parent / "packages"))
    # A Horovod that was built for another TensorFlow or MPI would fail without a reason.
    problem = ringtrain_horovod.problem() or other_launcher(os.environ, ringtrain_horovod.built_with()["mpi"])
    if problem:
        raise MissingDependency(for_this_environment(problem))

if TYPE_CHECKING or WITH_HOROVOD:
    import horovod.tensorflow as horovod
    from horovod.common.elastic import ObjectState as ObjectState
    from horovod.common.elastic import notification_manager as notification_manager
    from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
    from horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from horovod.runner.common.util import network as network
else:
    from ringtrain.hvd import mpi_backend as horovod


if TYPE_CHECKING:
    __getattr__: Any  # mypy then takes every name for Any, in whatever order it reads the modules
else:

    def __getattr__(name: str) -> Any:
        return getattr(horovod, name)


def configure(options: HvdConfig, environ: MutableMapping[str, str] | None = None) -> None:
    """Turns Horovod's tensor fusion off in deterministic mode, before `init`; raises ConfigError if it cannot."""
    if not options.deterministic:
        return
    # Timing decides which tensors share Horovod's buffer, and with more than two ranks the order of additions depends
    # on a value's position in the buffer.
    is_started = environ is None and horovod.is_initialized()
    environ = os.environ if environ is None else environ
    if environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        raise ConfigError(
            "hvd.deterministic: HOROVOD_AUTOTUNE changes the order of additions while it tries settings: unset it"
        )
    if is_started and environ.get("HOROVOD_FUSION_THRESHOLD") != "0":
        raise ConfigError(
            "hvd.deterministic: needs HOROVOD_FUSION_THRESHOLD=0, and Horovod was started in this process with"
            f" {environ.get('HOROVOD_FUSION_THRESHOLD', 'its default')}: set it in the environment, or start a process"
            " of its own for this run"
        )
    environ["HOROVOD_FUSION_THRESHOLD"] = "0"


def check_adasum(process_set: Any) -> None:
    """Raises ValueError for ranks between which Horovod has no Adasum, of which some would make MPI abort."""
    if not WITH_HOROVOD or not horovod.is_initialized():
        return
    size = process_set.size()
    if size > 1 and not horovod.mpi_enabled():
        raise ValueError("op=hvd.Adasum needs MPI, this run is over Gloo: use mpirun or horovodrun --mpi")
    if size & (size - 1) and not horovod.nccl_built():
        raise ValueError(f"op=hvd.Adasum needs a number of ranks that is a power of two, not {size}")
