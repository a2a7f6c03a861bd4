"""TensorFlow's own servers between two hosts."""

from __future__ import annotations

from pathlib import Path

import lab
import launching
import pytest

from ringtrain.strategies.parameter_server.cluster import OPEN_TO_ALL

TIMEOUT_S = 300.0


@pytest.mark.parametrize(("strategy", "roles"), [("ps-sync", ["--ps", "1", "-np", "2"]), ("multi-worker", [])])
def test_tensorflows_servers_train_between_hosts(
    two_hosts: lab.Lab, strategy: str, roles: list[str], tmp_path: Path
) -> None:
    train = [*two_hosts.warm_python(), "-m", "ringtrain.train", "--data.name", "digits", "--strategy.name", strategy]
    train += ["--train.epochs", "1", "--run.directory", str(tmp_path)]
    launch = ["ringtrain", "launch", "-H", "host1:1,host2:1", *roles, "--", *train]
    ended = two_hosts.run("host1", launch, TIMEOUT_S, env={"PYTHONPATH": str(launching.ROOT)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr.count(OPEN_TO_ALL) == 1
