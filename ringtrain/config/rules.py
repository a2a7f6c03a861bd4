"""Rules and requirements of options, which stand beside an option's field: `Annotated[int, AT_LEAST_1, needs(...)]`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from ringtrain.config.options import Rule
from ringtrain.errors import ConfigError


class Need(NamedTuple):
    """Other options without which an option has no effect, in words, and the check of a configuration."""

    text: str
    is_met: Callable[[Any], bool]


FINITE = Rule("a number from 0 on", lambda value: 0 <= value < math.inf)
ABOVE_0 = Rule("a number above 0", lambda value: 0 < value < math.inf)
SHARE = Rule("0 to 1", lambda value: 0 <= value <= 1)
BELOW_1 = Rule("0 up to 1, 1 excluded", lambda value: 0 <= value < 1)
FACTOR_OR_0 = Rule("0, or a number above 1", lambda value: value == 0 or 1 < value < math.inf)
POWERS_OF_2 = [2**exponent for exponent in range(13)]
POWER_OF_2_OR_0 = Rule("0, or 1, 2, 4, ... up to 4096", lambda value: value == 0 or value in POWERS_OF_2)
SEED = Rule("0 to 4294967295", lambda value: 0 <= value < 2**32)
PIXELS_OR_0 = Rule("0, or 4 or more", lambda value: value == 0 or value >= 4)
FOLDER_NAME = Rule("a name, not a path", lambda value: "/" not in value and value not in (".", ".."))
DEVICE = Rule(
    "cpu:0, gpu:0, gpu:1, ...", lambda value: value == "cpu:0" or (value[:4] == "gpu:" and value[4:].isdecimal())
)
SPLIT = Rule(
    "layers:2, columns:2, ...",
    lambda value: re.fullmatch("|(layers|columns):([2-9]|[1-9][0-9]+)", value) is not None,
)
COMPRESSION = Rule(
    "none, fp16, powersgd:1, powersgd:2, ...",
    lambda value: re.fullmatch("none|fp16|powersgd:[1-9][0-9]*", value) is not None,
)
ASCENDING_EPOCHS = Rule(
    "epochs above 0, each after the one before",
    lambda value: all(0 < one < math.inf for one in value) and list(value) == sorted(set(value)),
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


def check_values(config: Any) -> None:
    """Raises ConfigError for a value that another option limits."""
    if config.train.batch_size < config.model.micro_batches:
        raise ConfigError(
            f"model.micro_batches: got {config.model.micro_batches}, expected no more than train.batch_size,"
            f" {config.train.batch_size}"
        )
    warmup, milestones = config.schedule.warmup_epochs, config.schedule.milestones
    if warmup > config.train.epochs:
        epochs = config.train.epochs
        raise ConfigError(f"schedule.warmup_epochs: got {warmup:g}, expected no more than train.epochs ({epochs})")
    if config.schedule.name == "steps" and not milestones:
        raise ConfigError("schedule.name: steps needs schedule.milestones: give epochs such as 30 60 80")
    if milestones and milestones[0] < warmup:
        within = f"within the warm-up (schedule.warmup_epochs {warmup:g})"
        raise ConfigError(f"schedule.milestones: got {milestones[0]:g}, expected none {within}")


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
