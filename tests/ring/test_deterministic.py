"""On three ranks, what Horovod happens to fuse changes the order of additions; in deterministic mode nothing does."""

from __future__ import annotations

import json
import shutil
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


def test_a_run_that_goes_on_is_the_one_that_was_not_interrupted_bit_for_bit(tmp_path):
    """In the middle of the second epoch: step 25 of 30, 15 in an epoch."""
    options = ["--hvd.deterministic", "--checkpoint.every-steps", "5", "--checkpoint.keep", "100"]
    whole = checksum(tmp_path, "whole", *options)
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole", tmp_path / "again" / "whole")
    for step in range(26, 41):
        shutil.rmtree(tmp_path / "again" / "whole" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    (tmp_path / "again" / "whole" / "summary.json").unlink()
    assert checksum(tmp_path / "again", "whole", *options) == whole
    summary = json.loads((tmp_path / "again" / "whole" / "summary.json").read_text())
    assert summary["resumed_from"].endswith("step-00000025")
