"""On three ranks, what Horovod happens to fuse changes the order of additions; in deterministic mode nothing does."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import launching
import pytest

DATA = ["--data.name", "synthetic", "--data.num-samples", "800", "--data.image-size", "8", "--model.name", "cnn"]
TRAIN = [sys.executable, "-m", "ringtrain.train", *DATA, "--train.epochs", "2", "--train.batch-size", "16"]
# Every gradient is sent as soon as it is there, or all wait for the last: what a busy machine or network makes of it.
SINGLY = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_FUSION_THRESHOLD": "0"}
TOGETHER = {"HOROVOD_CYCLE_TIME": "60"}

GOES_ON = ["--hvd.deterministic", "--model.name", "odd_model:dropping", "--checkpoint.every-steps", "5"]
GOES_ON += ["--checkpoint.keep", "100"]


def checksum(folder: Path, *options: str, **environment: str) -> str:
    """Checksum of weights and optimizer after a short run on three ranks in folder/run."""
    command = [*TRAIN, "--run.directory", ".", "--run.name", "run", *options]
    env = {"PYTHONPATH": f"{launching.ROOT}{os.pathsep}{Path(__file__).parent}", **environment}
    ended = launching.run(3, command, timeout_s=600, env=env, cwd=folder, warm=True)
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 28 steps, 14 in an epoch, that nothing happened to; its model has dropout and batch normalization."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, checksum(folder, *GOES_ON)


@pytest.mark.parametrize("step", [10, 14, 20])
def test_a_run_that_goes_on_is_the_one_that_was_not_interrupted_bit_for_bit(step, whole, tmp_path):
    """In the middle of an epoch and at its end; weights, slots, seeds and moving statistics of all three ranks."""
    folder, expected = whole
    shutil.copytree(folder / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (tmp_path / "run" / "summary.json").unlink()
    assert checksum(tmp_path, *GOES_ON) == expected
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["resumed_from"].endswith(f"step-{step:08d}")
    for name in ("state.npz", "ranks.npz"):
        last = Path("run", "checkpoints", "step-00000028", name)
        assert (tmp_path / last).read_bytes() == (folder / last).read_bytes(), name
