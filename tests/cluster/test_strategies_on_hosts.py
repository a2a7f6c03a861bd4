"""TensorFlow's own servers between two hosts, and what a third host gets from them: nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import lab
import launching
import pytest

TIMEOUT_S = 300.0
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


def grpc_ports(hosts: lab.Lab, host: str) -> list[str]:
    """Ports of Python's sockets for IPv4 and IPv6 with gRPC's backlog; the heartbeat's, behind a token, is shorter."""
    lines = hosts.run(host, ["ss", "-Hltnp"], TIMEOUT_S).stdout.splitlines()
    sockets = [line.split()[2:4] for line in lines if "python" in line]
    return [name.removeprefix("*:") for backlog, name in sockets if backlog == "4096" and name.startswith("*:")]


@pytest.mark.parametrize(("strategy", "roles"), [("ps-sync", ["--ps", "1", "--workers", "1"]), ("multi-worker", [])])
def test_only_hosts_of_the_job_reach_tensorflows_servers(three_hosts, strategy: str, roles: list[str], tmp_path: Path):
    hosts = three_hosts
    train = [*hosts.warm_python(), "-m", "ringtrain.train", "--data.name", "digits", "--strategy.name", strategy]
    train += ["--train.epochs", "500", "--run.directory", str(tmp_path)]  # not until its end
    output = tmp_path / "output"
    with output.open("w") as file:
        launched = hosts.start(
            "host1",
            ["ringtrain", "launch", "-H", "host1:1,host2:1", *roles, "--", *train],
            env={"PYTHONPATH": str(launching.ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        with launched:
            ended = lambda: launched.poll() is not None  # noqa: E731
            lab.wait_for(lambda: "epoch   1/500" in output.read_text() or ended(), TIMEOUT_S, "a first epoch")
            assert not ended(), output.read_text()
            for host in ("host1", "host2"):
                ports = grpc_ports(hosts, host)
                assert ports, host
                for port in ports:
                    call = ["python", "-c", CALL, hosts.address(host), port]
                    assert "TimeoutError" in hosts.run("host3", call, TIMEOUT_S).stderr, (host, port)
                    other = {"host1": "host2", "host2": "host1"}[host]
                    assert hosts.run(other, call, TIMEOUT_S).returncode == 0, (host, port)
            launched.terminate()
            launched.wait(TIMEOUT_S)
