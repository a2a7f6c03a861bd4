"""Command line `ringtrain`: launch, measure, report. Modules of a command are imported when it runs."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ringtrain.errors import LaunchError, RingtrainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringtrain.cluster.hosts import Host
    from ringtrain.cluster.job import Job, Plan
    from ringtrain.cluster.plans.kubernetes import Cluster
    from ringtrain.cluster.restart import Policy

LAUNCHERS = ("mpirun", "horovodrun", "horovodrun-gloo", "srun", "sbatch", "mpijob", "spark")
PROGRAMS = {"mpirun": "mpirun", "horovodrun": "horovodrun", "horovodrun-gloo": "horovodrun", "srun": "srun"}
OVER_SSH = ("mpirun", "horovodrun", "horovodrun-gloo")
HANDED_OVER = ("sbatch", "mpijob")
"""launchers that submit the job to a scheduler and do not supervise it"""
VERSION_TIMEOUT_S = 20.0
SPARK_START_S = 60.0
"""for Spark itself to start, before it is asked for slots"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 after an error, printed in one line. argv None: sys.argv."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    try:
        options = parser().parse_args(own)
        if command and options.name not in ("launch", "bench", "tune", "sweep", "compare"):
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
        """Raises LaunchError instead of printing the usage."""
        raise LaunchError(f"{message}: see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Parser of the whole command line."""
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

    told = Parser(add_help=False)
    told.add_argument("-np", type=int, metavar="N", help="ranks; else as many as there are slots")
    told.add_argument("--ps", type=int, metavar="P", help="ranks that are parameter servers (docs/strategies.md)")
    told.add_argument("--workers", type=int, metavar="W", help="ranks that train beside them; -np is both together")
    told.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help="what starts them (mpirun)")
    told.add_argument(
        "--bind", choices=("none", "core"), default="none", help="core: --threads cores for each rank (none)"
    )
    told.add_argument("--network", choices=("tcp", "ucx"), default="tcp", help="TCP, or InfiniBand and RoCE (tcp)")
    told.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads of a rank; else it decides")
    told.add_argument(
        "--forward", action="append", default=[], metavar="NAME", help="hand on a variable besides the usual ones"
    )
    told.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots")
    told.add_argument("--output", default="", metavar="DIR", help="keep a log per rank")
    told.add_argument(
        "--timeline", default="", metavar="FILE", help="timelines of all ranks of ringtrain.train, for Perfetto"
    )
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
    spark = told.add_argument_group("with --launcher spark (docs/spark.md)")
    spark.add_argument("--master", default="", metavar="URL", help="e.g. local[2]; else as spark-defaults.conf has it")
    spark.add_argument(
        "--spark-data", default="", metavar="MODULE:FUNCTION", help="gives DataFrames for --data.name spark of ranks"
    )
    spark.add_argument(
        "--spark-conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark; may be repeated"
    )
    workers = told.add_argument_group("with --launcher mpijob (docs/docker.md)")
    workers.add_argument("--image", default="", metavar="NAME", help="image of all containers (ringtrain)")
    workers.add_argument("--job-name", default="", metavar="NAME", help="name of the MPIJob (ringtrain)")
    workers.add_argument("--namespace", default="", metavar="NAME", help="where to create it; else as kubectl has it")
    workers.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each worker (0)")
    workers.add_argument(
        "--resources",
        default="",
        metavar="LIST",
        help="limits of each worker, for namespaces with a quota: cpu=8,memory=32Gi (none)",
    )
    again = told.add_argument_group("when the job fails")
    again.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start it again so often, from its newest checkpoint (0)",
    )
    again.add_argument("--restart-on", default="", metavar="REGEX", help="also if the cause has this in it")
    again.add_argument("--give-up-on", default="", metavar="REGEX", help="not if the cause has this in it")
    again.add_argument("--keep-hosts", action="store_true", help="never leave out a host that has failed twice")
    again.add_argument("--min-np", type=int, default=1, metavar="N", help="go on with fewer ranks, down to N (1)")
    changing = told.add_argument_group("hosts that come and go (docs/elastic.md)")
    changing.add_argument("--elastic", action="store_true", help="go on with the hosts that there are, over Gloo")
    changing.add_argument("--max-np", type=int, metavar="N", help="ranks at most; else as many as slots at the start")
    changing.add_argument("--host-discovery", default="", metavar="PROGRAM", help="prints the hosts of now: host:slots")
    changing.add_argument(
        "--network-interface", default="", metavar="NAME", help="of all hosts, for horovodrun; else it is looked for"
    )
    changing.add_argument(
        "--blacklist-cooldown",
        type=int,
        nargs=2,
        default=(15, 600),
        metavar=("S", "MAX"),
        help="a host whose rank has failed may come back after about twice S, longer each time (15 600); 0 0: never",
    )
    shown = told.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="print the command, script or manifest instead")
    shown.add_argument("--explain", action="store_true", help="print every flag of it with its reason instead")
    launched = commands.add_parser(
        "launch",
        parents=[where, told],
        usage="ringtrain launch [options] -- COMMAND ...",
        description="Runs COMMAND as many ranks. Without hosts: those of the scheduler's job, else this machine.",
        help="run a command as many ranks",
    )
    launched.set_defaults(handler=launch, name="launch")

    from ringtrain.lab import commands as lab

    lab.add_bench(commands, (where, told), launch)
    lab.add_tune(commands, (where, told), launch)
    lab.add_sweep(commands, (where, told), launch, find_hosts)
    lab.add_compare(commands, (where, told), launch, find_hosts)

    listed = commands.add_parser("hosts", parents=[where], help="print the hosts that a launch would use")
    listed.set_defaults(handler=hosts, name="hosts")

    asked = commands.add_parser(
        "doctor",
        parents=[where],
        description="Asks every host about itself and measures the links between hosts. Without hosts: those of the"
        " scheduler's job, else this machine. Exit code: 0 all is well, 1 there are warnings, 2 something hurts.",
        help="say what is wrong with hosts before ranks do",
    )
    asked.add_argument("--run-directory", default="runs", metavar="DIR", help="folder that holds all runs (runs)")
    asked.add_argument("--code", default=".", metavar="DIR", help="folder of your code, the same on every host (.)")
    asked.add_argument("--no-bandwidth", action="store_true", help="do not measure the links between hosts")
    asked.add_argument("--timeout", type=float, default=10, metavar="S", help="for a host to answer (10)")
    asked.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    asked.set_defaults(handler=doctor, name="doctor")
    lab.add_predict(commands)
    lab.add_report(commands)
    return top


