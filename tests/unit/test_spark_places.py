"""Ranks on Spark, what of it is plain values: seats, slots, the command, and the store that Gloo's ranks meet at."""

from __future__ import annotations

import http.client

import pytest

from ringtrain.cluster.job import Job
from ringtrain.cluster.spark.places import Caller, seats
from ringtrain.cluster.spark.plan import plan
from ringtrain.cluster.spark.rendezvous import Store
from ringtrain.cluster.spark.session import local_slots, reason
from ringtrain.errors import LaunchError


def test_ranks_fill_a_host_before_the_next() -> None:
    callers = [
        Caller(0, "b", ("3",)),
        Caller(1, "a", ("0",)),
        Caller(2, "b", ("1",)),
        Caller(3, "b", ("2",)),
        Caller(4, "a", ("4",)),
    ]
    found = seats(callers[::-1])
    assert [caller.index for caller, _ in found] == [0, 2, 3, 1, 4]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    numbers = [tuple(int(environ[f"HOROVOD_{name}"]) for name in names) for _, environ in found]
    assert numbers == [
        (0, 5, 0, 3, 0, 2),
        (1, 5, 1, 3, 0, 2),
        (2, 5, 2, 3, 0, 1),
        (3, 5, 0, 2, 1, 2),
        (4, 5, 1, 2, 1, 2),
    ]
    assert [environ["CUDA_VISIBLE_DEVICES"] for _, environ in found] == ["3,1,2"] * 3 + ["0,4"] * 2


def test_without_gpus_of_spark_ranks_see_what_their_host_has() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in seats([Caller(0, "a")])[0][1]


@pytest.mark.parametrize(
    ("master", "slots"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[3, 4]", 3),
        ("local-cluster[2,3,1024]", 6),
        ("spark://a:7077", None),
        ("", None),
    ],
)
def test_slots_of_this_machine_are_known(master: str, slots: int | None) -> None:
    assert local_slots(master) == slots


def test_no_value_of_a_variable_is_on_the_command_line() -> None:
    environment = {"PATH": "/bin", "WANDB_API_KEY": "hidden", "HOROVOD_CYCLE_TIME": "3", "OTHER": "other"}
    job = Job(("python", "train.py"), 2, (), environment=environment, forward=("WANDB_API_KEY",), threads_per_rank=1)
    made = plan(job, "spark://host:7077", ["spark.executor.memory=4g"], start_timeout_s=30)
    assert "hidden" not in made.shell()
    names = "HOROVOD_CYCLE_TIME,OMP_NUM_THREADS,PATH,TF_NUM_INTEROP_THREADS,TF_NUM_INTRAOP_THREADS,WANDB_API_KEY"
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


def test_more_ranks_than_slots_are_refused() -> None:
    assert plan(Job(("true",), 2, ()), "local[2]")
    with pytest.raises(LaunchError, match=r"got -np 3, but Spark's master local\[2\] has 2 slots"):
        plan(Job(("true",), 3, ()), "local[2]")


def test_a_scope_goes_when_all_its_keys_are_deleted() -> None:
    store = Store("127.0.0.1")

    def ask(method: str, path: str, value: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=10)
        connection.request(method, path, value)
        answer = connection.getresponse()
        return answer.status, answer.read()

    try:
        assert ask("GET", "/global_/0") == (404, b"")
        assert ask("PUT", "/global_/0", b"a\0b") == (200, b"")
        assert ask("PUT", "/global_/1", b"c")[0] == 200
        assert ask("DELETE", "/global_/0")[0] == 200
        assert ask("GET", "/global_/0") == (200, b"a\0b"), "the other rank may not have read it yet"
        assert ask("DELETE", "/global_/1")[0] == 200
        assert ask("GET", "/global_/0")[0] == 404
    finally:
        store.close()


def test_the_reason_is_the_line_that_says_it() -> None:
    text = (
        "An error occurred while calling z:collectAndServe.\n: org.apache.spark.SparkException: Job aborted\n"
        "Traceback (most recent call last):\n  File x, line 1\nModuleNotFoundError: No module named 'mine'\n\n"
        "\tat org.apache.spark.Executor(Executor.scala:1)\nCaused by: java.lang.Exception: later\n"
    )
    assert reason(Exception(text)) == "ModuleNotFoundError: No module named 'mine'"
    assert reason(Exception("x\n: java.net.UnknownHostException: nowhere\n\tat y")) == "nowhere"


def test_tasks_with_rows_of_their_own_keep_their_numbers() -> None:
    found = seats([Caller(2, "a"), Caller(1, "b"), Caller(0, "a")], by_index=True)
    assert [(caller.index, environ["HOROVOD_RANK"], environ["HOROVOD_LOCAL_RANK"]) for caller, environ in found] == [
        (0, "0", "0"),
        (1, "1", "0"),
        (2, "2", "1"),
    ]
