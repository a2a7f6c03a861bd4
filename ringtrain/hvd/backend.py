"""Source of Horovod's names: Horovod, or `mpi_backend.py` if RINGTRAIN_COLLECTIVES=mpi4py is set before the import."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.config import HvdConfig
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
    """Sets Horovod's environment variables from the configuration; call it before `init`, on every rank.

    Deterministic mode turns tensor fusion off. Timing decides which tensors share Horovod's buffer, and with more than
    two ranks the order of additions depends on a value's position in the buffer.

    Args:
        options: Values that are set override the environment.
        environ: Environment to change. None: that of this process.

    Raises:
        ConfigError: Deterministic mode with Horovod's autotuning, which changes the order of additions during the run;
            or Horovod was started in this process with other values.
    """
    is_started = environ is None and horovod.is_initialized()
    environ = os.environ if environ is None else environ
    wanted: dict[str, tuple[str, str]] = {}
    if options.fusion_mb >= 0:
        wanted["HOROVOD_FUSION_THRESHOLD"] = "hvd.fusion_mb", str(round(options.fusion_mb * 2**20))
    if options.cycle_time_ms >= 0:
        wanted["HOROVOD_CYCLE_TIME"] = "hvd.cycle_time_ms", str(options.cycle_time_ms)
    if options.deterministic:
        if environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
            raise ConfigError(
                "hvd.deterministic: HOROVOD_AUTOTUNE changes the order of additions while it tries settings: unset it"
            )
        wanted["HOROVOD_FUSION_THRESHOLD"] = "hvd.deterministic", "0"
    for variable, (option, value) in wanted.items():
        if is_started and environ.get(variable) != value:
            raise ConfigError(
                f"{option}: needs {variable}={value}, and Horovod was started in this process with"
                f" {environ.get(variable, 'its default')}: set it in the environment, or start a process of its own for"
                f" this run"
            )
        environ[variable] = value


def check_op(options: HvdConfig) -> None:
    """Raises ConfigError, on every rank, for Adasum without MPI or with a size that is no power of two."""
    size = horovod.size()
    if options.op == "adasum" and size & (size - 1):
        raise ConfigError(f"hvd.op: adasum needs a number of ranks that is a power of two, this run has {size}")
    if options.op == "adasum" and size > 1 and not horovod.mpi_enabled():
        raise ConfigError("hvd.op: adasum needs MPI, this run is over Gloo: use mpirun or horovodrun --mpi")
