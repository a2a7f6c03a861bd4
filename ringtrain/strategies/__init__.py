"""Distribution strategies: which reduction of gradients (hvd/reduction.py), and where a step runs. All else is equal.

This module does not import TensorFlow: unsupported options are reported before it is loaded.

base:             base class: what a run asks of a strategy, and the proof line at its end
elastic:          ring whose ranks join and leave
ring:             one process per rank: ring over Horovod, mpi-ring over mpi4py
mirrored:         towers and multi-worker: their step under TensorFlow's strategies
parameter_server: ps-sync and ps-async
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringtrain.config import by_name, combinations
from ringtrain.config.sections import DEFAULTS, Config
from ringtrain.errors import ConfigError
from ringtrain.protocol.env import ALONE, COLLECTIVES, SERVERS

if TYPE_CHECKING:
    from ringtrain.strategies.base import Strategy
    from ringtrain.strategies.parameter_server.cluster import RankGroup


@dataclass(frozen=True)
class Kind:
    """Facts about a strategy that are needed before TensorFlow is loaded."""

    create: Callable[..., Strategy]
    """its class"""
    collectives: str = "mpi4py"
    """RINGTRAIN_COLLECTIVES; "": Horovod"""
    has_servers: bool = False
    """whether rank 0 coordinates servers and workers, and trains alone"""


def _class(path: str) -> Callable[..., Strategy]:
    """Constructor of a class in this folder, which is imported when it is called."""
    return by_name.find("strategy.name", f"ringtrain.strategies.{path}", {})


STRATEGIES = {
    "ring": Kind(_class("ring:Ring"), collectives=""),
    "mpi-ring": Kind(_class("ring:Ring")),
    "towers": Kind(_class("mirrored:Towers")),
    "multi-worker": Kind(_class("mirrored:MultiWorker")),
    "ps-async": Kind(_class("parameter_server.asynchronous:Asynchronous"), ALONE, has_servers=True),
    "ps-sync": Kind(_class("parameter_server.synchronous:Synchronous"), ALONE, has_servers=True),
}
"""strategy.name, and what it means; the configuration lists the names as choices"""


def prepare(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Selects the collectives, before ringtrain.hvd is loaded; raises ConfigError for servers that do not fit."""
    num_servers(config, environ)
    collectives = STRATEGIES[config.strategy.name].collectives
    if collectives:
        environ[COLLECTIVES] = collectives
    else:
        environ.pop(COLLECTIVES, None)


def num_servers(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Number of servers, from `ringtrain launch --ps` or the configuration; ConfigError if --ps conflicts with it."""
    launched, configured = int(environ.get(SERVERS, 0)), config.strategy.servers
    if launched and not STRATEGIES[config.strategy.name].has_servers:
        raise ConfigError(
            f"strategy.name: {config.strategy.name} has no parameter servers, which ringtrain launch --ps asks for:"
            f" leave out --ps, or train with ps-async or ps-sync"
        )
    if launched and configured not in (launched, Config().strategy.servers):
        raise ConfigError(
            f"strategy.servers: got {configured}, and ringtrain launch --ps {launched}: leave one of them out"
        )
    return launched or configured


def make(config: Config, group: RankGroup | None = None) -> Strategy:
    """Creates the configured strategy, after `prepare`. `group`: ranks of a job with parameter servers."""
    from ringtrain import hvd

    if hvd.elastic.is_on():
        combinations.check(config, DEFAULTS, [combinations.ELASTIC])
        return _class("elastic:Elastic")(config)
    create = STRATEGIES[config.strategy.name].create
    return create(config) if group is None else create(config, group)
