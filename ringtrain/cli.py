"""Command line `ringtrain`: train, launch, measure, report. Modules of a command are imported when it runs."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringtrain import __version__
from ringtrain.cluster.launch_options import GROUPS, IN_KUBERNETES, PLAIN, HostOptions, LaunchOptions, add_options
from ringtrain.config.options import (
    Command,
    Given,
    Parser,
    add,
    before_program,
    nearest,
    options_of,
    read,
    refuse_dashes,
)
from ringtrain.errors import LaunchError, RingtrainError
from ringtrain.protocol.env import is_activated, path_with_own

STARTS_RANKS = (
    "np",
    "ps",
    "hostfile",
    "hosts",
    "include",
    "exclude",
    "launcher",
    "master",
    "elastic",
    "max_np",
    "host_discovery",
)
"""options with which `ringtrain train` starts ranks; without them it trains in one process"""
OF_OTHERS = {"--nproc-per-node": "-np", "--num-processes": "-np", "-n": "-np", "--nnodes": "-H"}
"""options of other launchers, and ours"""
STARTING = ("np", "hosts", "hostfile", "launcher", "dry_run")
"""options of launch in the help of `ringtrain train`"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 after an error, printed in one line. argv None: sys.argv."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if not is_activated():
        os.environ["PATH"] = path_with_own()
    if "_ARGCOMPLETE" in os.environ:
        complete()  # and exits
    try:
        command, given = parse(words)
        return command.run(given)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe, as `head` does
        return 128 + signal.SIGPIPE
    except (RingtrainError, OSError) as error:
        from ringtrain.monitor.journal import printable

        print(printable(f"ringtrain: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + 2  # the shells' code for SIGINT; no job runs that must be stopped


def parse(words: Sequence[str]) -> tuple[Command, Given]:
    """The command of a command line, and what it was given. Raises LaunchError for a mistake in it."""
    name = words[0] if words else ""
    if name in ("train", "launch"):
        # Their program needs no `--` before it, and keeps its own.
        own, program = before_program(words[1:], options_of(*GROUPS), ends_at_unknown=name == "train")
        own = [name, *own]
    elif "--" in words:
        own, program = words[: words.index("--")], words[words.index("--") + 1 :]
    else:
        own, program = words, []
    refuse_dashes(own)
    namespace, unknown = parser(own).parse_known_args(own)
    values = vars(namespace)
    command: Command = values.pop("chosen")
    if unknown:
        raise LaunchError(f"{not_understood(command, own[0], unknown)} (see ringtrain {own[0]} --help)")
    if program and not command.takes_words:
        raise LaunchError(f"got a command after --, which ringtrain {name} does not run: leave it out")
    return command, Given(name, values, tuple(program))


def not_understood(command: Command, name: str, unknown: Sequence[str]) -> str:
    """Message about words of a command line that are no options of its command, with what was probably meant."""
    first = unknown[0].partition("=")[0]
    if first.startswith("-"):
        known = Parser(prog=name, add_help=command.has_help)
        if command.add:
            command.add(known)
        meant = OF_OTHERS.get(first.replace("_", "-"), "")
        hint = f"did you mean {meant}?" if meant else nearest(first, [*known._option_string_actions])
        return f"unrecognized arguments: {' '.join(unknown)}: {hint}"
    if name in ("doctor", "hosts"):
        return f"got {first}, expected hosts after -H: ringtrain {name} -H {','.join(unknown)}"
    if command.takes_words:
        return f"got {first}, expected a command after --: ringtrain {name} ... -- {shlex.join(unknown)}"
    return f"unrecognized arguments: {' '.join(unknown)}"


def parser(words: Sequence[str], completes: bool = False) -> Parser:
    """Parser of the whole command line. Of the commands, only the one that `words` begin with has its options."""
    top = Parser(prog="ringtrain", description="Trains, starts and examines training jobs on one host or many.")
    top.add_argument("--version", action="version", version=f"ringtrain {__version__}")
    add_commands(top, "commands", commands(), words, completes)
    return top


def add_commands(
    parser: Parser, title: str, known: Mapping[str, Command], words: Sequence[str], completes: bool
) -> None:
    """Adds commands to a parser; the one that `words` begin with gets its options, or its kinds."""
    listed = parser.add_subparsers(title=title, metavar=title.upper().removesuffix("S"), required=True)
    for name, command in known.items():
        settings: dict[str, Any] = {"help": command.help} if command.help else {}
        made = listed.add_parser(
            name,
            description=command.description,
            usage=command.usage or None,
            add_help=command.has_help,
            **settings,
        )
        made.set_defaults(chosen=command)
        if name not in words[:1]:
            continue
        if command.kinds:
            add_commands(made, "kinds", command.kinds(), words[1:], completes)
        if command.add:
            command.add(made)
        if completes and command.complete:
            command.complete(made)


def commands() -> dict[str, Command]:
    """All commands by name, in the order of the help."""
    from ringtrain.lab.commands import COMMANDS

    return {"train": TRAIN, "launch": LAUNCH, **COMMANDS, "hosts": HOSTS, "doctor": DOCTOR}


def complete() -> None:
    """Answers the shell, which asks for the words that may follow, and exits. Set up by register-python-argcomplete."""
    import argcomplete

    argcomplete.autocomplete(parser(os.environ["COMP_LINE"].split()[1:], completes=True))


# ---- train and launch -----------------------------------------------------------------------------------------------


def train(given: Given) -> int:
    """Starts the trainer or a script, as `ringtrain launch` does, or replaces this process by it."""
    from ringtrain.config import help_texts

    words, of_launch = given.command, options_of(*GROUPS)
    is_script = bool(words) and not words[0].startswith("-")
    if not is_script and help_texts.asks_for_help(words):
        return help_of_train(words)
    if is_script and not words[0].endswith(".py"):
        raise LaunchError(
            f"got {words[0]}, expected SCRIPT.py or options of the trainer such as --config FILE; other programs:"
            f" ringtrain launch {words[0]}"
        )
    if not is_script:
        flags = {flag for option in of_launch.values() for flag in option.flags}
        for word in words:
            if word.partition("=")[0] in flags:
                raise LaunchError(
                    f"got {word} after {words[0]}, expected options of launch before those of the trainer"
                )
    command = words if is_script else ("-m", "ringtrain.train", *words)
    if not given.values.keys().isdisjoint(STARTS_RANKS):
        return launch(replace(given, command=("python", *command)))
    for name in given.values:
        if name not in ("dry_run", "explain"):
            flag = of_launch[name].flags[0]
            raise LaunchError(
                f"got {flag} without ranks to start: give -np N, the number of ranks, or leave {flag} out"
            )
    if given.values:
        LaunchOptions.of(given)  # refuses what does not go together
        print(shlex.join(["python", *command]))
        return 0
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def help_of_train(words: Sequence[str]) -> int:
    """Prints the help of `ringtrain train`: the trainer's options, and the most important ones of launch."""
    from ringtrain.config import files, help_texts

    usage = (
        "ringtrain train [options of launch] [--config FILE] [options]\n"
        "       ringtrain train [options of launch] SCRIPT.py [its options]"
    )
    description = "Trains on the ranks that -np or hosts ask for, without them in one process."
    shown = help_texts.help_parser(words, files.file_of(words), usage, description)
    if words[-1] in ("-h", "--help"):
        group = shown.add_argument_group("options of launch, which come first (all: ringtrain launch --help)")
        add(group, [option for name, option in options_of(*PLAIN).items() if name in STARTING])
    shown.print_help()
    return 0


def complete_train(parser: Parser) -> None:
    """Adds the options of the trainer, and a script."""
    from ringtrain.config import help_texts
    from ringtrain.config.sections import OPTIONS

    parser.add_argument("--config")
    parser.add_argument("--help", choices=[*help_texts.sections(), help_texts.ALL])
    add(parser, OPTIONS.values())
    parser.add_argument("script", nargs="?")


def launch(given: Given) -> int:
    from ringtrain.cluster.launch import launch

    options = LaunchOptions.of(given)
    if given.command[1:3] == ("-m", "ringtrain.train") and options.launcher not in IN_KUBERNETES:
        from ringtrain.config import files

        files.read(given.command[3:])  # a mistake in it is found before ranks start
    return launch(options)


TRAIN = Command(
    "train a model in one process or, with -np, on many ranks",
    add=add_options,
    run=train,
    has_help=False,  # the trainer's own
    takes_words=True,
    complete=complete_train,
)
LAUNCH = Command(
    "run a command as many ranks",
    "Runs COMMAND as many ranks. Without hosts: those of the scheduler's job, else this machine. Options after COMMAND"
    " are its own.",
    add_options,
    launch,
    usage="ringtrain launch [options] COMMAND ...",
    takes_words=True,
    complete=lambda parser: parser.add_argument("program", nargs="..."),
)


# ---- hosts and doctor ------------------------------------------------------------------------------------------------


def hosts(given: Given) -> int:
    from ringtrain.cluster.launch import find_hosts

    listed, source = find_hosts(LaunchOptions.of(given))
    for host in listed:
        print(host)
    print(f"{len(listed)} hosts, {sum(host.slots for host in listed)} slots, from {source}", file=sys.stderr)
    return 0


def add_doctor(parser: Parser) -> None:
    """Adds the options of doctor, and of the hosts that it examines."""
    from ringtrain.cluster.doctor.visit import DoctorOptions

    add_options(parser, [HostOptions])
    add(parser, options_of(DoctorOptions).values())


def doctor(given: Given) -> int:
    from ringtrain.cluster.doctor import preflight
    from ringtrain.cluster.launch import find_hosts

    return preflight.main(find_hosts(LaunchOptions.of(given))[0], read(preflight.VisitOptions, given.values))


HOSTS = Command(
    "print the hosts that a launch would use",
    add=lambda parser: add_options(parser, [HostOptions], without=("ssh_port", "subnet")),
    run=hosts,
)
DOCTOR = Command(
    "check hosts, with a fix for each problem",
    "Checks every host. Without hosts: those of the scheduler's job, else this machine. Exit code: 0 all is ok, 1 there"
    " are warnings, 2 there are errors.",
    add_doctor,
    doctor,
)


if __name__ == "__main__":
    raise SystemExit(main())
