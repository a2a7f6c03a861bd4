"""Compressions of gradients by name."""

from __future__ import annotations

from typing import Any

from ringtrain.hvd.backend import Compression as HorovodsOwn
from ringtrain.hvd.powersgd import PowerSGD


class Compression(HorovodsOwn):
    """Compressions for `DistributedOptimizer(compression=...)`: `none`, `fp16`, or `powersgd(rank)`.

    Example:
        >>> hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.powersgd(4))
    """

    @staticmethod
    def powersgd(rank: int, min_ratio: float = 2.0) -> PowerSGD:
        """Low-rank approximations of gradients: see `PowerSGD`."""
        return PowerSGD(rank, min_ratio)

    @classmethod
    def named(cls, name: str) -> Any:
        """Compression of a name as in the option `hvd.compression`: none, fp16, powersgd:4, ..."""
        kind, _, number = name.partition(":")
        made = getattr(cls, kind)
        return made(int(number)) if number else made
