"""Rules and requirements of options, which stand beside an option's field: `Annotated[int, AT_LEAST_1, needs(...)]`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from ringtrain import compressions
from ringtrain.errors import ConfigError
from ringtrain.options import Rule


class Need(NamedTuple):
    """Other options without which an option has no effect, in words, and the check of a configuration."""

    text: str
    is_met: Callable[[Any], bool]


def _or(other: float, **schema: float) -> dict[str, Any]:
    return {"anyOf": [{"const": other}, schema]}


FINITE = Rule("a number from 0 on", lambda value: 0 <= value < math.inf, {"minimum": 0})
FINITE_OR_UNSET = Rule("0 or more, or -1", lambda value: value == -1 or 0 <= value < math.inf, _or(-1, minimum=0))
ABOVE_0 = Rule("a number above 0", lambda value: 0 < value < math.inf, {"exclusiveMinimum": 0})
SHARE = Rule("0 to 1", lambda value: 0 <= value <= 1, {"minimum": 0, "maximum": 1})
BELOW_1 = Rule("0 up to 1, 1 excluded", lambda value: 0 <= value < 1, {"minimum": 0, "exclusiveMaximum": 1})
WITHIN_0_AND_1 = Rule("above 0, below 1", lambda value: 0 < value < 1, {"exclusiveMinimum": 0, "exclusiveMaximum": 1})
FACTOR_OR_0 = Rule(
    "0, or a number above 1", lambda value: value == 0 or 1 < value < math.inf, _or(0, exclusiveMinimum=1)
)
POWERS_OF_2 = [2**exponent for exponent in range(13)]
POWER_OF_2_OR_0 = Rule(
    "0, or 1, 2, 4, ... up to 4096", lambda value: value == 0 or value in POWERS_OF_2, {"enum": [0, *POWERS_OF_2]}
)
SEED = Rule("0 to 4294967295", lambda value: 0 <= value < 2**32, {"minimum": 0, "maximum": 2**32 - 1})
PIXELS_OR_0 = Rule("0, or 4 or more", lambda value: value == 0 or value >= 4, _or(0, minimum=4))
FOLDER_NAME = Rule(
    "a name, not a path",
    lambda value: "/" not in value and value not in (".", ".."),
    {"pattern": r"^(?!\.{1,2}$)[^/]*$"},
)
DEVICE = Rule(
    "cpu:0, gpu:0, gpu:1, ...",
    lambda value: value == "cpu:0" or (value[:4] == "gpu:" and value[4:].isdecimal()),
    {"pattern": "^(cpu:0|gpu:[0-9]+)$"},
)
SPLITS = "|(layers|columns):([2-9]|[1-9][0-9]+)"
SPLIT = Rule(
    "layers:2, columns:2, ...",
    lambda value: re.fullmatch(SPLITS, value) is not None,
    {"pattern": f"^({SPLITS})$"},
)
COMPRESSION = Rule(
    compressions.EXAMPLES,
    lambda value: re.fullmatch(compressions.PATTERN, value) is not None,
    {"pattern": f"^({compressions.PATTERN})$"},
)
ASCENDING_EPOCHS = Rule(
    "epochs above 0, each after the one before",
    lambda value: all(0 < one < math.inf for one in value) and list(value) == sorted(set(value)),
    {"items": {"type": "number", "exclusiveMinimum": 0}, "uniqueItems": True},  # it has no keyword for their order
)


def needs(option: str, *values: str) -> Need:
    """Requirement that `option` has one of `values`, or names a function of the user's, which may use any option."""
    read = attrgetter(option)
    return Need(f"{option} {_either(values)}", lambda config: read(config) in values or ":" in read(config))


def needs_other(option: str, *values: str) -> Need:
    """Requirement that `option` has none of `values`."""
    read = attrgetter(option)
    return Need(f"{option} other than {_either(values)}", lambda config: read(config) not in values)


def needs_above_0(*options: str) -> Need:
    """Requirement that at least one of `options` is positive."""
    return Need(f"{_either(options)} above 0", lambda config: any(attrgetter(option)(config) > 0 for option in options))


