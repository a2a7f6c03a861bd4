"""Commands init, bench, tune, prove, sweep, compare, forecast, report and runs; their modules are imported on use."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.errors import LaunchError
from ringtrain.lab import options

Commands = argparse._SubParsersAction
Launch = Callable[[argparse.Namespace], int]
FindHosts = Callable[[argparse.Namespace], tuple[Sequence[Any], str]]
"""returns the hosts of the command line and their source"""


@dataclass(frozen=True)
class Command:
    """Command of the lab."""

    module: str
    """of ringtrain.lab, with Options, a dataclass, and main(options, given, call), main(given) if it starts no ranks"""
    help: str
    description: str
    usage: str = ""
    """its own required options"""
    left_out: Collection[str] = ()
    """options of launch that launch_words does not repeat"""


TUNE = Command(
    "tune.cli",
    "find the settings with which training is fastest here",
    "Tries settings of a training in short runs, measured in turns, and writes a TOML with those that made it faster."
    " Starts ranks as ringtrain launch does. See docs/tuning.md.",
)
SWEEP = Command(
    "sweep.cli",
    "try many values of some options, side by side",
    "Trains with many values of some options, as many trials at once as there are slots, and says which are best by"
    " train.monitor; the same command goes on after an interruption. See docs/sweep.md.",
    "--space FILE ",
    ("hostfile", "hosts", "include", "exclude"),
)
COMPARE = Command(
    "compare.cli",
    "train the same job under several strategies",
    "Trains the same job under several strategies, in turns, with -np copies of the model under each; the same command"
    " goes on after an interruption. See docs/strategies.md.",
    "--strategies LIST --config FILE ",
    ("np", "ps"),
)
PROVE = Command(
    "prove.cli",
    "put a job to the test: equal to one process, to itself, and through kills",
    "Trains a few steps of a job on one process and on -np ranks, stops, kills and resumes it, and says which promises"
    " hold for it, and likely reasons where they do not. See docs/verification.md.",
    "-np N ",
    ("np",),
)

PLAIN = {
    "init": Command(
        "init.cli",
        "write a first configuration and job file",
        "Writes config.toml, with comments, and job.py, with a model and data to replace; both train as they are."
        " Overwrites nothing.",
    ),
    "runs": Command(
        "report.runs",
        "list the runs of a folder",
        "Lists the runs of a folder, the newest first: state, steps, metrics, speed, ranks and start.",
    ),
    "report": Command(
        "report.cli",
        "say what came of a run, or what happened to it",
        "Writes one HTML page, which needs nothing else, about a run, or about several side by side. See"
        " docs/tracking.md.",
    ),
}


def add_bench(commands: Commands, parents: Sequence[argparse.ArgumentParser], launch: Launch) -> None:
    """Adds `ringtrain bench KIND`."""
    timed = commands.add_parser("bench", help="measure training and what it is made of")
    kinds = timed.add_subparsers(title="kinds", metavar="KIND", required=True, parser_class=type(timed))
    for kind, text in _benches().items():
        description = f"Measures, in turns: {text}. Starts ranks as ringtrain launch does."
        _add(kinds, kind, Command(f"bench.{kind}", text, description), parents, launch, prefix="bench ")


def _benches() -> dict[str, str]:
    """Names and help of the modules of ringtrain.lab.bench, from their first lines: importing them loads TensorFlow."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("bench/*.py"))]
    found = (re.match(r'"""bench (\w+): (.*)\.\n', text) for text in texts)
    return {match[1]: match[2] for match in found if match}


def add_tune(commands: Commands, parents: Sequence[argparse.ArgumentParser], launch: Launch) -> None:
    """Adds `ringtrain tune`."""
    _add(commands, "tune", TUNE, parents, launch)


def add_prove(
    commands: Commands, parents: Sequence[argparse.ArgumentParser], launch: Launch, find_hosts: FindHosts
) -> None:
    """Adds `ringtrain prove`."""
    _add(commands, "prove", PROVE, parents, launch, find_hosts)


def add_sweep(
    commands: Commands, parents: Sequence[argparse.ArgumentParser], launch: Launch, find_hosts: FindHosts
) -> None:
    """Adds `ringtrain sweep`."""
    _add(commands, "sweep", SWEEP, parents, launch, find_hosts)


def add_compare(
    commands: Commands, parents: Sequence[argparse.ArgumentParser], launch: Launch, find_hosts: FindHosts
) -> None:
    """Adds `ringtrain compare`."""
    _add(commands, "compare", COMPARE, parents, launch, find_hosts)


def _add(
    commands: Commands,
    name: str,
    command: Command,
    parents: Sequence[argparse.ArgumentParser],
    launch: Launch,
    find_hosts: FindHosts | None = None,
    prefix: str = "",
) -> None:
    """Adds a command whose options are those of launch and of its module."""
    parser = commands.add_parser(
        name,
        parents=list(parents),
        usage=f"ringtrain {prefix}{name} {command.usage}[options] [-- options of ringtrain.train]",
        description=command.description,
        help=command.help,
    )
    parser._optionals.title = "options of ringtrain launch"
    _on_use(parser, command.module, first="options")

    def run(given: argparse.Namespace) -> int:
        """Runs the module; sets given.launch_words and, for a command that places ranks itself, given.found_hosts."""
        if find_hosts:
            given.found_hosts, _ = find_hosts(given)
        if given.dry_run or given.explain or given.elastic:
            raise LaunchError(f"{given.name} runs what it measures: leave out --dry-run, --explain and --elastic")
        from ringtrain.lab import ranks

        given.launch_words = [word for parent in parents for word in words_of(parent, given, command.left_out)]
        module = importlib.import_module(f"ringtrain.lab.{command.module}")
        return module.main(options.read(module.Options, given), given, ranks.caller(given, launch))

    parser.set_defaults(handler=run, name=(prefix or name).strip())


def _on_use(parser: argparse.ArgumentParser, module: str, *names: str, first: str = "") -> None:
    """Adds the options of a module (its Options, or these) on first use, so that others do not import it.

    first: They come first in the help, under this title.
    """
    parse, groups = parser.parse_known_args, parser._action_groups

    def parse_with_options(*args: Any, **kwargs: Any) -> Any:
        parser.parse_known_args = parse  # type: ignore[method-assign]
        present = len(groups)
        for name in names or ("Options",):
            options.add(parser, getattr(importlib.import_module(f"ringtrain.lab.{module}"), name), first)
        if first:
            groups[:] = groups[present:] + groups[:present]
        return parse(*args, **kwargs)

    parser.parse_known_args = parse_with_options  # type: ignore[method-assign]


def words_of(parser: argparse.ArgumentParser, given: argparse.Namespace, left_out: Collection[str] = ()) -> list[str]:
    """Command-line arguments for all options of a parser that are not at their defaults."""
    words: list[str] = []
    for action in parser._actions:
        value = getattr(given, action.dest, action.default)
        if value == action.default or action.dest in left_out:
            continue
        flag = action.option_strings[-1]
        if isinstance(action, argparse._AppendAction):
            words += [word for one in value for word in (flag, str(one))]
        else:
            words += [flag, *([] if action.nargs == 0 else map(str, value) if action.nargs else [str(value)])]
    return words


def add_forecast(commands: Commands) -> None:
    """Adds `ringtrain forecast`, and `ringtrain predict`, its old name."""
    for name in ("forecast", "predict"):
        listed: dict[str, Any] = {"help": "say how fast training would be on more ranks"} if name == "forecast" else {}
        parser = commands.add_parser(
            name,
            argument_default=argparse.SUPPRESS,
            usage=f"ringtrain {name} [options] [-- options of ringtrain.train, for --memory]",
            description="Forecasts images/s at any number of ranks from one process' step and a network; or says what"
            " would reach an efficiency; or how much memory a model needs. See docs/forecast.md.",
            **listed,
        )
        _on_use(parser, "forecast.cli", "Case", "Wanted")
        parser.set_defaults(handler=_forecast, name=name)


def _forecast(given: argparse.Namespace) -> int:
    if given.name == "predict":
        print("ringtrain: predict is called forecast now: ringtrain forecast takes the same options", file=sys.stderr)
    return _handler("forecast.cli")(given)


def add_plain(commands: Commands) -> None:
    """Adds the commands that start no ranks."""
    for name, command in PLAIN.items():
        parser = commands.add_parser(name, description=command.description, help=command.help)
        _on_use(parser, command.module)
        parser.set_defaults(handler=_handler(command.module), name=name)


def _handler(module: str) -> Callable[[argparse.Namespace], int]:
    """Function that runs a module that starts nothing."""
    return lambda given: importlib.import_module(f"ringtrain.lab.{module}").main(given)
