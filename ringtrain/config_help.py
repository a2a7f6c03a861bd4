"""Texts about the configuration that follow from config.py: the help of each option."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_type_hints

import docstring_parser

from ringtrain.config import Config

COMMON = (
    *("run.name", "data.name", "data.dir", "model.name", "optimizer.name", "optimizer.learning_rate"),
    *("train.epochs", "train.batch_size", "train.precision", "train.patience"),
)
"""options that come first in the help, and in the configuration of ringtrain init"""


@functools.cache
def texts() -> dict[str, str]:
    """Help of every section ("data") and option ("data.name"), by dotted name, in the order of config.py.

    The help of an option is the string below its field, that of a section the docstring of its class.
    """
    found: dict[str, str] = {}

    def add(section: type[Any], prefix: str) -> None:
        written = {one.arg_name: one.description or "" for one in docstring_parser.parse_from_object(section).params}
        for name, kind in get_type_hints(section).items():
            if dataclasses.is_dataclass(kind):
                found[name] = kind.__doc__ or ""
                add(kind, f"{name}.")  # type: ignore[arg-type]
            else:
                found[prefix + name] = " ".join(written[name].split())

    add(Config, "")
    return found
