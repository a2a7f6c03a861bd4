"""Rules and requirements of options, which stand beside an option's field: `Annotated[int, AT_LEAST_1, needs(...)]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False)  # in Annotated it must have a hash, which its schema has not
class Rule:
    """Values that an option may have, in words, the check of a value, and keywords of JSON schema that say the same."""

    text: str
    holds: Callable[[Any], bool]
    schema: Mapping[str, Any]


class Need(NamedTuple):
    """Other options without which an option has no effect, in words, and the check of a configuration."""

    text: str
    is_met: Callable[[Any], bool]


def at_least(least: int) -> Rule:
    """Rule of a number with a lower limit."""
    return Rule(f"{least} or more", lambda value: value >= least, {"minimum": least})


def _or(other: float, **schema: float) -> dict[str, Any]:
    return {"anyOf": [{"const": other}, schema]}


AT_LEAST_0, AT_LEAST_1 = at_least(0), at_least(1)
FINITE = Rule("a number from 0 on", lambda value: 0 <= value < math.inf, {"minimum": 0})
FINITE_OR_UNSET = Rule("0 or more, or -1", lambda value: value == -1 or 0 <= value < math.inf, _or(-1, minimum=0))
ABOVE_0 = Rule("a number above 0", lambda value: 0 < value < math.inf, {"exclusiveMinimum": 0})
SHARE = Rule("0 to 1", lambda value: 0 <= value <= 1, {"minimum": 0, "maximum": 1})
BELOW_1 = Rule("0 up to 1, 1 excluded", lambda value: 0 <= value < 1, {"minimum": 0, "exclusiveMaximum": 1})
WITHIN_0_AND_1 = Rule("above 0, below 1", lambda value: 0 < value < 1, {"exclusiveMinimum": 0, "exclusiveMaximum": 1})
FACTOR_OR_0 = Rule(
    "0, or a number above 1", lambda value: value == 0 or 1 < value < math.inf, _or(0, exclusiveMinimum=1)
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


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
