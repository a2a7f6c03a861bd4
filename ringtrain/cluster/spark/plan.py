"""Command that starts a job on Spark's executors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringtrain.cluster.environment import as_mapping, names_for_ranks, settings
from ringtrain.cluster.job import Job, Plan, check, words
from ringtrain.cluster.plans.rank_start import logged, reported
from ringtrain.cluster.spark.session import local_slots
from ringtrain.errors import LaunchError
from ringtrain.protocol.launchers import RANK_VARIABLES


def plan(
    job: Job, master: str = "", spark_settings: Sequence[str] = (), data: str = "", start_timeout_s: float = 60
) -> Plan:
    """Command that starts a job on Spark, which chooses the hosts.

    Args:
        master: URL of Spark's master; "": from spark-defaults.conf, else this machine.
        spark_settings: NAME=VALUE each.
        data: module:function that returns the rows to stream to the ranks; "": none.
        start_timeout_s: Limit for one slot per rank to be available, once Spark has started.

    Raises:
        LaunchError: Spark cannot run the job, or does not support an option.
    """
    check(job)
    _check(job, master, spark_settings)
    values, reasons = as_mapping(settings(job))
    reasons["NCCL_SOCKET_IFNAME"] = "each rank takes the interface by which its host reaches the driver"
    because = "Spark's driver, which starts a task for each rank"
    found = [words(sys.executable, "-m", "ringtrain.cluster.spark.driver", because=because)]
    found.append(words("--num-ranks", job.num_ranks, because="ranks in all, a slot of Spark's for each"))
    if master:
        found.append(words("--master", master, because="where Spark runs, as asked for"))
    found += [words("--set", setting, because="a setting of Spark, as asked for") for setting in spark_settings]
    if data:
        found.append(words("--data", data, because="gives rows, which ranks get shared out, as asked for"))
    found.append(words("--start-timeout", f"{start_timeout_s:g}", because="seconds for the slots to be there"))
    if job.working_directory:
        found.append(words("--folder", job.working_directory, because="ranks start in it, on executors that have it"))
    names = ",".join(names_for_ranks(job, values))
    found.append(words(f"--export={names}", because="variables that ranks get, by name: no value is on a command line"))
    found.append(words("--", because="what every rank runs follows"))
    if job.output:
        found.append(
            logged(
                job.output, RANK_VARIABLES["Gloo"].rank, "each rank copies its output to DIR/rank.N/stdout and stderr"
            )
        )
    return Plan((*found, *reported(job)), job.command, values, reasons)


def check_slots(num_ranks: int, master: str) -> None:
    """Raises LaunchError if a local master has fewer slots than ranks."""
    slots = local_slots(master)
    if slots is not None and slots < num_ranks:
        raise LaunchError(
            f"got -np {num_ranks}, but Spark's master {master} has {slots} slot{'s' * (slots != 1)}, of which each rank"
            f" takes one: ask for fewer ranks, or for more slots: --master 'local[{num_ranks}]'"
        )


def _check(job: Job, master: str, spark_settings: Sequence[str]) -> None:
    unlike = {"--subnet": job.subnet, "--network ucx": job.network == "ucx", "--bind core": job.bind == "core"}
    unlike |= {"--oversubscribe": job.oversubscribe, "--ssh-port": job.ssh_port}
    for option in (option for option, given in unlike.items() if given):
        raise LaunchError(f"got {option}, but Spark places its ranks, and they talk by Gloo over TCP: leave it out")
    for setting in spark_settings:
        if not setting.partition("=")[0].startswith("spark.") or "=" not in setting:
            raise LaunchError(f"got --spark-conf {setting!r}, expected spark.NAME=VALUE")
    check_slots(job.num_ranks, master)
