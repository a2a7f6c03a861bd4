"""A model in stages trains the weights of the unsplit model, and resumes with other stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import trained
from launching import ROOT, run
from trained import TIMEOUT_S, summary

HERE = Path(__file__).parent
COMMON = ["--model.name", "cnn", "--train.epochs", 2, "--device.threads", 1]
COMMON += ["--checkpoint.every-steps", 5, "--model.micro-batches", 4]


def train(folder: Path, split: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return trained.train(folder, *COMMON, "--model.split", split, *options, code=code)


def test_cases_in_one_process() -> None:
    ended = run(0, [sys.executable, HERE / "run_split.py"], TIMEOUT_S, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0 and "cases " in ended.stdout, ended.stderr[-4000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, "")
    return folder


@pytest.mark.parametrize("splits", [("layers:2", "layers:3", ""), ("columns:2", "", "columns:3")], ids=" then ".join)
def test_a_killed_run_goes_on_with_another_split(splits: tuple[str, str, str], whole: Path, tmp_path: Path) -> None:
    """Killed twice: the second start resumes at step 10, the third one at step 30."""
    rows = {"l": "stage 2 ", "c": "part 2 ", "": "micro-batches "}
    chaos = "rank=1 step=12 mode=sigkill, rank=1 step=32 mode=sigkill"
    resumed_after = ("", "after step 10,", "after step 30,")
    for split, resumed in zip(splits, resumed_after, strict=True):
        ended = train(tmp_path, split, "--chaos", chaos, code=0 if split == splits[-1] else 137)
        assert rows[split[:1]] in ended.stdout and resumed in ended.stdout, ended.stdout + ended.stderr
    ours, unsplit = summary(tmp_path), summary(whole)
    assert ours["metrics"]["test_accuracy"] > 0.8
    exported = keras.models.load_model(tmp_path / "run" / "model.keras").get_weights()
    expected = keras.models.load_model(whole / "run" / "model.keras").get_weights()
    if "columns:2" in splits:  # other sums, in float32, of which Adam makes more
        assert all(np.allclose(one, other, atol=1e-2) for one, other in zip(exported, expected, strict=True))
    else:
        assert ours["checksum"] == unsplit["checksum"]
        assert all((one == other).all() for one, other in zip(exported, expected, strict=True))
