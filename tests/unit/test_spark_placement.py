"""Ranks on Spark, what of it is plain values: placement, slots and the command."""

from __future__ import annotations

from typing import Any

from ringtrain.cluster import horovod_driver
from ringtrain.cluster.job import Job
from ringtrain.cluster.spark.driver import Caller, assign, gpus_of_host
from ringtrain.cluster.spark.plan import plan
from ringtrain.cluster.spark.session import reason
from ringtrain.cluster.spark.task import _environment


def variables(assigned: list[tuple[Caller, Any]]) -> list[dict[str, str]]:
    """Variables of the ranks, as the rendezvous of the job computes them."""
    rendezvous = horovod_driver.make_rendezvous()()
    rendezvous.start()
    rendezvous.init([slot for _, slot in assigned])
    return [rendezvous.variables(slot) for _, slot in assigned]


def test_ranks_fill_a_host_before_the_next() -> None:
    tasks = [("b", "3"), ("a", "0"), ("b", "1"), ("b", "2"), ("a", "4")]
    callers = [Caller(index, host, (gpu,)) for index, (host, gpu) in enumerate(tasks)]
    found = assign(callers[::-1])
    assert [caller.index for caller, _ in found] == [0, 2, 3, 1, 4]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    numbers = [tuple(int(environ[f"HOROVOD_{name}"]) for name in names) for environ in variables(found)]
    assert numbers == [
        (0, 5, 0, 3, 0, 2),
        (1, 5, 1, 3, 0, 2),
        (2, 5, 2, 3, 0, 1),
        (3, 5, 0, 2, 1, 2),
        (4, 5, 1, 2, 1, 2),
    ]
    assert [gpus_of_host(callers, host) for host in "ba"] == ["3,1,2", "0,4"]
    assert gpus_of_host([Caller(0, "a")], "a") == "", "Spark has no GPUs: ranks see those of their host"


def test_no_value_of_a_variable_is_on_the_command_line() -> None:
    environment = {"PATH": "/bin", "TRACKER_API_KEY": "hidden", "HOROVOD_CYCLE_TIME": "3", "OTHER": "other"}
    job = Job(("python", "train.py"), 2, (), environment=environment, forward=("TRACKER_API_KEY",), threads_per_rank=1)
    made = plan(job, "spark://host:7077", ["spark.executor.memory=4g"], start_timeout_s=30)
    assert "hidden" not in made.shell()
    names = "HOROVOD_CYCLE_TIME,OMP_NUM_THREADS,PATH,TF_NUM_INTEROP_THREADS,TF_NUM_INTRAOP_THREADS,TRACKER_API_KEY"
    assert made.argv[1:] == (
        *("-m", "ringtrain.cluster.spark.driver", "--num-ranks", "2", "--master", "spark://host:7077"),
        *(
            "--set",
            "spark.executor.memory=4g",
            "--start-timeout",
            "30",
            f"--export={names}",
            "--",
            "python",
            "train.py",
        ),
    )


def test_a_network_interface_that_is_set_here_replaces_the_choice_of_the_task() -> None:
    made = plan(Job(("true",), 2, (), environment={"NCCL_SOCKET_IFNAME": "eth1"}))
    assert "--export=NCCL_SOCKET_IFNAME" in made.argv
    assert "ranks get 'eth1'" in made.env_reasons["NCCL_SOCKET_IFNAME"]
    assert _environment({"NCCL_SOCKET_IFNAME": "eth1"}, "eth0").items() >= {
        ("NCCL_SOCKET_IFNAME", "eth1"),
        ("HOROVOD_GLOO_IFACE", "eth0"),
    }


def test_the_reason_is_the_line_that_says_it() -> None:
    text = (
        "An error occurred while calling z:collectAndServe.\n: org.apache.spark.SparkException: Job aborted\n"
        "Traceback (most recent call last):\n  File x, line 1\nModuleNotFoundError: No module named 'mine'\n\n"
        "\tat org.apache.spark.Executor(Executor.scala:1)\nCaused by: java.lang.Exception: later\n"
    )
    assert reason(Exception(text)) == "ModuleNotFoundError: No module named 'mine'"
    assert reason(Exception("x\n: java.net.UnknownHostException: nowhere\n\tat y")) == "nowhere"


def test_tasks_with_rows_of_their_own_keep_their_numbers() -> None:
    found = assign([Caller(2, "a"), Caller(1, "b"), Caller(0, "a")], by_index=True)
    assert [(caller.index, slot.rank, slot.local_rank) for caller, slot in found] == [(0, 0, 0), (1, 1, 0), (2, 2, 1)]
