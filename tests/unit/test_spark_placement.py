"""Ranks on Spark, what of it is plain values: placement, slots, the command, and the store of Gloo's rendezvous."""

from __future__ import annotations

import http.client
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress

import attacker
import pytest

from ringtrain.cluster.job import Job
from ringtrain.cluster.spark.placement import Caller, assign
from ringtrain.cluster.spark.plan import plan
from ringtrain.cluster.spark.rendezvous import MAX_VALUE_BYTES, Store
from ringtrain.cluster.spark.session import local_slots, reason
from ringtrain.cluster.spark.task import _environment
from ringtrain.errors import LaunchError


def test_ranks_fill_a_host_before_the_next() -> None:
    callers = [
        Caller(0, "b", ("3",)),
        Caller(1, "a", ("0",)),
        Caller(2, "b", ("1",)),
        Caller(3, "b", ("2",)),
        Caller(4, "a", ("4",)),
    ]
    found = assign(callers[::-1])
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
    assert "CUDA_VISIBLE_DEVICES" not in assign([Caller(0, "a")])[0][1]


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
    assert (
        made.env_reasons["HOROVOD_GLOO_IFACE"] == "each rank takes the interface by which its host reaches the driver"
    )
    assert _environment({"NCCL_SOCKET_IFNAME": "eth1"}, "eth0").items() >= {
        ("NCCL_SOCKET_IFNAME", "eth1"),
        ("HOROVOD_GLOO_IFACE", "eth0"),
    }


def test_more_ranks_than_slots_are_refused() -> None:
    assert plan(Job(("true",), 2, ()), "local[2]")
    with pytest.raises(LaunchError, match=r"got -np 3, but Spark's master local\[2\] has 2 slots"):
        plan(Job(("true",), 3, ()), "local[2]")


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store("127.0.0.1")
    yield made
    made.close()


def ask(store: Store, method: str, path: str, value: bytes | None = None, **headers: bytes) -> tuple[int, bytes]:
    """Asks as Horovod does: by a URL of address, port, scope and key."""
    environ = store.environ("127.0.0.1")
    url = f"http://{environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}/{path}"
    connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=10)
    connection.request(method, urllib.parse.urlsplit(url).path, value, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_scope_goes_when_all_its_keys_are_deleted(store: Store) -> None:
    assert ask(store, "GET", "global_/0") == (404, b"")
    assert ask(store, "PUT", "global_/0", b"a\0b") == (200, b"")
    assert ask(store, "PUT", "global_/1", b"c")[0] == 200
    assert ask(store, "DELETE", "global_/0")[0] == 200
    assert ask(store, "GET", "global_/0") == (200, b"a\0b"), "the other rank may not have read it yet"
    assert ask(store, "DELETE", "global_/1")[0] == 200
    assert ask(store, "GET", "global_/0")[0] == 404


def test_without_the_token_nothing_is_read_written_or_kept(store: Store) -> None:
    assert ask(store, "PUT", "global_/0", b"right")[0] == 200
    for path in ("/global_/0", "//global_/0", f"/{'0' * 32}:{store.port}/global_/0", "/", "é/"):
        for request in (f"GET {path} HTTP/1.1", f"PUT {path} HTTP/1.1\r\nContent-Length: 300000000", f"DELETE {path}"):
            with socket.create_connection(("127.0.0.1", store.port), 10) as stranger, suppress(ConnectionError):
                stranger.sendall(f"{request}\r\n\r\n".encode() + b"wrong")
                assert stranger.recv(1000) == b"", request
    assert ask(store, "GET", "global_/0") == (200, b"right")


def test_of_strangers_nothing_is_printed(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    attacker.knock("127.0.0.1", store.port)
    assert ask(store, "GET", "global_/0")[0] == 404
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("length", [str(MAX_VALUE_BYTES + 1), "9" * 5000, "-1", "x", "²"])
def test_no_value_is_longer_than_ranks_addresses_can_be(store: Store, length: str) -> None:
    headers = {"Content-Length": length.encode("latin-1")}
    assert ask(store, "PUT", "global_/0", b"", **headers)[0] == 413
    assert ask(store, "GET", "global_/0")[0] == 404


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
    assert [(caller.index, environ["HOROVOD_RANK"], environ["HOROVOD_LOCAL_RANK"]) for caller, environ in found] == [
        (0, "0", "0"),
        (1, "1", "0"),
        (2, "2", "1"),
    ]
