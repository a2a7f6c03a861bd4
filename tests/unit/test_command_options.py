"""Options: the fields of a dataclass as words of a command line, and back."""

from __future__ import annotations

from ringtrain import cli
from ringtrain.cluster.doctor.visit import DoctorOptions
from ringtrain.cluster.launch_options import GROUPS, LaunchOptions
from ringtrain.config.options import Parser, add, before_program, options_of, words_of

OPTIONS = options_of(*GROUPS)


def test_every_option_of_launch_is_read_back_from_its_words() -> None:
    """Each by itself, with a value that it may have."""
    assert all(option.help for option in options_of(*GROUPS, DoctorOptions).values())
    for name, option in OPTIONS.items():
        value = "7" if option.single in (int, float) else "x"
        value = option.choices[-1] if option.choices else value
        num_values = 1 if option.num_values is None else int(option.num_values)
        given = cli.parse(["launch", option.flags[-1], *[value] * num_values, "true"])[1]
        options = LaunchOptions.of(given)
        assert getattr(options, name) != option.default, name
        assert options == LaunchOptions(command=("true",), **{name: getattr(options, name)})
        again = words_of(OPTIONS, {name: getattr(options, name)})
        assert LaunchOptions.of(cli.parse(["launch", *again, "true"])[1]) == options


def test_options_that_have_their_defaults_are_no_words() -> None:
    assert words_of(OPTIONS, {"grace": LaunchOptions().grace, "np": 2}) == ["-np", "2"]


def test_options_of_a_script_begin_at_an_unknown_one_if_it_is_asked_for() -> None:
    words = ["--elastic", "--blacklist-cooldown", "1", "2", "--lr", "3"]
    assert before_program(words, OPTIONS, True) == (words[:4], words[4:])
    assert before_program(words, OPTIONS, False) == (words[:5], words[5:])


def test_the_help_is_below_the_field_with_its_default() -> None:
    parser = Parser(prog="p")
    add(parser, OPTIONS.values())
    text = " ".join(parser.format_help().split())
    assert "--bind {none,core} core: --threads cores for each rank (default: none)" in text
    assert "--dry-run print the command, script or manifest and exit --" in text, "a default of False is not shown"
