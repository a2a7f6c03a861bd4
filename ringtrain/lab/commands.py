"""Commands of the lab, from init to data; their modules are imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any, get_type_hints

from ringtrain.cluster.launch_options import (
    LAUNCHERS,
    HostOptions,
    JobOptions,
    LaunchOptions,
    RestartOptions,
    add_options,
)
from ringtrain.config.options import Command, Given, Parser, add, options_of, read
from ringtrain.errors import LaunchError

ON_RANKS = (HostOptions, JobOptions, RestartOptions)
"""options of launch that a command which starts ranks has"""
NOT_MEASURED = ("tuned", "ps", "output")
"""but for these"""


def plain(function: str, help: str, description: str) -> Command:
    """Command that calls module:function of the lab with its options."""

    def add_own(parser: Parser) -> None:
        add(parser, options_of(_imported(function)[1]).values())

    def run(given: Given) -> int:
        call, options = _imported(function)
        return call(read(options, given.values))

    return Command(help, description, add_own, run)


def on_ranks(
    function: str, help: str, description: str, usage: str, without: Collection[str] = NOT_MEASURED
) -> Command:
    """Command that starts ranks: calls module:function of the lab with its options and those of launch."""

    def add_own(parser: Parser) -> None:
        add(parser, options_of(_imported(function)[1]).values())
        of_launch = parser.add_argument_group("options of ringtrain launch")
        add_options(parser, ON_RANKS, without, plain=of_launch)

    def run(given: Given) -> int:
        call, options = _imported(function)
        launch = LaunchOptions.of(given)
        if not launch.started_by.program:  # the ranks' results would be elsewhere, or come later
            waiting = ", ".join(name for name, launcher in LAUNCHERS.items() if launcher.program)
            raise LaunchError(f"got --launcher {launch.launcher}, expected one of {waiting}")
        return call(read(options, given.values), launch)

    return Command(help, description, add_own, run, usage=f"ringtrain {usage}", takes_words=True)


def _imported(function: str) -> tuple[Callable[..., int], Any]:
    """A function of the lab, and the dataclass of its options."""
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(f"ringtrain.lab.{module}"), name)
    return call, get_type_hints(call)["options"]


BENCHES = {
    "allreduce": on_ranks(
        "bench_allreduce:main",
        "allreduces by MPI, Horovod, NCCL and a ring in NumPy",
        "Measures allreduces by each library, in turns. Starts ranks as ringtrain launch does.",
        "bench allreduce [options]",
    ),
    "train": on_ranks(
        "bench_train:main",
        "images/s and ring efficiency",
        "Measures images/s of ranks, and ring efficiency, in turns. Starts ranks as ringtrain launch does.",
        "bench train [options] [-- options of ringtrain.train]",
    ),
}
COMMANDS = {
    "init": plain(
        "init:main",
        "write a first configuration and job file",
        "Writes config.toml, with comments, and job.py, with a model and data to replace; both train as they are."
        " Overwrites nothing.",
    ),
    "runs": plain(
        "runs:main",
        "list the runs of a folder",
        "Lists the runs of a folder, the newest first: state, steps, metrics, speed, ranks and start.",
    ),
    "report": plain(
        "report:main",
        "say what came of a run, or what happened to it",
        "Writes one HTML page, which needs nothing else, about a run, or about several side by side.",
    ),
    "bench": Command("measure training and what it is made of", kinds=lambda: BENCHES),
    "sweep": on_ranks(
        "sweep:main",
        "try many values of some options, side by side",
        "Trains with many values of some options, as many trials at once as there are slots, and says which are best by"
        " --objective; the same command goes on after an interruption.",
        "sweep --space FILE [options] -- COMMAND",
        without=(*NOT_MEASURED, "np", "bind", "oversubscribe"),
    ),
    "prove": on_ranks(
        "prove:main",
        "put a job to the test: equal to one process, to itself, and through kills",
        "Trains a few steps of a job on one process and on -np ranks, stops, kills and resumes it, and says which"
        " promises hold for it. The command is a script with ringtrain.fit, or python -m ringtrain.train with options;"
        " it is started as it is.",
        "prove -np N [options] -- COMMAND",
    ),
}
"""commands of the lab by name, in the order of the help"""
