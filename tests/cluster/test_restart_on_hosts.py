"""A job on several hosts that is started again: on a host in reserve, and on fewer hosts than before."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import lab
import launching
import pytest

from ringtrain.protocol.env import LEASE

TIMEOUT_S = 300
DIGITS = ["--data.name", "digits", "--train.epochs", "2", "--checkpoint.every-steps", "6", "--run.name", "run"]


def launch(hosts: lab.Lab, folder: Path, slots: str, *options: str, chaos: str = "") -> list[str | Path]:
    train = [*hosts.warm_python(), "-m", "ringtrain.train", *DIGITS, "--run.directory", folder, "--chaos", chaos]
    return ["python", "-m", "ringtrain", "launch", "-H", slots, "-np", "2", *options, "--", *train]


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def test_a_host_in_reserve_takes_the_place_of_one_that_is_lost(three_hosts: lab.Lab, tmp_path: Path) -> None:
    """While training, rank 1's host is cut off; the job goes on with host3 and ends as one that nothing happened to."""
    hosts = three_hosts
    environment = {"PYTHONPATH": str(launching.ROOT), LEASE: "10"}
    reference = hosts.run("host1", launch(hosts, tmp_path / "whole", "host1:1,host2:1"), TIMEOUT_S, env=environment)
    assert reference.returncode == 0, reference.stderr
    slots, chaos = "host1:1,host2:1,host3:1", "rank=0 step=9 mode=slow seconds=0.25"
    words = launch(hosts, tmp_path, slots, "--max-restarts", "2", chaos=chaos)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with hosts.start("host1", words, env=environment, **pipes) as process:
        saved = tmp_path / "run" / "checkpoints" / "step-00000006"
        lab.wait_for(saved.exists, TIMEOUT_S, "the first checkpoint")
        hosts.cut("host2")
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stdout + stderr
    assert "restart 1 of 2, after: lost host2 while the job ran" in stderr
    assert summary(tmp_path)["hosts"] == ["host1", "host3"]
    assert summary(tmp_path)["checksum"] == summary(tmp_path / "whole")["checksum"]
    assert summary(tmp_path)["restarts"] == 1
    assert not hosts.processes("host1") and not hosts.processes("host3")
    hosts.restore("host2")
    lab.wait_for(lambda: not hosts.processes("host2"), TIMEOUT_S, "the part that was cut off has ended by itself")


def test_a_script_goes_on_with_all_ranks_that_are_left(three_hosts: lab.Lab, tmp_path: Path) -> None:
    """Two of three: no divisor, but a batch is divided anyhow. Losses are those of a run that nothing happened to."""
    hosts = three_hosts
    environment = {"PYTHONPATH": str(launching.ROOT), LEASE: "10"}

    def launched(folder: Path) -> list[str | Path]:
        own = json.dumps({"checkpoint.every_steps": 2, "run.directory": str(folder)})
        train = [*hosts.warm_python(), Path(__file__).with_name("slow_fit.py"), "2", "0.2", own]
        options = ["-H", "host1:1,host2:1,host3:1", "--max-restarts", "2"]
        return ["python", "-m", "ringtrain", "launch", *options, "--", *train]

    reference = hosts.run("host1", launched(tmp_path / "whole"), TIMEOUT_S, env=environment)
    assert reference.returncode == 0, reference.stderr
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with hosts.start("host1", launched(tmp_path), env=environment, **pipes) as process:
        saved = tmp_path / "run" / "checkpoints"
        lab.wait_for(lambda: any(saved.glob("step-*")), TIMEOUT_S, "the first checkpoint")
        hosts.cut("host3")
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    hosts.restore("host3")
    assert process.returncode == 0, stdout + stderr
    assert (summary(tmp_path)["restarts"], summary(tmp_path)["num_ranks"]) == (1, 2), stderr
    losses = []
    for folder in (tmp_path, tmp_path / "whole"):
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    lab.wait_for(lambda: not hosts.processes("host3"), TIMEOUT_S, "the part that was cut off has ended by itself")


@pytest.mark.parametrize(("keep", "ranks"), [((), 1), pytest.param(("--min-np", "2"), 2, marks=pytest.mark.quick)])
def test_a_host_that_failed_twice_is_left_out(three_hosts: lab.Lab, tmp_path: Path, keep, ranks: int) -> None:
    """One rank goes on with the global batch of two."""
    chaos = "rank=1 step=9 mode=sigkill, rank=1 step=15 mode=sigkill"
    words = launch(three_hosts, tmp_path, "host1:1,host2:1", "--max-restarts", "3", *keep, chaos=chaos)
    ended = three_hosts.run("host1", words, TIMEOUT_S, env={"PYTHONPATH": str(launching.ROOT)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = summary(tmp_path)
    assert (result["restarts"], result["num_ranks"]) == (2, ranks)
    assert result["numbers"]["global_batch_size"] == 64 and result["global_step"] == 46
    assert [cause.partition(" (signal")[0] for cause in result["restart_causes"]] == [
        "rank 1 on host2 was killed by SIGKILL"
    ] * 2
