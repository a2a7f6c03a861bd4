"""Options of the commands bench, tune, sweep, compare, predict and report, which import their modules on use."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.errors import LaunchError

Option = tuple[str, dict[str, Any]]
"""flag and keyword arguments of add_argument"""

OUT: Option = ("--out", {"default": "", "metavar": "FILE", "help": "write the results as JSON"})
PLOT: Option = ("--plot", {"default": "", "metavar": "FILE", "help": "draw them as PNG"})


def turns(number: int) -> Option:
    """Option for the number of rounds."""
    return "--turns", {
        "type": int,
        "default": number,
        "metavar": "N",
        "help": f"measurements of each kind, in turns ({number})",
    }


def count(flag: str, number: int, text: str) -> Option:
    """Option for a number of at least 1."""
    return flag, {"type": int, "default": number, "metavar": "N", "help": f"{text} ({number})"}


@dataclass(frozen=True)
class Bench:
    """Kind of measurement."""

    module: str
    """of ringtrain.lab; its main(options, start) measures, prints and writes without importing TensorFlow"""
    help: str
    options: tuple[Option, ...]
    """in addition to those of launch"""


BENCHES = {
    "train": Bench(
        "bench.train",
        "images/s, what a step's time goes into, ring efficiency",
        (
            turns(7),
            count("--steps", 40, "steps of a measurement"),
            ("--ranks", {"default": "", "metavar": "LIST", "help": "numbers of ranks to compare: 1,2,4 (-np alone)"}),
            OUT,
            PLOT,
            ("--profile", {"default": "", "metavar": "FILE", "help": "for ringtrain predict --profile FILE"}),
        ),
    ),
    "peers": Bench(
        "bench.peers",
        "the same training by ringtrain, by hand, by TensorFlow's strategies and PyTorch, on this host",
        (
            turns(5),
            count("--steps", 60, "steps of a measurement"),
            ("--peers", {"default": "", "metavar": "LIST", "help": "some of them: ringtrain,by-hand,towers (all)"}),
            count("--limit", 120, "seconds that one start may take"),
            OUT,
        ),
    ),
    "allreduce": Bench(
        "bench.allreduce",
        "latency and bandwidth of Horovod's allreduce, MPI's own, a ring in NumPy, and what the machine gives",
        (
            (
                "--sizes",
                {
                    "default": "1KiB..256MiB",
                    "metavar": "LIST",
                    "help": "1KiB,64MiB, or a range in steps of four (1KiB..256MiB)",
                },
            ),
            (
                "--libraries",
                {
                    "default": "mpi,horovod-mpi,horovod-gloo",
                    "metavar": "LIST",
                    "help": "that take turns (mpi,horovod-mpi,horovod-gloo)",
                },
            ),
            turns(3),
            count("--repeats", 5, "measurements within a turn, which is a start of its own"),
            OUT,
            PLOT,
        ),
    ),
    "startup": Bench("bench.startup", "from the command to the first step, by stages", (turns(5), OUT)),
    "checkpoint": Bench(
        "bench.on_ranks_alone",
        "how long training stands still for a save, beside writing the same bytes",
        (turns(9), count("--steps", 20, "steps between two saves"), OUT),
    ),
    "input": Bench(
        "bench.on_ranks_alone",
        "samples/s of the input pipeline, beside reading and decoding without it",
        (
            turns(7),
            count("--batches", 20, "batches of a measurement"),
            ("--rank-images-per-s", {"type": float, "default": 0, "metavar": "X", "help": "that a rank trains"}),
            OUT,
        ),
    ),
}


def add_bench(
    commands: argparse._SubParsersAction[Any],
    parents: Sequence[argparse.ArgumentParser],
    launch: Callable[[argparse.Namespace], int],
) -> None:
    """Adds `ringtrain bench KIND`."""
    timed = commands.add_parser("bench", help="measure training and what it is made of")
    kinds = timed.add_subparsers(title="kinds", metavar="KIND", required=True, parser_class=type(timed))
    for name, bench in BENCHES.items():
        told = kinds.add_parser(
            name,
            parents=list(parents),
            usage=f"ringtrain bench {name} [options] [-- options of ringtrain.train]",
            description=f"Measures, in turns: {bench.help}. Starts ranks as ringtrain launch does.",
            help=bench.help,
        )
        for flag, meaning in bench.options:
            told.add_argument(flag, **meaning)
        told.set_defaults(handler=lambda options: measure(options, parents, launch), name="bench", kind=name)


def measure(
    options: argparse.Namespace,
    parents: Sequence[argparse.ArgumentParser],
    launch: Callable[[argparse.Namespace], int],
) -> int:
    """Runs one bench.

    Raises:
        LaunchError: A number is below 1, or an option of launch only prints.
    """
    bench = BENCHES[options.kind]
    for flag, meaning in bench.options:
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if meaning.get("type") is int and value < 1:
            raise LaunchError(f"got {flag} {value}, expected 1 or more")
    return start_module(bench.module, options, parents, launch)


def start_module(
    module: str,
    options: argparse.Namespace,
    parents: Sequence[argparse.ArgumentParser],
    launch: Callable[[argparse.Namespace], int],
) -> int:
    """Runs a module that measures by starting ranks; sets options.launch_words to the given options of launch.

    Raises:
        LaunchError: An option of launch only prints, or is --elastic.
    """
    if options.dry_run or options.explain or options.elastic:
        raise LaunchError(f"{options.name} runs what it measures: leave out --dry-run, --explain and --elastic")
    from ringtrain.lab.starts import starter

    options.launch_words = [word for parent in parents for word in words_of(parent, options)]
    return importlib.import_module(f"ringtrain.lab.{module}").main(options, starter(options, launch))


def add_tune(
    commands: argparse._SubParsersAction[Any],
    parents: Sequence[argparse.ArgumentParser],
    launch: Callable[[argparse.Namespace], int],
) -> None:
    """Adds `ringtrain tune`; the arguments are those of add_bench."""
    told = commands.add_parser(
        "tune",
        parents=list(parents),
        usage="ringtrain tune [options] [-- options of ringtrain.train]",
        description="Tries settings of a training in short runs, measured in turns, and writes a TOML with those that"
        " made it faster. Starts ranks as ringtrain launch does. See docs/tuning.md.",
        help="find the settings with which training is fastest here",
    )
    told.add_argument("--only", default="", metavar="LIST", help="levers to try, e.g. groups,threads; else all")
    told.add_argument("--budget", default="5m", metavar="TIME", help="at most so long: 90s, 5m, 1h (5m)")
    told.add_argument(
        "--out", default="", metavar="FILE", help="write the settings as TOML, for ringtrain.train --config"
    )
    told.add_argument(
        "--allow-compression", action="store_true", help="keep 16-bit gradients if they are faster: numbers change"
    )

    told.set_defaults(handler=lambda options: start_module("tune.cli", options, parents, launch), name="tune")


def add_sweep(
    commands: argparse._SubParsersAction[Any],
    parents: Sequence[argparse.ArgumentParser],
    launch: Callable[[argparse.Namespace], int],
    find_hosts: Callable[[argparse.Namespace], tuple[Sequence[Any], str]],
) -> None:
    """Adds `ringtrain sweep`; find_hosts returns the hosts of the command line and their source."""
    told = commands.add_parser(
        "sweep",
        parents=list(parents),
        usage="ringtrain sweep --space FILE [options] [-- options of ringtrain.train]",
        description="Trains with many values of some options, as many trials at once as there are slots, and says which"
        " are best by train.monitor; the same command goes on after an interruption. See docs/sweep.md.",
        help="try many values of some options, side by side",
    )
    told.add_argument("--space", required=True, metavar="FILE", help="TOML with the values of each option to try")
    told.add_argument("--trials", type=int, default=0, metavar="N", help="in all (20; of a grid all)")
    told.add_argument(
        "--sampler",
        choices=("grid", "random", "tpe"),
        default="tpe",
        help="all combinations, any, or those that promise most (tpe)",
    )
    told.add_argument("--prune", choices=("asha", "none"), default="none", help="end trials that fall behind (none)")
    told.add_argument("--ranks-per-trial", type=int, default=1, metavar="R", help="of each trial's ring (1)")
    told.add_argument(
        "--ensemble", type=int, default=0, metavar="K", help="also evaluate the averaged prediction of the best K"
    )

    def sweep(options: argparse.Namespace) -> int:
        options.found_hosts, _ = find_hosts(options)
        nowhere = argparse.Namespace(**{**vars(options), "hostfile": None, "hosts": None, "include": "", "exclude": ""})
        options.trial_words = [word for parent in parents for word in words_of(parent, nowhere)]
        return start_module("sweep.cli", options, parents, launch)

    told.set_defaults(handler=sweep, name="sweep")


def add_compare(
    commands: argparse._SubParsersAction[Any],
    parents: Sequence[argparse.ArgumentParser],
    launch: Callable[[argparse.Namespace], int],
    find_hosts: Callable[[argparse.Namespace], tuple[Sequence[Any], str]],
) -> None:
    """Adds `ringtrain compare`; the arguments are those of add_sweep."""
    told = commands.add_parser(
        "compare",
        parents=list(parents),
        usage="ringtrain compare --strategies LIST --config FILE [options] [-- options of ringtrain.train]",
        description="Trains the same job under several strategies, in turns, with -np copies of the model under each;"
        " the same command goes on after an interruption. See docs/strategies.md.",
        help="train the same job under several strategies",
    )
    told.add_argument(
        "--strategies", required=True, metavar="LIST", help="e.g. ring,towers:reduction=all,one (one: a copy alone)"
    )
    told.add_argument("--config", default="", metavar="FILE", help="TOML of the job, as of ringtrain.train")
    told.add_argument(
        "--budget",
        default="",
        metavar="LIST",
        help="epochs=5, time=60s, accuracy=0.97, what comes first; else as the job has it",
    )
    told.add_argument("--seeds", type=int, default=3, metavar="N", help="runs under each (3)")
    for option in (OUT, PLOT, ("--html", {"default": "", "metavar": "FILE", "help": "write a page about them"})):
        told.add_argument(option[0], **option[1])

    def compare(options: argparse.Namespace) -> int:
        options.found_hosts, _ = find_hosts(options)
        anyhow = argparse.Namespace(**{**vars(options), "np": None, "ps": None})
        options.run_words = [word for parent in parents for word in words_of(parent, anyhow)]
        return start_module("compare.cli", options, parents, launch)

    told.set_defaults(handler=compare, name="compare")


def words_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Command-line arguments for all options that are not at their defaults."""
    words: list[str] = []
    for action in parser._actions:
        value = getattr(options, action.dest, action.default)
        if value == action.default:
            continue
        flag = action.option_strings[-1]
        if isinstance(action, argparse._AppendAction):
            words += [word for one in value for word in (flag, str(one))]
        else:
            words += [flag, *([] if action.nargs == 0 else map(str, value) if action.nargs else [str(value)])]
    return words


