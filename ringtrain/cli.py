"""Command line `ringtrain`: launch, measure, report. Modules of a command are imported when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

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
)
from ringtrain.errors import LaunchError, RingtrainError

WITH_COMMAND = ("launch", "bench", "tune", "sweep", "compare")
OF_JOBS = (JOB, SPARK, MPIJOB, RESTARTS, ELASTIC, SHOW)
NOT_MEASURED = ("dry_run", "explain", "elastic", "max_np", "host_discovery", "blacklist_cooldown", "gpus", "resources")
"""options of launch that a command which starts ranks itself refuses, or does not use"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 after an error, printed in one line. argv None: sys.argv."""
    words = list(sys.argv[1:] if argv is None else argv)
    given, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    try:
        options = parser().parse_args(given)
        if command and options.name not in WITH_COMMAND:
            raise LaunchError(f"got a command after --, which ringtrain {options.name} does not run: leave it out")
        options.command, options.environ = command, {}
        return options.handler(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe, as `head` does
        return 128 + signal.SIGPIPE
    except (RingtrainError, OSError) as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + 2  # the shells' code for SIGINT; no job runs that must be stopped


class Parser(argparse.ArgumentParser):
    """Parser whose errors are LaunchErrors of one line."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}: see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Parser of the whole command line."""
    from ringtrain.lab import commands as lab

    top = Parser(prog="ringtrain", description="Starts and examines training jobs on one host or many.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    launched = commands.add_parser(
        "launch",
        usage="ringtrain launch [options] -- COMMAND ...",
        description="Runs COMMAND as many ranks. Without hosts: those of the scheduler's job, else this machine.",
        help="run a command as many ranks",
    )
    add_options(launched)
    launched.set_defaults(handler=launch, name="launch")
    lab.add_bench(commands, with_ranks(), launch)
    lab.add_tune(commands, with_ranks(), launch)
    of_trials = ("np", "ps", "workers", "bind", "oversubscribe", "output", "timeline")
    lab.add_sweep(commands, with_ranks(*of_trials, groups=(SPARK, MPIJOB)), launch, find_hosts)
    lab.add_compare(commands, with_ranks("workers", "output", "timeline", groups=(SPARK, MPIJOB)), launch, find_hosts)
    add_hosts(commands)
    add_doctor(commands)
    lab.add_predict(commands)
    lab.add_report(commands)
    return top


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


def launch(options: argparse.Namespace) -> int:
    from ringtrain.cluster.launch import launch

    return launch(LaunchOptions.of(options))


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
