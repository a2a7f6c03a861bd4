"""Texts about the configuration that follow from sections.py: help, and words for completion."""

from __future__ import annotations

import argparse
import functools
import shutil
import textwrap
import types
from collections.abc import Sequence
from typing import Any

from ringtrain.config import combinations
from ringtrain.config.options import Parser, add
from ringtrain.config.sections import OPTIONS, Config, nearest, option_types, value_of
from ringtrain.errors import ConfigError

COMMON = (
    "data.name",
    "data.dir",
    "model.name",
    "train.epochs",
    "train.batch_size",
    "optimizer.name",
    "optimizer.learning_rate",
    "train.precision",
    "train.patience",
    "run.name",
)
"""options that come first in the help, and in the configuration of ringtrain init"""
GENERAL = "general"
"""section of the options that have none"""
ALL = "all"
"""word for all sections"""


@functools.cache
def texts() -> types.MappingProxyType[str, str]:
    """Help of each section ("data"), from its class, and option ("data.name"), from below its field, by dotted name."""
    found: dict[str, str] = {}
    for name, option in OPTIONS.items():
        section = name.rpartition(".")[0]
        if section:
            found.setdefault(section, str(option.owner.__doc__))
        found[name] = option.help
    return types.MappingProxyType(found)


def sections() -> dict[str, str]:
    """Name and help of each section."""
    known = {option.rpartition(".")[0] for option in option_types()}
    return {GENERAL: "Options without a section."} | {name: text for name, text in texts().items() if name in known}


# ---- help ---------------------------------------------------------------------------------------------------------


def asks_for_help(words: Sequence[str]) -> bool:
    """Returns whether a command line of the trainer asks for help instead of training."""
    return not {"-h", "--help"}.isdisjoint(words)


def help_parser(words: Sequence[str], config: Config, usage: str, description: str) -> Parser:
    """Parser whose help a command line asks for; defaults are those of `config`. ConfigError: no such section."""
    at = next(place for place, word in enumerate(words) if word in ("-h", "--help"))
    section = next((word for word in words[at + 1 : at + 2] if not word.startswith("-")), "")
    known = [*sections(), ALL]
    if section and section not in known:
        raise ConfigError(f"--help {section}: no section of the configuration: {nearest(section, known)}")
    width = shutil.get_terminal_size().columns - 2
    lines = [f"  {name:<22}{text}" for name, text in sections().items()]
    lines = [textwrap.fill(line, width, subsequent_indent=" " * 24, drop_whitespace=True) for line in lines]
    epilog = "\n".join(
        ["sections:", *lines, "", f"--help SECTION prints the options of one, --help {ALL} those of all"]
    )
    values = {name: value_of(config, name) for name in OPTIONS}
    around: dict[str, Any] = {}
    apart = [
        textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    ")
        for line in combinations.lines("" if section == ALL else section)
    ]
    if section and apart:
        around = {"epilog": "\n".join(["do not go together:", *apart])}
    if not section:
        around = {"description": description, "epilog": epilog}
    parser = Parser(
        usage=usage,
        **around,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    if not section:
        group = parser.add_argument_group("common options")
        group.add_argument("--config", metavar="FILE", help="TOML file of options; the command line wins over it")
        add(group, [OPTIONS[name] for name in COMMON], values=values)
    for name, text in sections().items():
        if section in (name, ALL):
            group = parser.add_argument_group(f"{name} options", text)
            prefix = "" if name == GENERAL else name
            listed = [option for option in OPTIONS.values() if option.name.rpartition(".")[0] == prefix]
            add(group, listed, values=values)
    return parser
