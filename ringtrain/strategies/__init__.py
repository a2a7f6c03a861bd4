"""Ways to train the same job: what adds up gradients, and who runs a step. The rest of the walk is the same for all.

No TensorFlow here: what a strategy cannot do is said before anything is loaded.

ring:             a process per rank and Keras' fit: ring over Horovod, mpi-ring without
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
    from ringtrain.strategies.parameter_server.cluster import RankGroup
    from ringtrain.strategies.ring import Ring

_HOROVODS = ("hvd.op", "hvd.compression", "hvd.fusion_mb", "hvd.cycle_time_ms", "hvd.groups", "tracking.timeline_steps")
_TENSORFLOWS = (
    *(*_HOROVODS, "hvd.deterministic", "optimizer.accumulation_steps", "model.sync_batch_norm", "train.jit"),
    *("checkpoint.saved_model", "train.precision mixed_float16"),
)
REFUSED = {"ring": (), "mpi-ring": _HOROVODS}
REFUSED |= dict.fromkeys(("towers", "multi-worker", "ps-async", "ps-sync"), _TENSORFLOWS)
"""options that a strategy cannot have; those with a word behind them, that value alone"""
PARAMETER_SERVERS = ("ps-async", "ps-sync")
HOROVODS_VARIABLES = {
    "HOROVOD_ELASTIC": "ranks that come and go",
    "HOROVOD_TIMELINE": "a timeline",
    "HOROVOD_AUTOTUNE": "autotuning",
}


def prepare(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Refuses what a strategy cannot do, and says what ranks are to talk by; before ringtrain.hvd is loaded.

    Raises:
        ConfigError: names the option or the variable.
    """
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
    """Who does what among the ranks, where they do not all do the same. A collective; after `prepare`.

    Returns:
        All ranks of a job with parameter servers, of which rank 0 alone trains; None: every rank trains.

    Raises:
        RingtrainError: on every rank: they cannot take those roles.
    """
    if config.strategy.name not in PARAMETER_SERVERS:
        return None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # servers would print their settings
    if console.launched_rank() is None:
        count = cluster.num_servers(config)
        raise LaunchError(
            f"strategy.name: {config.strategy.name} has ranks for servers and workers, this is one process alone:"
            f" ringtrain launch --ps {count} --workers 2 -- python -m ringtrain.train ..."
        )
    if console.launched_rank() == 0:
        # Open MPI calls its copy of hwloc when it ends, and TensorFlow's if that was loaded later.
        import tensorflow  # noqa: F401
    return cluster.meet(config)


def make(config: Config, crew: RankGroup | None = None) -> Ring:
    """The configured strategy, after `prepare`.

    Args:
        crew: from `meet`.
    """
    from ringtrain.strategies.ring import Ring

    if crew is not None:
        from ringtrain.strategies.parameter_server.asynchronous import Asynchronous
        from ringtrain.strategies.parameter_server.synchronous import Synchronous

        return {"ps-async": Asynchronous, "ps-sync": Synchronous}[config.strategy.name](config, crew)

    kinds: dict[str, Any] = {"ring": Ring, "mpi-ring": Ring}
    if config.strategy.name not in kinds:
        from ringtrain.strategies.mirrored import MultiWorker, Towers

        kinds |= {"towers": Towers, "multi-worker": MultiWorker}
    strategy: Ring = kinds[config.strategy.name](config)
    return strategy
