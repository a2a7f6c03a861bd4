"""Distribution strategies: how gradients are reduced and where a step runs. The rest of a run is the same for all.

This module does not import TensorFlow: unsupported options are reported before it is loaded.

base:             base class: what a run asks of a strategy
ring:             one process per rank and Keras' fit: ring over Horovod, mpi-ring over mpi4py
mirrored:         towers and multi-worker: TensorFlow's strategies in a loop that calls Keras' callbacks
parameter_server: ps-sync and ps-async
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ringtrain.config import Config, value_of
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.protocol.env import ALONE, COLLECTIVES
from ringtrain.run import console
from ringtrain.strategies.parameter_server import cluster

if TYPE_CHECKING:
    from ringtrain.strategies.base import Strategy
    from ringtrain.strategies.parameter_server.cluster import RankGroup

_HOROVODS = ("hvd.op", "hvd.compression", "hvd.fusion_mb", "hvd.cycle_time_ms", "hvd.groups", "tracking.timeline_steps")
_TENSORFLOWS = (
    *(*_HOROVODS, "hvd.deterministic", "optimizer.accumulation_steps", "model.sync_batch_norm", "train.jit"),
    *("checkpoint.saved_model", "train.precision mixed_float16"),
)
REFUSED = {"ring": (), "mpi-ring": _HOROVODS}
REFUSED |= dict.fromkeys(("towers", "multi-worker", "ps-async", "ps-sync"), _TENSORFLOWS)
"""options that a strategy does not support; if a value follows the name, only that value"""
PARAMETER_SERVERS = ("ps-async", "ps-sync")
HOROVODS_VARIABLES = {
    "HOROVOD_ELASTIC": "ranks that come and go",
    "HOROVOD_TIMELINE": "a timeline",
    "HOROVOD_AUTOTUNE": "autotuning",
}


def prepare(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Selects the collectives, before ringtrain.hvd is loaded; raises ConfigError if an option is not supported."""
    name, defaults = config.strategy.name, Config()
    cluster.num_servers(config, environ)
    if name == "ring":
        environ.pop(COLLECTIVES, None)
        return
    for refused in REFUSED[name]:
        option, _, value = refused.partition(" ")
        found = value_of(config, option)
        if str(found) == value or (not value and found != value_of(defaults, option)):
            raise ConfigError(f"strategy.name: {name} has no {option} {found}: leave it out, or train with ring")
    for variable, what in HOROVODS_VARIABLES.items():
        if environ.get(variable, "0") not in ("", "0"):
            raise ConfigError(f"strategy.name: {name} has no {what} ({variable}): leave it out, or train with ring")
    environ[COLLECTIVES] = ALONE if name in PARAMETER_SERVERS else "mpi4py"


def meet(config: Config) -> RankGroup | None:
    """Rank group of a job with parameter servers, where only rank 0 trains; else None. See cluster.meet."""
    if config.strategy.name not in PARAMETER_SERVERS:
        return None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # otherwise servers print their settings
    if console.launched_rank() is None:
        count = cluster.num_servers(config)
        raise LaunchError(
            f"strategy.name: {config.strategy.name} has ranks for servers and workers, this is one process alone:"
            f" ringtrain launch --ps {count} --workers 2 -- python -m ringtrain.train ..."
        )
    if console.launched_rank() == 0:
        # On exit Open MPI calls its copy of hwloc, or TensorFlow's if that was loaded later.
        import tensorflow  # noqa: F401
    return cluster.meet(config)


def make(config: Config, crew: RankGroup | None = None) -> Strategy:
    """Creates the configured strategy, after `prepare`; `crew` is the result of `meet`."""
    if crew is not None:
        from ringtrain.strategies.parameter_server.asynchronous import Asynchronous
        from ringtrain.strategies.parameter_server.synchronous import Synchronous

        return {"ps-async": Asynchronous, "ps-sync": Synchronous}[config.strategy.name](config, crew)

    from ringtrain.strategies.ring import Ring

    kinds: dict[str, Any] = {"ring": Ring, "mpi-ring": Ring}
    if config.strategy.name not in kinds:
        from ringtrain.strategies.mirrored import MultiWorker, Towers

        kinds |= {"towers": Towers, "multi-worker": MultiWorker}
    strategy: Strategy = kinds[config.strategy.name](config)
    return strategy
