"""Spark on two hosts: ranks on both train together; a lost executor ends the job, which goes on; SIGTERM saves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import lab
import standalone
from launching import ROOT

TIMEOUT_S = 240


def test_ranks_on_two_hosts(make_lab: Callable[..., lab.Lab], tmp_path: Path) -> None:
    standalone.require()
    hosts = make_lab(2, {"host2": "other0"})
    launch = [sys.executable, "-m", "ringtrain", "launch", "--launcher", "spark", "-np", "2", "--max-restarts", "1"]
    launch += ["--spark-conf", "spark.executor.memory=512m", "--spark-conf", "spark.driver.host=host1"]
    train = ["--", "python", "-m", "ringtrain.train", "--config", ROOT / "configs" / "digits.toml", "--run.name", "on"]
    train += ["--train.epochs", "100000", "--checkpoint.every-steps", "20", "--tracking.every-steps", "10"]
    env = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "SPARK_LOCAL_IP": "host1"}
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    steps = tmp_path / "runs" / "on" / "steps.jsonl"

    def wait_for_steps(after: str) -> None:
        standalone.wait_for(lambda: steps.exists() and steps.read_text() != after, TIMEOUT_S, "ranks train")

    with (
        standalone.Cluster(tmp_path, hosts.names, slots=1, start=hosts.start) as cluster,
        stdout.open("w") as out,
        stderr.open("w") as err,
        hosts.start(
            "host1", [*launch, "--master", cluster.master, *train], env, tmp_path, stdout=out, stderr=err
        ) as job,
    ):
        wait_for_steps("")
        executors = [number for number, line in hosts.processes("host2").items() if "CoarseGrained" in line]
        for number in executors:
            os.kill(number, signal.SIGKILL)
        standalone.wait_for(lambda: "ringtrain: restart 1 of 1" in stderr.read_text(), TIMEOUT_S, "a restart")
        assert not [line for line in hosts.processes("host2").values() if "ringtrain.train" in line]
        wait_for_steps(steps.read_text())
        job.send_signal(signal.SIGTERM)
        job.wait(TIMEOUT_S)
    assert len(executors) == 1
    assert job.returncode == 128 + signal.SIGTERM, stderr.read_text()
    assert "spark: lost rank " in stderr.read_text()
    assert "2 ranks in step: gradients averaged" in stdout.read_text()
    summary = json.loads((tmp_path / "runs" / "on" / "summary.json").read_text())
    assert {*summary["hosts"]} == {"host1", "host2"}
    assert summary["restarts"] == 1
