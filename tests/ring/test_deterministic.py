"""On three ranks, what Horovod happens to fuse changes the order of additions; in deterministic mode nothing does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching
import pytest

DATA = ["--data.name", "synthetic", "--data.num-samples", "800", "--data.image-size", "8", "--model.name", "cnn"]
TRAIN = [sys.executable, "-m", "ringtrain.train", *DATA, "--train.epochs", "2", "--train.batch-size", "16"]
# Every gradient is sent as soon as it is there, or all wait for the last: what a busy machine or network makes of it.
SINGLY = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_FUSION_THRESHOLD": "0"}
TOGETHER = {"HOROVOD_CYCLE_TIME": "60"}


def checksum(folder: Path, *options: str, **environment: str) -> str:
    """Checksum of weights and optimizer after a short run on three ranks in folder/run."""
    command = [*TRAIN, "--run.directory", ".", "--run.name", "run", *options]
    ended = launching.run(3, command, timeout_s=600, env=environment, cwd=folder, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "run" / "summary.json").read_text())["checksum"]


@pytest.mark.parametrize("deterministic", [pytest.param(True, marks=pytest.mark.quick), False])
def test_the_same_command_gives_the_same_weights(deterministic, tmp_path):
    """For any timing of the gradients. The control: without the option, the weights differ."""
    options = ["--hvd.deterministic"] if deterministic else []
    (tmp_path / "singly").mkdir()
    (tmp_path / "together").mkdir()
    singly = checksum(tmp_path / "singly", *options, **SINGLY)
    together = checksum(tmp_path / "together", *options, **TOGETHER)
    assert (singly == together) is deterministic