def launch(options: argparse.Namespace) -> int:
    """Runs a job, or prints its plan."""
    from ringtrain.cluster import environment, host_agent, processes, restart, supervisor
    from ringtrain.cluster.hosts import take

    if not options.command:
        raise LaunchError("got no command to run: ringtrain launch [options] -- python -m ringtrain.train ...")
    for name in ("start_timeout", "grace"):
        if not 0 < getattr(options, name) < math.inf:
            option = name.replace("_", "-")
            raise LaunchError(f"got --{option} {getattr(options, name):g}, expected a number of seconds above 0")
    if options.bind == "core" and options.threads < 1:
        raise LaunchError("got --bind core without --threads: give --threads N, the number of cores of each rank")
    if options.elastic:
        return launch_elastic(options)
    take_roles(options)
    found, _ = find_hosts(options)
    num_ranks = sum(host.slots for host in found) if options.np is None else options.np
    planner, dialect = planner_of(options)

    here = host_agent.here(host.name for host in found) if options.launcher in OVER_SSH else frozenset()

    def job_on(hosts: Sequence[Host], ranks: int) -> Job:
        used = take(hosts, ranks, options.oversubscribe)
        if dialect == "openmpi4":  # fills the launching host first, wherever it is listed
            first = next((host for host in used if host.name in here), used[0])
            used = (first, *(host for host in used if host != first))
        return job_of(options, used, ranks, here)

    policy = policy_of(options, num_ranks)
    job = job_on(found, num_ranks)
    if any(host.indices for host in job.hosts) and (options.dry_run or options.launcher in HANDED_OVER):
        chosen = next(host for host in job.hosts if host.indices)
        raise LaunchError(
            f"{chosen.name}: slots that are not its first ones (--include, --exclude) are given to ranks by ringtrain"
            f" launch itself, as it runs: leave out --dry-run, and take mpirun, horovodrun or srun"
        )
    if options.explain:
        explain(planner(job))
        return 0
    if options.dry_run:
        show_dry(planner, job, options.launcher in HANDED_OVER)
        return 0
    if options.launcher in HANDED_OVER:
        return processes.submit(planner(job), job.files_folder)
    start_timeout_s = options.start_timeout
    if options.launcher == "spark":
        from ringtrain.cluster.spark.session import check_installed

        check_installed()
        start_timeout_s += SPARK_START_S
    else:
        processes.find(PROGRAMS[options.launcher])
    over_ssh = options.launcher in OVER_SSH
    terms = supervisor.SupervisorOptions(
        launcher=options.launcher, start_timeout_s=start_timeout_s, grace_s=options.grace, over_ssh=over_ssh
    )
    if over_ssh and (line := environment.not_handed_on(job)):
        processes.say(line)
    return restart.run_again(found, num_ranks, options.oversubscribe, job_on, planner, policy, terms)


