"""The command `ringtrain`: launch, hosts, doctor. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ringtrain.errors import LaunchError, RingtrainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringtrain.cluster.hosts import Host
    from ringtrain.cluster.job import Job, Plan

LAUNCHERS = ("mpirun", "horovodrun", "horovodrun-gloo", "srun", "sbatch", "mpijob")
VERSION_TIMEOUT_S = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command line without the program's name; None: sys.argv.

    Returns:
        Its exit code; 2 after an error that a person can mend, which is said in one line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    try:
        options = parser().parse_args(own)
        if command and options.handler is not launch:
            raise LaunchError(f"got a command after --, which ringtrain {options.name} does not run: leave it out")
        options.command = command
        return options.handler(options)
    except RingtrainError as error:
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing a page."""
        raise LaunchError(f"{message}: see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(prog="ringtrain", description="Starts and examines training jobs on one host or many.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    where = Parser(add_help=False)
    named = where.add_mutually_exclusive_group()
    named.add_argument("--hostfile", metavar="FILE", help="hosts and slots, in any of the usual formats")
    named.add_argument("-H", "--hosts", metavar="LIST", help="the same in a line: host1:4,host2:4")
    where.add_argument("--include", metavar="LIST", default="", help="of these, only: host1,host2:0-1")
    where.add_argument("--exclude", metavar="LIST", default="", help="of these, all but: host1:3")
    where.add_argument("--ssh-port", type=int, default=0, metavar="PORT", help="else as ssh itself has it configured")
    where.add_argument("--subnet", default="", metavar="CIDR", help="network that ranks talk over, e.g. 10.1.0.0/16")

    told = commands.add_parser(
        "launch",
        parents=[where],
        usage="ringtrain launch [options] -- COMMAND ...",
        description="Runs COMMAND as many ranks. Without hosts: those of the scheduler's job, else this machine.",
        help="run a command as many ranks",
    )
    told.add_argument("-np", type=int, metavar="N", help="ranks; else as many as there are slots")
    told.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help="what starts them (mpirun)")
    told.add_argument("--bind", choices=("none", "core"), default="none", help="cores of its own for each rank (none)")
    told.add_argument("--network", choices=("tcp", "ucx"), default="tcp", help="TCP, or InfiniBand and RoCE (tcp)")
    told.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads of a rank; else it decides")
    told.add_argument(
        "--forward", action="append", default=[], metavar="NAME", help="hand on a variable besides the usual ones"
    )
    told.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots")
    told.add_argument("--output", default="", metavar="DIR", help="keep a log per rank")
    told.add_argument(
        "--start-timeout", type=float, default=60, metavar="S", help="for hosts to answer and ranks to begin (60)"
    )
    told.add_argument(
        "--grace",
        type=float,
        default=8,
        metavar="S",
        help="after SIGTERM, for ranks to save before they are killed (8)",
    )
    shown = told.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="print the command instead, to be pasted")
    shown.add_argument("--explain", action="store_true", help="print every flag of it with its reason instead")
    told.set_defaults(handler=launch, name="launch")

    listed = commands.add_parser("hosts", parents=[where], help="print the hosts that a launch would use")
    listed.set_defaults(handler=hosts, name="hosts")
    return top


def launch(options: argparse.Namespace) -> int:
    """Runs a job, or shows how it would be run."""
    from dataclasses import replace

    from ringtrain.cluster import run
    from ringtrain.cluster.hosts import take

    if not options.command:
        raise LaunchError("got no command to run: ringtrain launch [options] -- python -m ringtrain.train ...")
    for name in ("start_timeout", "grace"):
        if not getattr(options, name) > 0:
            option = name.replace("_", "-")
            raise LaunchError(f"got --{option} {getattr(options, name):g}, expected a number of seconds above 0")
    found, _ = find_hosts(options, options.np)
    num_ranks = sum(host.slots for host in found) if options.np is None else options.np
    job = job_of(options, take(found, num_ranks, options.oversubscribe), num_ranks)
    planner = planner_of(options.launcher, run.call)
    if options.explain:
        from ringtrain.cluster.explain import show

        show(planner(job))
        return 0
    if options.dry_run:
        plan = planner(job)
        for name, text in plan.files.items():
            print(f"# {name}:\n{text}")
        print(plan.shell())
        return 0
    if options.launcher in ("sbatch", "mpijob"):
        return run.submit(planner(job))
    if options.output:
        job = replace(job, output=str(Path(options.output).absolute()))
    terms = run.Terms(options.start_timeout, options.grace, over_ssh=options.launcher != "srun")
    return run.run(job, planner, terms)


