"""Options of a command, declared once as the fields of a frozen dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeVar, get_type_hints

from ringtrain.errors import LaunchError

T = TypeVar("T")


def option(default: Any, text: str, metavar: str | None = None, *, least: int | None = None, **rules: Any) -> Any:
    """Field of a dataclass that is an option.

    Args:
        default: dataclasses.MISSING: the option is required.
        least: Smallest valid value.
        rules: Further arguments of add_argument; group: title of its group; nargs: it is positional.
    """
    return dataclasses.field(
        default=default, metadata={"help": text, "metavar": metavar, "least": least, "rules": rules}
    )


def turns(number: int) -> Any:
    """Option for the number of rounds."""
    return count(number, "measurements of each kind, in turns")


def count(number: int, text: str) -> Any:
    """Option for a number of at least 1."""
    return option(number, f"{text} ({number})", "N", least=1)


def out() -> Any:
    """Option for the file of results."""
    return option("", "write the results as JSON", "FILE")


def plot() -> Any:
    """Option for the file of a plot."""
    return option("", "draw them as PNG", "FILE")


def flag_of(name: str) -> str:
    """Command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def add(parser: argparse.ArgumentParser, options: type, title: str = "") -> None:
    """Adds the fields of a dataclass to a parser, in a group with this title, if there is one."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser.add_argument_group(title) if title else parser}
    kinds = get_type_hints(options)
    for field in dataclasses.fields(options):
        rules = {"help": field.metadata["help"], **field.metadata["rules"]}
        title = rules.pop("group", "")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if "nargs" in rules:
            rules |= {"metavar": field.metadata["metavar"], "default": field.default}
            groups[title].add_argument(field.name, **rules)
        elif kinds[field.name] is bool:
            groups[title].add_argument(flag_of(field.name), action="store_true", **rules)
        else:
            rules |= {"metavar": field.metadata["metavar"], "type": kinds[field.name]}
            if field.default is dataclasses.MISSING:
                rules["required"] = True
            elif parser.argument_default is not argparse.SUPPRESS:
                rules["default"] = field.default
            groups[title].add_argument(flag_of(field.name), **rules)


def read(options: type[T], given: argparse.Namespace) -> T:
    """Builds the dataclass from parsed arguments; omitted ones have their defaults."""
    values = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if hasattr(given, field.name):
            values[field.name] = value = getattr(given, field.name)
            if field.metadata["least"] is not None and value < field.metadata["least"]:
                least = max(1, field.metadata["least"])
                raise LaunchError(f"got {flag_of(field.name)} {value}, expected {least} or more")
    return options(**values)


def by_flag(options: Any) -> dict[str, Any]:
    """Values by flag, without the file of results."""
    return {flag_of(name): value for name, value in vars(options).items() if name != "out"}


def seconds_of(text: str) -> float:
    """Converts "300", "300s", "5m" or "1h" to seconds."""
    number, factor = (text[:-1], {"s": 1, "m": 60, "h": 3600}[text[-1]]) if text[-1:] in ("s", "m", "h") else (text, 1)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"got --budget {text}, expected a time such as 90s, 5m or 1h")
    return seconds