def take_roles(options: argparse.Namespace) -> None:
    """Sets the number of ranks if some are parameter servers. Raises LaunchError if numbers do not fit together."""
    if options.ps is None and options.workers is None:
        return
    if options.launcher in ("horovodrun-gloo", "spark"):
        raise LaunchError(f"got --ps or --workers with --launcher {options.launcher}: whose ranks have no MPI")
    num_servers = 1 if options.ps is None else options.ps
    if num_servers < 1 or (options.workers is not None and options.workers < 1):
        raise LaunchError(f"got --ps {num_servers} --workers {options.workers}, expected 1 or more of each")
    if options.workers is not None:
        if options.np not in (None, num_servers + options.workers):
            raise LaunchError(
                f"got -np {options.np} with --ps {num_servers} --workers {options.workers}: leave out one of the three"
            )
        options.np = num_servers + options.workers
    elif options.np is not None and options.np <= num_servers:
        raise LaunchError(f"got --ps {num_servers} with -np {options.np}: no rank is left to be a worker")
    options.ps = num_servers


def launch_elastic(options: argparse.Namespace) -> int:
    """Runs a job whose hosts join and leave, or prints its plan."""
    from ringtrain.cluster import elastic, environment, processes, restart, supervisor
    from ringtrain.cluster.hosts import take
    from ringtrain.cluster.plans import horovodrun

    if options.launcher not in ("mpirun", "horovodrun-gloo"):
        raise LaunchError(
            f"got --launcher {options.launcher} with --elastic, which runs horovodrun over Gloo: leave it out"
        )
    refuse_options_of_others(options)
    if options.timeline:
        raise LaunchError("got --timeline with --elastic, whose ranks come and go: leave it out")
    if options.ps or options.workers:
        raise LaunchError("got --ps or --workers with --elastic, whose ranks are all alike: leave them out")
    found = find_hosts(options)[0] if not options.host_discovery else elastic.discovery(options.host_discovery, ())()
    if any(host.indices for host in found):
        raise LaunchError(
            "slots that are not a host's first ones (--include, --exclude) have no place in an elastic job"
        )
    num_ranks = options.min_np if options.np is None else options.np
    max_ranks = options.max_np or max(num_ranks, sum(host.slots for host in found))
    shown = options.explain or options.dry_run

    def job_on(hosts: Sequence[Host], ranks: int) -> Job:
        return job_of(options, take(hosts, ranks), ranks, frozenset())  # looked up as hosts join

    def planner(job: Job) -> Plan:
        return horovodrun.elastic(
            job,
            min_ranks=options.min_np,
            max_ranks=max_ranks,
            # A running job is shown only the hosts that answer, see cluster/elastic.py.
            discovery=options.host_discovery if shown else "",
            interface=options.network_interface,
            start_timeout_s=max(1, int(options.start_timeout)),
            cooldown_s=tuple(options.blacklist_cooldown),
            python=sys.executable,
        )

    policy = policy_of(options, num_ranks)
    if options.explain:
        explain(planner(job_on(found, num_ranks)))
        return 0
    if options.dry_run:
        show_dry(planner, job_on(found, num_ranks), False)
        return 0
    processes.find("horovodrun")
    discover = elastic.discovery(options.host_discovery, found)
    terms = supervisor.SupervisorOptions(
        launcher="horovodrun",
        start_timeout_s=options.start_timeout,
        grace_s=options.grace,
        watcher=lambda name, job, terms: elastic.ElasticSupervisor(name, job, terms, discover),
    )
    if line := environment.not_handed_on(job_on(found, num_ranks)):
        processes.say(line)
    return restart.run_again(found, num_ranks, False, job_on, planner, policy, terms)


