"""Commands of the lab, from init to data; their modules are imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ringtrain.cluster.launch_options import (
    OF_JOBS,
    HostOptions,
    KubernetesOptions,
    LaunchOptions,
    SparkOptions,
    add_options,
)
from ringtrain.errors import LaunchError
from ringtrain.options import Command, Given, Parser, add, options_of, read, words_of

HOSTS = ("hostfile", "hosts", "include", "exclude")
NOT_MEASURED = (
    "dry_run",
    "explain",
    "elastic",
    "max_np",
    "host_discovery",
    "blacklist_cooldown",
    "gpus",
    "resources",
    "require_init",
    "tuned",
)
"""options of launch that a command which starts ranks itself refuses, or does not use"""


@dataclass(frozen=True)
class OnRanks:
    """Command that starts ranks as launch does: its own options, and those of launch."""

    module: str
    """of ringtrain.lab, with Options, a dataclass, and main(options, start, call)"""
    help: str
    description: str
    usage: str = ""
    """its own required options"""
    left_out: Collection[str] = ()
    """options of launch that are not repeated where it starts ringtrain launch"""
    hidden: Collection[str] = ()
    """options of launch that it refuses, besides NOT_MEASURED"""
    hidden_groups: Collection[type] = (KubernetesOptions,)
    takes: str = " -- COMMAND"
    """what it takes after --, for its usage"""
    places_ranks: bool = False
    """itself, on the hosts of the command line"""

    def command(self, name: str) -> Command:
        """This as a command of the command line."""
        return Command(
            self.help,
            self.description,
            self.add,
            self.run,
            usage=f"ringtrain {name} {self.usage}[options]{self.takes}",
            has_help=False,
            takes_words=True,
        )

    def add(self, parser: Parser) -> None:
        """Adds its options, and those of launch below them."""
        group = parser.add_argument_group("options")
        add(group, options_of(module_of(self.module).Options).values())
        of_launch = parser.add_argument_group("options of ringtrain launch")
        of_launch.add_argument("-h", "--help", action="help", help="show this help message and exit")
        hidden = (*NOT_MEASURED, *self.hidden)
        add_options(parser, (HostOptions, *OF_JOBS), hidden, self.hidden_groups, plain=of_launch)

    def run(self, given: Given) -> int:
        """Runs the module."""
        options = LaunchOptions.of(given)
        if options.dry_run or options.explain or options.elastic:
            raise LaunchError(f"{given.name} runs what it measures: leave out --dry-run, --explain and --elastic")
        if options.tuned:
            raise LaunchError(f"{given.name} chooses settings itself: leave out --tuned, which is for ringtrain launch")
        from ringtrain.cluster.launch import find_hosts
        from ringtrain.lab import ranks

        hosts = find_hosts(options)[0] if self.places_ranks else ()
        names = options_of(HostOptions, *OF_JOBS)
        repeated = {}
        for name, value in given.values.items():
            if name in names and name not in self.left_out:
                repeated[name] = value
        start = ranks.Start(given.name, options, words_of(names, repeated), hosts)
        module = module_of(self.module)
        return module.main(read(module.Options, given.values), start, ranks.caller(start))


def module_of(name: str) -> Any:
    """Imports a module of the lab."""
    return importlib.import_module(f"ringtrain.lab.{name}")


SWEEP = OnRanks(
    "sweep",
    "try many values of some options, side by side",
    "Trains with many values of some options, as many trials at once as there are slots, and says which are best by"
    " --objective; the same command goes on after an interruption.",
    usage="--space FILE ",
    left_out=HOSTS,
    hidden=("np", "ps", "workers", "bind", "oversubscribe", "output", "timeline"),
    hidden_groups=(SparkOptions, KubernetesOptions),
    places_ranks=True,
)
PROVE = OnRanks(
    "prove",
    "put a job to the test: equal to one process, to itself, and through kills",
    "Trains a few steps of a job on one process and on -np ranks, stops, kills and resumes it, and says which promises"
    " hold for it. The command is a script with ringtrain.fit, or python -m ringtrain.train with options; it is started"
    " as it is.",
    usage="-np N ",
    left_out=("np",),
    hidden=("ps", "workers", "output", "timeline"),
    places_ranks=True,
)


def plain(module: str, help: str, description: str) -> Command:
    """Command that starts no ranks: its module has Options, a dataclass, and main(options)."""

    def add_own(parser: Parser) -> None:
        add(parser, options_of(module_of(module).Options).values())

    def run(given: Given) -> int:
        return module_of(module).main(read(module_of(module).Options, given.values))

    return Command(help, description, add_own, run)


INIT = plain(
    "init",
    "write a first configuration and job file",
    "Writes config.toml, with comments, and job.py, with a model and data to replace; both train as they are."
    " Overwrites nothing.",
)
RUNS = plain(
    "runs",
    "list the runs of a folder",
    "Lists the runs of a folder, the newest first: state, steps, metrics, speed, ranks and start.",
)
REPORT = plain(
    "report",
    "say what came of a run, or what happened to it",
    "Writes one HTML page, which needs nothing else, about a run, or about several side by side.",
)


DATA = Command(
    "look at files of rows, index or convert them",
    kinds=lambda: {
        "show": plain(
            "files_show",
            "say what is in files",
            "Prints numbers of files, blocks and rows, the columns and the first rows of Parquet, TFRecord"
            " files, or of folders of images, on disk or behind a URL.",
        ),
        "index": plain(
            "files_index",
            "write an index next to TFRecord files",
            "Writes where each row begins to NAME.idx. With it, ringtrain.Records need not read files behind a URL from"
            " begin to end before training.",
        ),
        "convert": plain(
            "files_convert",
            "write the rows of files as Parquet",
            "Writes the rows of TFRecord, Parquet or image files as Parquet files with checksums, all or none.",
        ),
    },
)


def benches() -> dict[str, Command]:
    """Kinds of `ringtrain bench`."""
    train = OnRanks(
        "bench_train",
        "images/s and ring efficiency",
        "Measures images/s of ranks, and ring efficiency, in turns. Starts ranks as ringtrain launch does.",
        takes=" [-- options of ringtrain.train]",
    )
    allreduce = OnRanks(
        "bench_allreduce",
        "allreduces by MPI, Horovod, NCCL and a ring in NumPy",
        "Measures allreduces by each library, in turns, beside a memory copy and the link. Starts ranks as ringtrain"
        " launch does.",
        takes="",
    )
    return {"allreduce": allreduce.command("bench allreduce"), "train": train.command("bench train")}


def commands() -> dict[str, Command]:
    """Commands of the lab by name, in the order of the help; those of bench are `benches`."""
    return {
        "init": INIT,
        "runs": RUNS,
        "report": REPORT,
        "bench": Command("measure training and what it is made of", kinds=benches),
        "sweep": SWEEP.command("sweep"),
        "prove": PROVE.command("prove"),
        "data": DATA,
    }
