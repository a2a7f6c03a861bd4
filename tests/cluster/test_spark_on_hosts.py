"""Spark on two hosts: ranks on both train together, and an executor that is lost ends the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lab
import pytest
import standalone
from launching import ROOT

from ringtrain.cluster.spark.session import check_installed
from ringtrain.errors import MissingDependency

TIMEOUT_S = 240


def test_ranks_on_two_hosts(make_lab: Callable[..., lab.Lab], tmp_path: Path) -> None:
    try:
        check_installed()
    except MissingDependency as error:
        if os.environ.get("RINGTRAIN_REQUIRE_SPARK"):
            raise
        pytest.skip(str(error))
    hosts = make_lab(2, {"host2": "other0"})
    launch = [sys.executable, "-m", "ringtrain", "launch", "--launcher", "spark", "-np", "2"]
    launch += ["--spark-conf", "spark.executor.memory=512m", "--spark-conf", "spark.driver.host=host1"]
    train = ["--", "python", "-m", "ringtrain.train", "--config", ROOT / "configs" / "digits.toml"]
    env = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "SPARK_LOCAL_IP": "host1"}
    with standalone.Cluster(tmp_path, hosts.names, slots=1, start=hosts.start) as cluster:
        launch += ["--master", cluster.master]
        words = [*launch, *train, "--train.epochs", "1", "--run.name", "two"]
        ended = hosts.run("host1", words, TIMEOUT_S, env, tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert "2 ranks in step: gradients averaged" in ended.stdout
        summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
        assert {*summary["hosts"]} == {"host1", "host2"}

        words = [*launch, *train, "--train.epochs", "100000", "--run.name", "lost"]
        with hosts.start("host1", words, env, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            steps = tmp_path / "runs" / "lost" / "steps.jsonl"
            standalone.wait_for(lambda: steps.exists() and steps.read_text(), TIMEOUT_S, "ranks train")
            executors = [number for number, line in hosts.processes("host2").items() if "CoarseGrained" in line]
            for number in executors:
                os.kill(number, signal.SIGKILL)
            _, stderr = process.communicate(timeout=TIMEOUT_S)
        assert len(executors) == 1
        assert process.returncode == 1, stderr
        assert "spark: lost rank " in stderr
        assert not [line for line in hosts.processes("host2").values() if "ringtrain.train" in line]
