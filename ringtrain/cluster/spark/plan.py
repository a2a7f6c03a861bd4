"""Command that starts a job on Spark's executors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from ringtrain.cluster.environment import as_mapping, names_for_ranks, settings
from ringtrain.cluster.job import LOGGED, Flag, Job, Plan, check, words
from ringtrain.cluster.plans.rank_start import logged, reported
from ringtrain.cluster.spark.session import local_slots
from ringtrain.errors import LaunchError
from ringtrain.protocol.launchers import RANK_VARIABLES


def plan(
    job: Job, master: str = "", spark_settings: Sequence[str] = (), data: str = "", start_timeout_s: float = 60
) -> Plan:
    """Command that starts a job on Spark, which chooses the hosts. Raises LaunchError if Spark cannot run the job."""
    check(job)
    _check(job, master, spark_settings)
    values, reasons = as_mapping([*settings(job)])
    for name in ("NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        if not job.environment.get(name):  # a value that is set here replaces the task's choice
            reasons[name] = "each rank takes the interface by which its host reaches the driver"
    flags = _flags(job, master, spark_settings, data, start_timeout_s, names_for_ranks(job, values))
    return Plan((*flags, *reported(job)), job.command, values, reasons)


def _flags(
    job: Job, master: str, spark_settings: Sequence[str], data: str, start_timeout_s: float, names: Sequence[str]
) -> Iterator[Flag]:
    because = "Spark's driver, which starts a task for each rank"
    yield words(sys.executable, "-m", "ringtrain.cluster.spark.driver", because=because)
    yield words("--num-ranks", job.num_ranks, because="number of ranks, each takes a slot of Spark")
    if master:
        yield words("--master", master, because="URL of Spark's master, from --master")
    for setting in spark_settings:
        yield words("--set", setting, because="a Spark setting, from --spark-conf")
    if data:
        yield words("--data", data, because="returns the rows that are distributed over the ranks, from --spark-data")
    yield words("--start-timeout", f"{start_timeout_s:g}", because="seconds to wait for the slots")
    if job.working_directory:
        because = "working directory of ranks, on executors that have it"
        yield words("--folder", job.working_directory, because=because)
    because = "names of the variables that ranks get: values are not on the command line"
    yield words(f"--export={','.join(names)}", because=because)
    yield words("--", because="the command of every rank follows")
    if job.output:
        yield logged(job.output, RANK_VARIABLES["Gloo"].rank, LOGGED)


def check_slots(num_ranks: int, master: str) -> None:
    """Raises LaunchError if a local master has fewer slots than ranks."""
    slots = local_slots(master)
    if slots is not None and slots < num_ranks:
        noun = "slot" if slots == 1 else "slots"
        raise LaunchError(
            f"got -np {num_ranks}, but Spark's master {master} has {slots} {noun}, one for each rank"
            f" is required: start fewer ranks, or use more slots: --master 'local[{num_ranks}]'"
        )


def _check(job: Job, master: str, spark_settings: Sequence[str]) -> None:
    unsupported = {"--subnet": job.subnet, "--network ucx": job.network == "ucx", "--bind core": job.bind == "core"}
    unsupported |= {"--oversubscribe": job.oversubscribe, "--ssh-port": job.ssh_port}
    for option in (option for option, given in unsupported.items() if given):
        raise LaunchError(
            f"got {option}, but Spark places its ranks, which communicate by Gloo over TCP: remove the option"
        )
    for setting in spark_settings:
        if not setting.partition("=")[0].startswith("spark.") or "=" not in setting:
            raise LaunchError(f"got --spark-conf {setting!r}, expected spark.NAME=VALUE")
    check_slots(job.num_ranks, master)