def policy_of(options: argparse.Namespace, num_ranks: int) -> Policy:
    """Restart policy. Raises LaunchError for invalid numbers, or if the launcher does not supervise the job."""
    from ringtrain.cluster.restart import Policy

    if options.max_restarts < 0:
        raise LaunchError(f"got --max-restarts {options.max_restarts}, expected 0 or more")
    if not 1 <= options.min_np <= max(1, num_ranks):
        raise LaunchError(f"got --min-np {options.min_np}, expected 1 to {num_ranks}, the number of ranks")
    if options.max_restarts and options.launcher in HANDED_OVER:
        raise LaunchError(
            f"got --max-restarts with --launcher {options.launcher}, which hands the job over and does not stay with"
            f" it: leave it out; Slurm's --requeue and Kubernetes' backoffLimit do the same there"
        )
    # With servers, fewer ranks would have other roles, which no option gives.
    min_ranks = options.min_np if options.ps is None else num_ranks
    return Policy(
        options.max_restarts,
        restart_on=options.restart_on,
        give_up_on=options.give_up_on,
        keep_hosts=options.keep_hosts,
        min_ranks=min_ranks,
    )


def explain(plan: Plan) -> None:
    """Prints a plan as a table: every flag with its reason."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ringtrain.cluster import job

    table = Table("part", "reason", box=box.SIMPLE_HEAD)
    for part, reason in job.explain(plan):
        table.add_row(Text(part, overflow="fold"), Text(reason, overflow="fold"))
    Console().print(table)


def show_dry(planner: Callable[[Job], Plan], job: Job, is_handed_over: bool) -> None:
    """Prints the line to paste; for a scheduler the script or manifest, with the command to submit it on stderr."""
    import shlex
    from dataclasses import replace

    from ringtrain.cluster.job import FRESH

    plan = planner(replace(job, files_folder=FRESH))
    if not is_handed_over:
        print(plan.shell())
        return
    ((path, text),) = plan.files.items()
    name = Path(path).suffix.removeprefix(".")
    print(text, end="")
    sys.stdout.flush()
    line = shlex.join(f"job.{name}" if word == path else word for word in plan.argv)
    line = f"mkdir -p -- {shlex.quote(job.output)} && {line}" if job.output else line
    print(f"# keep it as job.{name}, and submit it by: {line}", file=sys.stderr)


def hosts(options: argparse.Namespace) -> int:
    """Prints the hosts with their slots, in the format of -H."""
    found, source = find_hosts(options)
    for host in found:
        print(host)
    print(f"{len(found)} hosts, {sum(host.slots for host in found)} slots, from {source}", file=sys.stderr)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Checks hosts, and prints the findings."""
    from ringtrain.cluster.doctor import preflight

    found, _ = find_hosts(options)
    wanted = preflight.Options(
        run_directory=options.run_directory,
        code=options.code,
        bandwidth=not options.no_bandwidth,
        timeout_s=options.timeout,
        ssh_port=options.ssh_port,
        subnet=options.subnet,
    )
    return preflight.main(found, wanted, options.json)


def find_hosts(options: argparse.Namespace) -> tuple[tuple[Host, ...], str]:
    """Hosts of the command line, else of the scheduler, else this machine; and their source."""
    from ringtrain.cluster.hosts import Host, parse_hosts, read_hostfile, select
    from ringtrain.cluster.schedulers import find

    if getattr(options, "launcher", "") == "spark":
        return (Host("spark", spark_slots(options)),), "Spark"
    if options.hostfile is not None:
        found, source = read_hostfile(Path(options.hostfile)), options.hostfile
    elif options.hosts is not None:
        found, source = parse_hosts(options.hosts), "-H"
    elif allocation := find(os.environ):
        found, source = allocation.hosts, f"{allocation.scheduler}: {allocation.source}"
    else:
        # A launcher that submits the job uses this as the number of ranks, and requests other machines.
        elsewhere = getattr(options, "launcher", "") in HANDED_OVER
        found, source = (Host("localhost", (elsewhere and options.np) or slots_here()),), "this machine"
    if options.include or options.exclude:
        found = select(found, options.include, options.exclude)
    return found, source