def check_together(config: Any) -> None:
    """Raises ConfigError for values that cannot be combined."""
    if config.device.memory_fraction and config.device.memory_mb:
        raise ConfigError("device.memory_fraction and device.memory_mb are both set: keep one, set the other to 0")
    if config.train.jit and config.model.sync_batch_norm:
        raise ConfigError(
            "train.jit and model.sync_batch_norm are both set: synchronized batch norm needs an allreduce in the"
            " forward pass, for which XLA has no kernel: keep one"
        )
    if config.model.split or config.model.micro_batches > 1:
        for option in ("train.jit", "optimizer.jit", "model.sync_batch_norm"):
            if attrgetter(option)(config):
                raise ConfigError(f"model.split and model.micro_batches do not work with {option}: leave one out")
        if config.train.batch_size < config.model.micro_batches:
            raise ConfigError(
                f"model.micro_batches: got {config.model.micro_batches}, expected no more than train.batch_size,"
                f" {config.train.batch_size}"
            )
    if config.train.virtual_ranks:
        _check_virtual_ranks(config)
    _check_compression(config)
    if config.hvd.deterministic and config.hvd.fusion_mb > 0:
        raise ConfigError("hvd.deterministic and hvd.fusion_mb are both set: deterministic runs fuse nothing")
    if config.hvd.groups and config.hvd.deterministic:
        raise ConfigError("hvd.deterministic and hvd.groups are both set: deterministic runs send all as one")
    if config.hvd.groups and config.hvd.op == "adasum":
        raise ConfigError("hvd.op adasum and hvd.groups are both set: Adasum combines tensor by tensor")
    warmup, milestones = config.schedule.warmup_epochs, config.schedule.milestones
    if warmup > config.train.epochs:
        epochs = config.train.epochs
        raise ConfigError(f"schedule.warmup_epochs: got {warmup:g}, expected no more than train.epochs ({epochs})")
    if config.schedule.name == "steps" and not milestones:
        raise ConfigError("schedule.name: steps needs schedule.milestones: give epochs such as 30 60 80")
    if milestones and milestones[0] < warmup:
        within = f"within the warm-up (schedule.warmup_epochs {warmup:g})"
        raise ConfigError(f"schedule.milestones: got {milestones[0]:g}, expected none {within}")


def _check_compression(config: Any) -> None:
    """Raises ConfigError for options that compression does not work with."""
    compression = compressions.kind_of(config.hvd.compression)
    refused = {
        "hvd.groups": not compression.is_cast and config.hvd.groups,
        "model.split": compression.keeps_errors and config.model.split,
        "hvd.op adasum": not compression.is_cast and config.hvd.op == "adasum",
    }
    for option, is_set in refused.items():
        if is_set:
            raise ConfigError(f"hvd.compression {config.hvd.compression} does not work with {option}: leave one out")
    if compression.keeps_errors and config.train.precision == "mixed_float16":
        raise ConfigError(
            f"hvd.compression {config.hvd.compression} does not work with train.precision mixed_float16: use"
            " mixed_bfloat16"
        )


_OF_A_RANK = ("split", "sync_batch_norm", "not_averaged")


def _check_virtual_ranks(config: Any) -> None:
    """Raises ConfigError for options with which bits would depend on the number of ranks, or other steps are made."""
    refused = {
        "hvd.op": config.hvd.op != "average",
        "hvd.compression": config.hvd.compression != "none",
        "data.on_error": config.data.on_error != "fail",
    }
    options = (
        "hvd.groups",
        "train.jit",
        "tracking.timeline_steps",
        *(f"model.{one}" for one in _OF_A_RANK),
    )
    refused |= {option: bool(attrgetter(option)(config)) for option in options}
    refused["model.micro_batches"] = config.model.micro_batches > 1
    for option, is_set in refused.items():
        if is_set:
            value = attrgetter(option)(config)
            raise ConfigError(f"train.virtual_ranks does not work with {option} {value}: leave one out")


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
