"""Options: fields of frozen dataclasses, as words of a command line. The string below a field is its help.

    np: Annotated[int | None, Argument("N", ("-np",)), AT_LEAST_1] = None
    \"\"\"number of ranks; none: all slots\"\"\"

A dataclass in a dataclass is a section, and its options have dotted names: --train.epochs.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

from ringtrain.errors import LaunchError

T = TypeVar("T")
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


# ---- what may stand beside a field ----------------------------------------------------------------------------------


class Argument(NamedTuple):
    """How an option is written on the command line."""

    metavar: str | tuple[str, ...]
    flags: tuple[str, ...] = ()
    """instead of `--` and the name of the field"""
    choices: tuple[str, ...] = ()
    is_positional: bool = False
    is_repeated: bool = False
    """each value has the flag before it: --forward A --forward B"""
    may_be_option: bool = False
    """its value may begin with "--", as an option of another program"""


@dataclass(frozen=True)
class Rule:
    """Values that an option may have, in words, and the check of a value."""

    text: str
    holds: Callable[[Any], bool]


class NotWith(NamedTuple):
    """Another option of the same class that may not be given as well."""

    name: str


def at_least(least: int) -> Rule:
    """Rule of a number with a lower limit."""
    return Rule(f"{least} or more", lambda value: value >= least)


AT_LEAST_0, AT_LEAST_1 = at_least(0), at_least(1)
SECONDS = Rule("a number of seconds above 0", lambda value: 0 < value < math.inf)
N, X, FILE, LIST, NAME = Argument("N"), Argument("X"), Argument("FILE"), Argument("LIST"), Argument("NAME")


# ---- declarations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option, as its field declares it."""

    name: str
    """with the name of its section, if it has one: train.epochs"""
    kind: Any
    default: Any
    """MISSING: it must be given"""
    notes: tuple[Any, ...]
    owner: type
    """dataclass of the field"""

    def note(self, kind: type[T]) -> T | None:
        """The note of a kind beside the field, or None."""
        return next((note for note in self.notes if isinstance(note, kind)), None)

    @property
    def rule(self) -> Rule | None:
        return self.note(Rule)

    @property
    def argument(self) -> Argument:
        return self.note(Argument) or Argument(METAVARS.get(self.single, ""))

    @property
    def single(self) -> Any:
        """Type of one value: of `int | None` and `tuple[int, ...]` it is int."""
        if get_origin(self.kind) in (types.UnionType, tuple):
            return get_args(self.kind)[0]
        return self.kind

    @property
    def flags(self) -> tuple[str, ...]:
        """Words of the command line: `--jit`; of a section `--train.jit` and `--train.no-jit`."""
        argument = self.argument
        if argument.flags or argument.is_positional:
            return argument.flags
        section, dot, key = self.name.replace("_", "-").rpartition(".")
        if self.kind is bool and dot:
            return f"--{section}.{key}", f"--{section}.no-{key}"
        if self.kind is bool and self.default:
            return (f"--no-{key}",)
        return (f"--{section}{dot}{key}",)

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that it may have; empty: any of its type."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        return self.argument.choices

    @property
    def num_values(self) -> int | Literal["*"] | None:
        """Number of words that follow the flag; None: one word, which is not a list."""
        if self.kind is bool:
            return 0
        if get_origin(self.kind) is not tuple or self.argument.is_repeated:
            return None
        values = get_args(self.kind)
        return "*" if values[-1] is ... else len(values)

    @property
    def help(self) -> str:
        """The string below the field."""
        key = self.name.rpartition(".")[2]
        return _strings_below_fields(self.owner.__module__).get((self.owner.__name__, key), "")


def options_of(*classes: Any) -> Mapping[str, Option]:
    """All options of dataclasses, by name, in the order of their fields."""
    found: dict[str, Option] = {}
    for options in classes:
        found |= _options_of(options)
    return found


