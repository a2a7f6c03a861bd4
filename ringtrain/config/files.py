"""Configuration from TOML files and the command line, which takes precedence; TOML output."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from ringtrain.config import help_texts
from ringtrain.config.options import Parser, add
from ringtrain.config.sections import OPTIONS, Config, nearest, option_types, value_of, with_values
from ringtrain.errors import ConfigError
from ringtrain.protocol.for_script import RUN, ForScript

PROGRAM = "python -m ringtrain.train"


def read(argv: Sequence[str]) -> Config:
    """Reads the configuration: the command line overrides its --config file, which overrides the defaults.

    Raises:
        ConfigError: Unknown option or key, or a value of the wrong type or out of range.
        SystemExit: After --help.
    """
    from_file = file_of(argv)
    if help_texts.asks_for_help(argv):
        description = "Trains a model, on one rank or, under a launcher, on many."
        help_texts.help_parser(argv, from_file, f"{PROGRAM} [--config FILE] [options]", description).print_help()
        raise SystemExit(0)

    parser = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    add(parser, OPTIONS.values())
    given, unknown = parser.parse_known_args(_with_hyphens(argv))
    unknown = [word for word in unknown if word != "--"]
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("--"):
            raise ConfigError(f"command line: got {name!r}, expected options such as --train.epochs 3 (see --help)")
        known = ["--help", "--config", *(f"--{option.replace('_', '-')}" for option in OPTIONS)]
        raise ConfigError(f"command line: unknown option {name}: {nearest(name.replace('_', '-'), known)} (see --help)")
    values: dict[str, Any] = {}
    for option, value in vars(given).items():
        if option in OPTIONS:
            values[option] = tuple(value) if isinstance(value, list) else value
    return with_values(from_file, values)


class _Parser(Parser):
    """Parser whose errors are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def _with_hyphens(argv: Sequence[str]) -> list[str]:
    """Options as their parser knows them: --train.batch_size, as in a file, is --train.batch-size."""
    flags = {flag for option in OPTIONS.values() for flag in option.flags}
    lists = {flag for option in OPTIONS.values() if option.num_values == "*" for flag in option.flags}
    words: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in flags:
            words.append(word)
        elif equals and flag in lists:  # further values may follow
            words += [flag, value]
        else:
            words.append(flag + equals + value)
    return words


def file_of(argv: Sequence[str]) -> Config:
    """Configuration of the file that --config names, else the defaults."""
    option = _Parser(add_help=False, allow_abbrev=False)
    option.add_argument("--config", nargs="?", default="")
    path = option.parse_known_args(argv)[0].config
    return read_toml(Path(path)) if path else Config()


def tables_of(path: Path) -> dict[str, Any]:
    """Parses a TOML file; raises ConfigError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        is_recipe = path.parts[:1] == ("configs",)
        hint = ""
        if is_recipe:
            hint = ": this recipe is in a clone of ringtrain; ringtrain init writes a config.toml"
        raise ConfigError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def read_toml(path: Path) -> Config:
    """Reads a TOML file over the defaults: each table is a section, each key an option. Raises ConfigError."""
    return from_tables(tables_of(path), str(path))


def from_tables(tables: Mapping[str, Any], path: str) -> Config:
    """Configuration of sections and their options, or of dotted options, over the defaults; `path` is for errors."""
    sections, options = get_type_hints(Config), option_types()
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in sections and section not in options:
            known = list(options if "." in section else sections)
            raise ConfigError(f"{path}: unknown key {section}: {nearest(section, known)}")
        if section not in options and not isinstance(table, dict):
            raise ConfigError(f"{path}: {section}: got {table!r}, expected a table: [{section}]")
        if section in options:
            in_table = {section: table}
        else:
            in_table = {f"{section}.{key}": table[key] for key in table}
        for option, value in in_table.items():
            values[option] = checked(path, option, value)
    try:
        return with_values(Config(), values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def of_command(config: Config) -> Config:
    """Configuration with the options and the folder that a command such as `ringtrain sweep` has chosen."""
    from_command = ForScript.from_environment()
    values = {name: checked(from_command.by, name, value) for name, value in from_command.options.items()}
    if from_command.folder:
        if config.run.resume != "auto":
            raise ConfigError(
                f"run.resume: got {config.run.resume} under {from_command.by}, whose runs resume: leave it out"
            )
        values |= {"run.directory": from_command.folder, "run.name": RUN, "run.mirror": ""}
    return with_values(config, values)


def to_toml(config: Config) -> str:
    """Complete configuration as TOML; `read_toml` returns the same Config."""
    lines: list[str] = []
    section = ""
    for option in option_types():
        table, _, key = option.rpartition(".")
        if table != section:
            section = table
            lines += ["", f"[{table}]"]
        lines.append(f"{key} = {toml_value(value_of(config, option))}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Value of an option as TOML, of which JSON's strings, numbers, booleans and lists are a part."""
    return json.dumps(value, ensure_ascii=False)


def checked(path: Path | str, option: str, value: Any) -> Any:
    """Returns the value in the option's type, or raises ConfigError. Integers are valid floats, booleans are not."""
    types = option_types()
    if option not in types:
        raise ConfigError(f"{path}: unknown key {option}: {nearest(option, list(types))}")
    kind = types[option]
    if get_origin(kind) is Literal:
        fits, expected = value in get_args(kind), "one of " + ", ".join(get_args(kind))
    elif kind is float:
        fits, expected = _is_number(value), "float"
    elif get_origin(kind) is tuple and get_args(kind)[0] is str:
        fits, expected = isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of words"
    elif get_origin(kind) is tuple:
        fits, expected = isinstance(value, list) and all(map(_is_number, value)), "a list of numbers"
    else:
        fits, expected = type(value) is kind, kind.__name__
    if not fits:
        raise ConfigError(f"{path}: {option}: got {value!r}, expected {expected}")
    if isinstance(value, list):
        return tuple(map(get_args(kind)[0], value))
    return float(value) if kind is float else value


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)
