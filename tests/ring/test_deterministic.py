"""On three ranks, what Horovod happens to fuse changes the order of additions; in deterministic mode nothing does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching
import pytest

DATA = ["--data.name", "synthetic", "--data.num-samples", "800", "--data.image-size", "8", "--model.name", "cnn"]
TRAIN = [sys.executable, "-m", "ringtrain.train", *DATA, "--train.epochs", "2", "--train.batch-size", "16"]
# Every gradient is sent as soon as it is there, or all wait for the last.
SINGLY, TOGETHER = ["--hvd.cycle-time-ms", "0.1"], ["--hvd.cycle-time-ms", "60"]


def checksum(folder: Path, name: str, *options: str) -> str:
    """Of weights and optimizer, after a short run on three ranks."""
    command = [*TRAIN, "--run.directory", folder, "--run.name", name, *options]
    ended = launching.run(3, command, timeout_s=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / name / "summary.json").read_text())["checksum"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_command_gives_the_same_weights(deterministic, tmp_path):
    """Without the option the two runs differ: the control that shows that timing matters here."""
    options = ["--hvd.deterministic"] if deterministic else []
    singly = checksum(tmp_path, "singly", *SINGLY, *options, *([] if deterministic else ["--hvd.fusion-mb", "0"]))
    together = checksum(tmp_path, "together", *TOGETHER, *options)
    assert (singly == together) is deterministic