def hosts(options: argparse.Namespace) -> int:
    """Prints the hosts, each with its slots, in a form that -H takes."""
    found, source = find_hosts(options)
    for host in found:
        print(host)
    print(f"{len(found)} hosts, {sum(host.slots for host in found)} slots, from {source}", file=sys.stderr)
    return 0


def find_hosts(options: argparse.Namespace, num_ranks: int | None = None) -> tuple[tuple[Host, ...], str]:
    """The hosts that the command line names, else the scheduler, else this machine.

    Returns:
        The hosts, and where they come from.
    """
    from ringtrain.cluster.hosts import Host, parse_hosts, read_hostfile, select
    from ringtrain.cluster.scheduler import find

    if options.hostfile is not None:
        found, source = read_hostfile(Path(options.hostfile)), options.hostfile
    elif options.hosts is not None:
        found, source = parse_hosts(options.hosts), "-H"
    elif allocation := find(os.environ):
        found, source = allocation.hosts, f"{allocation.scheduler}: {allocation.source}"
    else:
        found, source = (Host("localhost", slots_here()),), "this machine"
    if options.include or options.exclude:
        found = select(found, options.include, options.exclude)
    return found, source


def slots_here(gpus: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Ranks that this machine takes: one per GPU, without GPUs one per core."""
    num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    return num_gpus or len(os.sched_getaffinity(0))


def job_of(options: argparse.Namespace, used: tuple[Host, ...], num_ranks: int) -> Job:
    """What the command line asks for.

    Args:
        options: of launch.
        used: hosts with as many slots as they get ranks.
        num_ranks: in all.
    """
    import ipaddress

    from ringtrain.cluster.job import Job

    if options.subnet:
        try:
            ipaddress.ip_network(options.subnet)
        except ValueError as error:
            raise LaunchError(
                f"got --subnet {options.subnet}, expected a network such as 10.1.0.0/16: {error}"
            ) from error
    return Job(
        command=tuple(options.command),
        num_ranks=num_ranks,
        hosts=used,
        environment=dict(os.environ),
        forward=tuple(options.forward),
        working_directory=str(Path.cwd()),
        bind=options.bind,
        network=options.network,
        subnet=options.subnet,
        ssh_port=options.ssh_port,
        threads_per_rank=options.threads,
        oversubscribe=options.oversubscribe,
        output=options.output,
        # Of the other hosts' cores we know nothing; hosts of a job are mostly alike.
        yield_when_idle=max(host.slots for host in used) >= len(os.sched_getaffinity(0)),
    )


def planner_of(launcher: str, call: Callable[..., str]) -> Callable[[Job], Plan]:
    """What makes the command of a job, for one launcher.

    Args:
        launcher: one of LAUNCHERS.
        call: runs a short command, to ask mpirun what it is.
    """
    from functools import partial

    from ringtrain.cluster import horovodrun, kubernetes, mpi, slurm

    if launcher == "mpirun":
        return partial(mpi.plan, dialect=mpi.identify(call(["mpirun", "--version"], VERSION_TIMEOUT_S)))
    return {
        "horovodrun": horovodrun.plan,
        "horovodrun-gloo": partial(horovodrun.plan, gloo=True),
        "srun": slurm.srun,
        "sbatch": slurm.sbatch,
        "mpijob": kubernetes.plan,
    }[launcher]


if __name__ == "__main__":
    raise SystemExit(main())
