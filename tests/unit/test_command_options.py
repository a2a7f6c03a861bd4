"""Options: the fields of a dataclass as words of a command line, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from ringtrain import cli
from ringtrain.cluster.doctor.session import DoctorOptions
from ringtrain.cluster.launch_options import GROUPS, LaunchOptions
from ringtrain.config.options import (
    AT_LEAST_1,
    Argument,
    NotWith,
    Parser,
    add,
    before_program,
    options_of,
    read,
    words_of,
)
from ringtrain.errors import LaunchError


@dataclass(frozen=True)
class Part:
    """A section."""

    fast: bool = True
    """with 100 % of all cores"""
    rates: tuple[float, ...] = ()
    """of each part"""


@dataclass(frozen=True)
class Own:
    """Options of every kind."""

    file: Annotated[str, Argument("FILE")]
    """to read"""
    count: Annotated[int | None, Argument("N", ("-n", "--number")), AT_LEAST_1] = None
    """how many,
    in two lines"""
    mode: Literal["a", "b"] = "a"
    """of two"""
    pair: tuple[int, int] = (1, 2)
    """both"""
    name: Annotated[tuple[str, ...], Argument("NAME", is_repeated=True)] = ()
    """one of several"""
    dry: bool = False
    """do nothing"""
    measure: bool = True
    """measure nothing"""
    only: Annotated[str, NotWith("mode")] = ""
    """instead of a mode"""
    part: Part = field(default_factory=Part)


def parsed(*words: str) -> dict[str, object]:
    parser = Parser()
    add(parser, options_of(Own).values())
    return vars(parser.parse_args(words))


WORDS = ["--file", "x", "-n", "3", "--mode", "b", "--pair", "4", "5", "--name", "p", "--name", "q", "--dry"]


def test_words_are_options_and_options_are_words() -> None:
    values = parsed(*WORDS, "--no-measure")
    expected = Own("x", 3, "b", (4, 5), ("p", "q"), dry=True, measure=False)
    assert read(Own, values) == expected
    again = words_of(options_of(Own), values)
    assert read(Own, parsed(*again)) == expected
    assert words_of(options_of(Own), parsed("--file", "x", "--mode", "a")) == ["--file", "x"]
    assert parsed("--file", "x", "--part.no-fast", "--part.rates", "1", "2") == {
        "file": "x",
        "part.fast": False,
        "part.rates": [1.0, 2.0],
    }


def test_options_of_a_script_begin_at_an_unknown_one_if_it_is_asked_for() -> None:
    words = ["--dry", "--pair", "1", "2", "--lr", "3"]
    assert before_program(words, options_of(Own), True) == (words[:4], words[4:])
    assert before_program(words, options_of(Own), False) == (words[:5], words[5:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--number", "0", "--file", "x"], "got -n 0, expected 1 or more"),
        (["--number", "two", "--file", "x"], "argument -n/--number: invalid int value"),
        (["--mode", "b", "--only", "y", "--file", "x"], "argument --only: not allowed with argument --mode"),
        ([], "the following arguments are required: --file"),
        (["--mode", "c", "--file", "x"], "argument --mode: invalid choice: 'c'"),
    ],
)
def test_a_mistake_is_named(words: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read(Own, parsed(*words))


def test_the_help_is_below_the_field_with_its_default() -> None:
    parser = Parser(prog="p")
    add(parser, options_of(Own).values())
    text = " ".join(parser.format_help().split())
    assert "how many, in two lines --mode {a,b}" in text, "a default of None is not shown"
    assert "of two (default: a)" in text and "--dry do nothing" in text
    assert "--part.fast, --part.no-fast with 100 % of all cores (default: True)" in text


def test_every_option_of_launch_is_read_back_from_its_words() -> None:
    """Each by itself, with a value that it may have."""
    assert all(option.help for option in options_of(*GROUPS, DoctorOptions).values())
    for name, option in options_of(*GROUPS).items():
        value = "7" if option.single in (int, float) else "x"
        value = option.choices[-1] if option.choices else value
        num_values = 1 if option.num_values is None else int(option.num_values)
        words = [option.flags[-1], *[value] * num_values]
        options = LaunchOptions.of(cli.parse(["launch", *words, "true"])[1])
        assert getattr(options, name) != option.default, name
        assert options == LaunchOptions(command=("true",), **{name: getattr(options, name)})