@functools.cache
def _options_of(options: type, prefix: str = "") -> dict[str, Option]:
    found: dict[str, Option] = {}
    kinds = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            found |= _options_of(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        notes = getattr(kind, "__metadata__", ())
        owner = next(base for base in options.__mro__ if field.name in inspect.get_annotations(base))
        plain = get_args(kind)[0] if notes else kind
        found[prefix + field.name] = Option(prefix + field.name, plain, field.default, notes, owner)
    return found


def title_of(options: type) -> str:
    """Title of a group of options in the help: the docstring of its dataclass."""
    return str(options.__doc__).removesuffix(".")


@functools.cache
def _strings_below_fields(module: str) -> dict[tuple[str, str], str]:
    """Strings below the fields of a module's classes, by class and field."""
    strings: dict[tuple[str, str], str] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # compiled files alone are installed
        return strings
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in itertools.pairwise(node.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    strings[node.name, name] = " ".join(text.split())
    return strings


# ---- the command line -----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parser whose errors are LaunchErrors of one line. Its result has the options that were given, and no others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"argument_default": argparse.SUPPRESS, **settings})

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (?:COMMAND|KIND): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            name, known = wrong.groups()
            hint = nearest(name, known.replace("'", "").split(", "))
            raise LaunchError(f"got {name}, {hint} (see {self.prog} --help)")
        raise LaunchError(f"{message}: see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses, with the values of options whose value may be an option attached to their flags."""
        attached: set[str] = set()
        for action in self._actions:
            if vars(action).get("may_be_option"):
                attached |= {*action.option_strings}
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if words and words[-1] in attached:
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)


class Group(Protocol):
    """Parser, or a group of its options."""

    def add_argument(self, *flags: str, **keywords: Any) -> Any: ...


def add(group: Group, options: Iterable[Option], values: Any = None) -> None:
    """Adds options to a parser, or to a group of it. Help shows `values`, by name, as defaults, not the fields'."""
    for option in options:
        argument, default = option.argument, option.default
        if values is not None:
            default = values[option.name]
        keywords: dict[str, Any] = {"help": _help_with_default(option, default)}
        if argument.is_positional:
            keywords["nargs"] = "*" if option.num_values == "*" else "?"
            group.add_argument(option.name, metavar=argument.metavar, **keywords)
            continue
        keywords |= {"dest": option.name, "required": option.default is MISSING}
        if option.kind is bool:
            keywords["action"] = _Switch
        elif option.choices:
            keywords["choices"] = option.choices
        else:
            keywords |= {"metavar": argument.metavar, "type": option.single}
        if argument.is_repeated:
            keywords["action"] = "append"
        elif option.num_values is not None:
            keywords["nargs"] = option.num_values
        action = group.add_argument(*option.flags, **keywords)
        action.may_be_option = argument.may_be_option


class _Switch(argparse.Action):
    """Sets an option to True, or by its flag with `no-` to False."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        key = str(option_string).lstrip("-").rpartition(".")[2]
        setattr(namespace, self.dest, not key.startswith("no-"))


def _help_with_default(option: Option, default: Any) -> str:
    text = option.help.replace("%", "%%")
    is_plain_flag = option.kind is bool and len(option.flags) == 1
    if default in (MISSING, None, "", ()) or is_plain_flag:
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})"


def before_program(
    words: Sequence[str], options: Mapping[str, Option], ends_at_unknown: bool = False
) -> tuple[Sequence[str], Sequence[str]]:
    """Divides a command line into its own options, and a program with the program's options."""
    # The program begins after "--", or with the first word that belongs to no option.
    by_flag = {flag: option for option in options.values() for flag in option.flags}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        flag, has_value, _ = words[index].partition("=")
        option = by_flag.get(flag)
        if option is None and ends_at_unknown:
            break
        if option is None:  # abbreviated; or unknown, which the parser says
            option = next((by_flag[known] for known in by_flag if known.startswith(flag)), None)
        index += 1
        if option is not None and not has_value:
            num_values = option.num_values
            index += 1 if num_values is None else int(num_values)
    index = min(index, len(words))
    own, program = words[:index], words[index:]
    return own, program[1:] if program[:1] == ["--"] else program


def refuse_dashes(words: Sequence[str]) -> None:
    """Raises LaunchError for "--" as the value of an option, which argparse would remove."""
    for word, after in itertools.pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        if flag.startswith("-") and "--" in (value, after):
            raise LaunchError(f"argument {flag}: expected a value, got '--'")


def read(options: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """Builds a dataclass from given options, of which it may have only some, and other values. Raises LaunchError."""
    given: dict[str, Any] = {}
    for name, option in options_of(options).items():
        if name not in values:
            continue
        given[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
        excluded = option.note(NotWith)
        if excluded and excluded.name in values:
            other = options_of(options)[excluded.name].flags[-1]
            raise LaunchError(f"argument {'/'.join(option.flags)}: not allowed with argument {other}")
    made = options(**given, **others)
    check(made)
    return made


def check(options: Any) -> None:
    """Raises LaunchError if a value is against its rule."""
    for name, option in options_of(type(options)).items():
        rule, value = option.rule, operator.attrgetter(name)(options)
        if rule and value is not None and not rule.holds(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise LaunchError(f"got {option.flags[0]} {shown}, expected {rule.text}")


def words_of(options: Mapping[str, Option], values: Mapping[str, Any]) -> list[str]:
    """Command line of the options that were given and are not at their defaults; parsed again, it has these values."""
    words: list[str] = []
    for name, option in options.items():
        value = values.get(name, option.default)
        if value == option.default:
            continue
        flag = option.flags[-1]
        if option.kind is bool:
            words.append(flag)
        elif option.argument.is_repeated:
            for one in value:
                words += [flag, one]
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def nearest(name: str, known: Collection[str]) -> str:
    """End of a message about an unknown name: "did you mean mlp?", or "expected one of cnn, mlp" if none is similar."""
    # An option without its section, or in another one.
    key = name.rpartition(".")[2]
    similar = [other for other in known if "." in other and other.rpartition(".")[2] == key]
    if len(similar) != 1:
        similar = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if similar:
        return f"did you mean {similar[0]}?"
    return f"expected one of {', '.join(sorted(known))}"


# ---- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Command line of one command."""

    name: str
    """of the command"""
    values: Mapping[str, Any]
    """options that were given, by name"""
    command: tuple[str, ...] = ()
    """words after `--`, or the program and its options"""


@dataclass(frozen=True)
class Command:
    """Command of the command line. What it needs is imported when it is chosen."""

    help: str
    """in the list of commands; "": it is not listed"""
    description: str = ""
    add: Callable[[Parser], None] | None = None
    """adds its options"""
    run: Callable[[Given], int] = lambda given: 0
    """returns the exit code; not called if it has kinds"""
    usage: str = ""
    has_help: bool = True
    """-h, --help from its parser; False: `add` adds it, or `run` prints it"""
    takes_words: bool = False
    """after `--`"""
    complete: Callable[[Parser], Any] | None = None
    """adds what the shell completes besides its options"""
    kinds: Callable[[], Mapping[str, Command]] | None = None
    """commands of which one follows its name"""
