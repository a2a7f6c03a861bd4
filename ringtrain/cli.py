"""Command line `ringtrain`: train, launch, measure, report. Modules of a command are imported when it runs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from ringtrain import __version__
from ringtrain.cluster.launch_options import (
    ELASTIC,
    HOSTS,
    JOB,
    MPIJOB,
    RESTARTS,
    SHOW,
    SPARK,
    LaunchOptions,
    add_options,
    flags_of,
)
from ringtrain.errors import LaunchError, RingtrainError
from ringtrain.protocol.env import is_activated, path_with_own

WITH_COMMAND = ("forecast", "predict", "bench", "tune", "prove", "sweep", "compare")
"""commands that take words after --; train and launch find the program by themselves"""
OF_JOBS = (JOB, SPARK, MPIJOB, RESTARTS, ELASTIC, SHOW)
NOT_MEASURED = (
    *("dry_run", "explain", "elastic", "max_np", "host_discovery", "blacklist_cooldown", "gpus", "resources"),
    "require_init",
)
"""options of launch that a command which starts ranks itself refuses, or does not use"""
STARTS_RANKS = (
    *("np", "ps", "workers", "hostfile", "hosts", "include", "exclude", "launcher", "master"),
    *("elastic", "max_np", "host_discovery"),
)
"""options with which `ringtrain train` starts ranks; without them it trains in one process"""
STARTING = ("np", "hosts", "hostfile", "launcher", "dry_run")
"""options of launch in the help of `ringtrain train`"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 after an error, printed in one line. argv None: sys.argv."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if not is_activated():
        os.environ["PATH"] = path_with_own()
    given, command = words, []
    if "_ARGCOMPLETE" in os.environ:
        complete()  # and exits
    if words[0] not in ("train", "launch") and "--" in words:
        given, command = words[: words.index("--")], words[words.index("--") + 1 :]
    try:
        options = parser().parse_args(given, argparse.Namespace(command=command, environ={}))
        if command and options.name not in WITH_COMMAND:
            raise LaunchError(f"got a command after --, which ringtrain {options.name} does not run: leave it out")
        return options.handler(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe, as `head` does
        return 128 + signal.SIGPIPE
    except (RingtrainError, OSError) as error:
        from ringtrain.monitor.journal import printable

        print(printable(f"ringtrain: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + 2  # the shells' code for SIGINT; no job runs that must be stopped


class Parser(argparse.ArgumentParser):
    """Parser whose errors are LaunchErrors of one line.

    runs: "program": its options come before a program, which `command` gets with the program's own options, untouched;
    "trainer": an option that this parser does not know begins the program, too. `flags` gets each option.
    """

    def __init__(self, *args: Any, runs: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runs = runs

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}: see {self.prog} --help")

    def _get_values(self, action: Any, words: Any) -> Any:
        if action.option_strings and "--" in words:  # argparse would remove it, and give the option no value
            raise argparse.ArgumentError(action, "expected a value, got '--'")
        return super()._get_values(action, words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.runs:
            return super().parse_known_args(args, namespace)
        flags, length = self.options_before_program(args)
        given, unknown = super().parse_known_args(args[:length], namespace)
        given.flags, given.command = flags, args[length + (args[length : length + 1] == ["--"]) :]
        return given, unknown

    def options_before_program(self, words: Sequence[str]) -> tuple[dict[str, str], int]:
        """Flags by the names of their options, and number of words before "--" or the first of no option."""
        place, flags = 0, dict[str, str]()
        while place < len(words) and words[place].startswith("-") and words[place] != "--":
            flag, has_value, _ = words[place].partition("=")
            action = self._option_string_actions.get(flag)
            if action is None and self.runs == "trainer":
                break
            if action is None:  # abbreviated, or unknown, of which the parser tells
                action = next((one for name, one in self._option_string_actions.items() if name.startswith(flag)), None)
            place += 1
            if action is not None:
                flags[action.dest] = flag
                place += 0 if has_value else 1 if action.nargs is None else int(action.nargs)
        return flags, min(place, len(words))


def complete() -> None:
    """Answers the shell, which asks for the words that may follow, and exits. Set up by register-python-argcomplete."""
    import argcomplete

    from ringtrain import config, config_help

    top = parser()
    (commands,) = (one for one in top._actions if isinstance(one, argparse._SubParsersAction))
    trained = commands.choices["train"]
    trained.runs = ""  # the options of the trainer are options of this parser
    trained.add_argument("--config")
    trained.add_argument("--help", choices=[*config_help.sections(), config_help.ALL])
    config_help.add_options(trained, config.option_types(), config.Config())
    trained.add_argument("script", nargs="?")
    argcomplete.autocomplete(top)


def parser() -> argparse.ArgumentParser:
    """Parser of the whole command line."""
    from ringtrain.lab import commands as lab

    top = Parser(prog="ringtrain", description="Trains, starts and examines training jobs on one host or many.")
    top.add_argument("--version", action="version", version=f"ringtrain {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    add_programs(commands)
    lab.add_plain(commands)
    lab.add_bench(commands, with_ranks(), launch)
    lab.add_tune(commands, with_ranks(), launch)
    of_trials = ("np", "ps", "workers", "bind", "oversubscribe", "output", "timeline")
    lab.add_sweep(commands, with_ranks(*of_trials, groups=(SPARK, MPIJOB)), launch, find_hosts)
    lab.add_compare(commands, with_ranks("workers", "output", "timeline", groups=(SPARK, MPIJOB)), launch, find_hosts)
    lab.add_prove(commands, with_ranks("ps", "workers", "output", "timeline"), launch, find_hosts)
    lab.add_forecast(commands)
    add_hosts(commands)
    add_doctor(commands)
    written = commands.add_parser(
        "schema",
        description="Prints the JSON schema of the configuration, from which editors complete a TOML file.",
        help="print the JSON schema of the configuration",
    )
    written.set_defaults(handler=schema, name="schema")
    return top


def add_programs(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds `ringtrain train` and `ringtrain launch`, the commands that run a program."""
    trained = commands.add_parser(
        "train",
        runs="trainer",
        add_help=False,  # the trainer's own, see train
        help="train a model in one process or, with -np, on many ranks",
    )
    add_options(trained)
    trained.set_defaults(handler=train, name="train")
    launched = commands.add_parser(
        "launch",
        runs="program",
        usage="ringtrain launch [options] COMMAND ...",
        description="Runs COMMAND as many ranks. Without hosts: those of the scheduler's job, else this machine."
        " Options after COMMAND are its own.",
        help="run a command as many ranks",
    )
    add_options(launched)
    launched.set_defaults(handler=launch, name="launch")


def with_ranks(*hidden: str, groups: Sequence[str] = (MPIJOB,)) -> tuple[Parser, Parser]:
    """Options of a command that starts ranks as `launch` does. hidden, groups: Not in its help."""
    parents = Parser(add_help=False), Parser(add_help=False)
    add_options(parents[0], [HOSTS])
    add_options(parents[1], OF_JOBS, hidden=(*NOT_MEASURED, *hidden), hidden_groups=groups)
    return parents


def add_hosts(commands: argparse._SubParsersAction[Any]) -> None:
    listed = commands.add_parser("hosts", help="print the hosts that a launch would use")
    add_options(listed, [HOSTS], hidden=("ssh_port", "subnet"))
    listed.set_defaults(handler=hosts, name="hosts")


def add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    asked = commands.add_parser(
        "doctor",
        description="Checks every host, and measures the links between hosts. Without hosts: those of the scheduler's"
        " job, else this machine. Exit code: 0 all is ok, 1 there are warnings, 2 there are errors.",
        help="check hosts and links, with a fix for each problem",
    )
    add_options(asked, [HOSTS])
    asked.add_argument("--run-directory", default="runs", metavar="DIR", help="parent directory of all runs (runs)")
    asked.add_argument("--code", default=".", metavar="DIR", help="your code, the same on every host (.)")
    asked.add_argument("--no-bandwidth", action="store_true", help="do not measure the links between hosts")
    asked.add_argument("--timeout", type=float, default=10, metavar="S", help="seconds for a host to answer (10)")
    asked.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    asked.set_defaults(handler=doctor, name="doctor")


def train(options: argparse.Namespace) -> int:
    """Starts the trainer or a script, as `ringtrain launch` does, or replaces this process by it."""
    from ringtrain import config_help

    words, chosen = options.command, options.flags
    is_script = bool(words) and not words[0].startswith("-")
    if not is_script and config_help.asks_for_help(words):
        return help_of_train(words)
    if is_script and not words[0].endswith(".py"):
        raise LaunchError(
            f"got {words[0]}, expected SCRIPT.py or options of the trainer such as --config FILE; other programs:"
            f" ringtrain launch {words[0]}"
        )
    flags = {flag for one in fields(LaunchOptions) if one.metadata for flag in flags_of(one)}
    if late := [] if is_script else [word for word in words if word.partition("=")[0] in flags]:
        raise LaunchError(f"got {late[0]} after {words[0]}, expected options of launch before those of the trainer")
    command = tuple(words) if is_script else ("-m", "ringtrain.train", *words)
    if chosen.keys() & {*STARTS_RANKS}:
        options.command = ("python", *command)
        return launch(options)
    for flag in [flag for name, flag in chosen.items() if name not in ("dry_run", "explain")]:
        raise LaunchError(f"got {flag} without ranks to start: give -np N, the number of ranks, or leave {flag} out")
    if chosen:
        print(shlex.join(["python", *command]))
        return 0
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def help_of_train(words: Sequence[str]) -> int:
    """Prints the help of `ringtrain train`: the trainer's options, and the most important ones of launch."""
    from ringtrain import config_help, config_io

    usage = (
        "ringtrain train [options of launch] [--config FILE] [options]\n"
        "       ringtrain train [options of launch] SCRIPT.py [its options]"
    )
    description = "Trains on the ranks that -np or hosts ask for, without them in one process."
    shown = config_help.help_parser(words, config_io.file_of(words), usage, description)
    if words[-1] in ("-h", "--help"):
        group = shown.add_argument_group("options of launch, which come first (all: ringtrain launch --help)")
        names = {one.name for one in fields(LaunchOptions)}
        add_options(group, [HOSTS, JOB, SHOW], hidden=names - {*STARTING})
    shown.print_help()
    return 0


def launch(options: argparse.Namespace) -> int:
    from ringtrain.cluster.launch import launch

    return launch(LaunchOptions.of(options))


def schema(options: argparse.Namespace) -> int:
    from ringtrain import config_help

    print(json.dumps(config_help.schema(), indent=1))
    return 0


def hosts(options: argparse.Namespace) -> int:
    listed, source = find_hosts(options)
    for host in listed:
        print(host)
    print(f"{len(listed)} hosts, {sum(host.slots for host in listed)} slots, from {source}", file=sys.stderr)
    return 0


def doctor(options: argparse.Namespace) -> int:
    from ringtrain.cluster.doctor import preflight

    wanted = preflight.Options(
        run_directory=options.run_directory,
        code=options.code,
        bandwidth=not options.no_bandwidth,
        timeout_s=options.timeout,
        ssh_port=options.ssh_port,
        subnet=options.subnet,
    )
    return preflight.main(find_hosts(options)[0], wanted, options.json)


def find_hosts(options: argparse.Namespace) -> tuple[Sequence[Any], str]:
    from ringtrain.cluster.launch import find_hosts

    return find_hosts(LaunchOptions.of(options))


if __name__ == "__main__":
    raise SystemExit(main())