def add_predict(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds `ringtrain predict`; omitted options have the defaults of lab.predict."""
    told = commands.add_parser(
        "predict",
        argument_default=argparse.SUPPRESS,
        description="Predicts images/s at any number of ranks from one process' step and a network; or says what would"
        " reach an efficiency. See docs/predict.md.",
        help="say how fast training would be on more ranks",
    )
    step = told.add_argument_group("one process' step")
    step.add_argument("--profile", metavar="FILE", help="as bench train writes it")
    step.add_argument("--model", metavar="NAME", help="instead: resnet50, resnet101, inceptionv3 or vgg16")
    step.add_argument("--model-images-per-s", type=float, metavar="X", help="of that model on one device")
    step.add_argument("--model-batch", type=int, metavar="N", help="with this batch (64)")
    step.add_argument("--batch", type=int, metavar="N", help="predict for another batch per rank")
    step.add_argument("--jitter", type=float, metavar="X", help="standard deviation of a step's time, as a share of it")
    where = told.add_argument_group("where")
    where.add_argument(
        "--link", metavar="RATE", help="of a host: 25Gbps, 1.4GB/s, or what doctor or bench allreduce wrote (25Gbps)"
    )
    where.add_argument("--latency-us", type=float, metavar="X", help="of that, one way (25)")
    where.add_argument("--local-link", metavar="RATE", help="between two ranks of a host (10GB/s)")
    where.add_argument("--local-latency-us", type=float, metavar="X", help="of that, one way (5)")
    where.add_argument("--ranks-per-host", type=int, metavar="N", help="ranks of a host (1)")
    where.add_argument("--cores-per-host", type=float, metavar="X", help="that ranks compute on; else each has a GPU")
    where.add_argument("--calibrate-ranks", type=int, metavar="N", help="a measured point on one host: so many ranks")
    where.add_argument("--calibrate-images-per-s", type=float, metavar="X", help="were so fast, all together")
    how = told.add_argument_group("how")
    how.add_argument("--transport", metavar="NAME", help="nccl-tcp, nccl-rdma, mpi, mpi-rdma or gloo (nccl-tcp)")
    how.add_argument("--algorithm", metavar="NAME", help="ring, hierarchical, halving: for --reach and parts (ring)")
    how.add_argument("--compression", metavar="NAME", help="none or fp16 (none)")
    how.add_argument("--accumulation", type=int, metavar="N", help="steps per update (1)")
    how.add_argument("--fusion-mb", type=float, metavar="X", help="Horovod's fusion buffer (128)")
    how.add_argument("--cycle-ms", type=float, metavar="X", help="Horovod's cycle time (1)")
    how.add_argument("--servers", type=int, metavar="N", help="also with so many parameter servers")
    shown = told.add_argument_group("what")
    shown.add_argument(
        "--ranks", metavar="LIST", help="numbers of ranks: 1,2,4, or ..128 for the powers of two (..128)"
    )
    shown.add_argument(
        "--reach", type=float, metavar="X", help="what reaches this efficiency on the most of these ranks?"
    )
    shown.add_argument("--measured", metavar="FILE", help="measured points, to see predictions beside them")
    shown.add_argument("--json", dest="as_json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--plot", metavar="FILE", help="draw images/s over ranks as PNG")
    told.set_defaults(handler=predict, name="predict")


def predict(options: argparse.Namespace) -> int:
    """Runs `ringtrain predict`."""
    from ringtrain.lab.predict import cli

    given = {
        name: value for name, value in vars(options).items() if name not in ("handler", "name", "command", "environ")
    }
    shown = {name: given.pop(name) for name in ("ranks", "reach", "measured", "as_json", "plot") if name in given}
    return cli.main(given, cli.Wanted(**shown))


def add_report(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds `ringtrain report`."""
    told = commands.add_parser(
        "report",
        description="Writes one HTML page, which needs nothing else, about a run, or about several side by side. See"
        " docs/tracking.md.",
        help="say what came of a run, or what happened to it",
    )
    told.add_argument(
        "run", nargs="+", metavar="RUN", help="folder of a run, e.g. runs/digits, or a file that bench --out wrote"
    )
    told.add_argument("--out", default="", metavar="FILE", help="write it there (report.html in the first folder)")
    told.add_argument("--markdown", action="store_true", help="print its tables as Markdown instead")
    told.add_argument("--post-mortem", action="store_true", help="all ranks' journals in one table, with a verdict")
    told.add_argument(
        "--timeline", default="", metavar="FILE", help="merge what the ranks of a run that was killed left"
    )
    told.set_defaults(handler=report, name="report")


def report(options: argparse.Namespace) -> int:
    """Runs `ringtrain report`."""
    from ringtrain.lab.report import cli

    return cli.main(options)