def slots_here(gpus: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Slots of this machine: one per GPU, without GPUs one per core."""
    num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    return num_gpus or len(os.sched_getaffinity(0))


OPTIONS_OF_ONE_LAUNCHER = {
    **dict.fromkeys(("master", "spark_conf", "spark_data"), "spark"),
    **dict.fromkeys(("image", "job_name", "namespace", "gpus", "resources"), "mpijob"),
}


def refuse_options_of_others(options: argparse.Namespace) -> None:
    """Raises LaunchError for options of a launcher other than the chosen one."""
    for name, launcher in OPTIONS_OF_ONE_LAUNCHER.items():
        if getattr(options, name) and options.launcher != launcher:
            option = name.replace("_", "-")
            raise LaunchError(f"got --{option} with --launcher {options.launcher}, expected --launcher {launcher}")


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Request to Kubernetes. Raises LaunchError for invalid --gpus or --resources."""
    from ringtrain.cluster.plans.kubernetes import Cluster

    if options.gpus < 0:
        raise LaunchError(f"got --gpus {options.gpus}, expected the number of GPUs of each worker, 0 or more")
    pairs = [item.partition("=") for item in options.resources.split(",") if item]
    for name, sign, amount in pairs:
        if not (name and sign and amount):
            raise LaunchError(
                f"got --resources {options.resources}, expected amounts by name such as cpu=8,memory=32Gi"
            )
    told = {"image": options.image, "name": options.job_name, "namespace": options.namespace}
    return Cluster(
        **{name: value for name, value in told.items() if value},
        gpus_per_worker=options.gpus,
        resources={name: amount for name, _, amount in pairs},
    )


def spark_slots(options: argparse.Namespace) -> int:
    """Slots to request from Spark: -np, else those of a local master. Spark itself chooses the hosts."""
    from ringtrain.cluster.spark.session import local_slots

    if options.hostfile or options.hosts or options.include or options.exclude:
        raise LaunchError("got hosts with --launcher spark, which has executors instead: leave them out, say --master")
    slots = local_slots(options.master) if options.np is None else options.np
    if slots is None:
        raise LaunchError("got no -np: with --launcher spark, how many slots there are is known only to Spark: give it")
    if slots < 1:
        raise LaunchError(f"got -np {slots}, expected 1 rank or more")
    return slots


def job_of(options: argparse.Namespace, used: tuple[Host, ...], num_ranks: int, here: frozenset[str]) -> Job:
    """Job of the command line. used: Hosts with as many slots as they get ranks."""
    from ringtrain.cluster.job import Job

    environment = {**os.environ, **options.environ}
    # The other hosts' cores are not known; hosts of a job are mostly alike.
    full = max(host.slots for host in used) >= len(os.sched_getaffinity(0))
    wanted = environment.get("OMPI_MCA_mpi_yield_when_idle")
    return Job(
        command=tuple(options.command),
        num_ranks=num_ranks,
        hosts=() if options.launcher == "spark" else used,
        environment=environment,
        forward=(*options.forward, *options.environ),
        working_directory=str(Path.cwd()),
        bind=options.bind,
        network=options.network,
        subnet=options.subnet,
        ssh_port=options.ssh_port,
        threads_per_rank=options.threads,
        oversubscribe=options.oversubscribe,
        output=str(Path(options.output).absolute()) if options.output else "",
        num_servers=options.ps or 0,
        timeline=str(Path(options.timeline).absolute()) if options.timeline else "",
        here=here,
        allow_root=os.geteuid() == 0,
        files_folder=os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/ringtrain-{os.geteuid()}",
        yield_when_idle=full if wanted is None else wanted == "1",
    )


def planner_of(options: argparse.Namespace) -> tuple[Callable[[Job], Plan], str]:
    """Function that plans a job for the chosen launcher, and the dialect of mpirun, "" if it is not used."""
    from functools import partial

    from ringtrain.cluster import processes
    from ringtrain.cluster.plans import horovodrun, kubernetes, mpirun, slurm

    refuse_options_of_others(options)
    own = {"start_timeout_s": max(1, int(options.start_timeout)), "interface": options.network_interface}
    of_horovod = partial(horovodrun.plan, python=sys.executable, **own)
    if options.launcher in ("mpirun", "horovodrun"):
        dialect = mpirun.identify(processes.call(["mpirun", "--version"], VERSION_TIMEOUT_S))
        if options.launcher == "mpirun":
            return partial(mpirun.plan, dialect=dialect), dialect
        return partial(of_horovod, dialect=dialect), dialect
    if options.launcher == "horovodrun-gloo":
        return partial(of_horovod, gloo=True), ""
    if options.launcher == "spark":
        from ringtrain.cluster.spark import plan as spark

        settings = {"master": options.master, "spark_settings": options.spark_conf, "data": options.spark_data}
        return partial(spark.plan, start_timeout_s=options.start_timeout, **settings), ""
    if options.launcher == "mpijob":
        return partial(kubernetes.plan, cluster=cluster_of(options)), ""
    others: dict[str, Callable[[Job], Plan]] = {"srun": slurm.srun, "sbatch": slurm.sbatch}
    return others[options.launcher], ""


if __name__ == "__main__":
    raise SystemExit(main())
