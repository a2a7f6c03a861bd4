"""The one table of options that do not go together: checked for every configuration, and printed by the help."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from ringtrain.errors import ConfigError

ELASTIC = "an elastic job"
"""in place of an option"""

_HOROVOD = (
    "hvd.op",
    "hvd.compression",
    "hvd.fusion_mb",
    "hvd.cycle_time_ms",
    "hvd.groups",
    "hvd.merge_rows",
    "train.virtual_ranks",
)
_NOT_IN_TENSORFLOW = (
    *_HOROVOD,
    "hvd.deterministic",
    "optimizer.accumulation_steps",
    "model.sync_batch_norm",
    "train.jit",
    "train.precision mixed_float16",
    "model.split",
    "model.micro_batches",
)
NOT_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "strategy.name mpi-ring": _HOROVOD,
    "strategy.name towers": _NOT_IN_TENSORFLOW,
    "strategy.name multi-worker": _NOT_IN_TENSORFLOW,
    "strategy.name ps": _NOT_IN_TENSORFLOW,
    ELASTIC: (
        "hvd.compression powersgd",
        "model.split",
        "optimizer.accumulation_steps",
    ),
    # Bits would depend on the number of ranks.
    "train.virtual_ranks": (
        "hvd.op",
        "hvd.compression",
        "hvd.groups",
        "data.name spark",
        "train.jit",
        "model.split",
        "model.micro_batches",
        "model.sync_batch_norm",
    ),
    # XLA has no kernel for an allreduce in the forward pass, nor for stages on several devices.
    "train.jit": ("model.sync_batch_norm", "model.split", "model.micro_batches"),
    "model.split": ("model.sync_batch_norm", "hvd.compression powersgd"),
    "model.micro_batches": ("model.sync_batch_norm",),
    # These reduce all gradients by themselves, or need every step.
    "hvd.compression powersgd": ("hvd.groups", "hvd.op adasum", "train.precision mixed_float16"),
    "hvd.compression bf16": ("hvd.groups", "hvd.op adasum"),
    "hvd.groups": ("hvd.deterministic", "hvd.op adasum"),
    "hvd.deterministic": ("hvd.fusion_mb",),
}
"""Each with what it does not go together with. An option: it has another value than by default; a word after its name:
a value that begins with this word."""


def check(config: Any, defaults: Mapping[str, Any], facts: Collection[str] = ()) -> None:
    """Raises ConfigError for the first two options, or facts such as ELASTIC, that do not go together."""
    for first, others in NOT_TOGETHER.items():
        if first in facts:
            one = first
        else:
            one = _given(config, defaults, first)
        if not one:
            continue
        for other in others:
            text = _given(config, defaults, other)
            if text:
                raise ConfigError(f"{one} and {text} do not go together: leave one out")


def _given(config: Any, defaults: Mapping[str, Any], condition: str) -> str:
    """The option of a condition with its value; "": it is not met."""
    option, _, word = condition.partition(" ")
    if option not in defaults:
        return ""
    value = attrgetter(option)(config)
    if value == defaults[option] or not str(value).startswith(word):
        return ""
    if isinstance(value, bool):
        return option
    return f"{option} {value}"


def lines(section: str = "") -> Iterator[str]:
    """Rows of the table as text: all, or those with an option of a section such as "model"."""
    for first, others in NOT_TOGETHER.items():
        shown = [other for other in others if first.startswith(section) or other.startswith(section)]
        if shown:
            yield f"{first}: not with {', '.join(shown)}"
