"""A model in stages trains the weights of the unsplit model, and resumes with other stages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from launching import ROOT, run

HERE = Path(__file__).parent
TIMEOUT_S = 600
TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--model.name", "cnn", "--train.epochs", "2"]
TRAIN += ["--device.threads", "1", "--checkpoint.every-steps", "5", "--model.micro-batches", "4"]


def train(folder: Path, name: str, split: str, *options: str, ranks: int = 2):
    words = [*TRAIN, "--run.directory", folder, "--run.name", name, "--model.split", split, *options]
    return run(ranks, [str(word) for word in words], TIMEOUT_S, warm=True)


def summary(folder: Path, name: str) -> dict:
    return json.loads((folder / name / "summary.json").read_text())


def test_cases_in_one_process() -> None:
    ended = run(0, [sys.executable, HERE / "run_split.py"], TIMEOUT_S, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0 and "cases " in ended.stdout, ended.stderr[-4000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ended = train(folder, "whole", "")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "whole"


@pytest.mark.parametrize("splits", [("layers:2", "layers:3", ""), ("columns:2", "", "columns:3")], ids=" then ".join)
def test_a_killed_run_goes_on_with_another_split(splits: tuple[str, str, str], whole: Path, tmp_path: Path) -> None:
    """Killed twice: the second start resumes at step 10, the third one at step 30."""
    rows = {"l": "stage 2 ", "c": "part 2 ", "": "micro-batches "}
    chaos = "rank=1 step=12 mode=sigkill, rank=1 step=32 mode=sigkill"
    resumed_after = ("", "after step 10,", "after step 30,")
    for split, resumed in zip(splits, resumed_after, strict=True):
        ended = train(tmp_path, "cut", split, "--chaos", chaos)
        is_last = split == splits[-1]
        assert (ended.returncode == 0) == is_last, ended.stdout + ended.stderr
        assert rows[split[:1]] in ended.stdout and resumed in ended.stdout, ended.stdout + ended.stderr
    ours, unsplit = summary(tmp_path, "cut"), json.loads((whole / "summary.json").read_text())
    assert ours["metrics"]["test_accuracy"] > 0.8
    exported = keras.models.load_model(tmp_path / "cut" / "model.keras").get_weights()
    expected = keras.models.load_model(whole / "model.keras").get_weights()
    if "columns:2" in splits:  # other sums, in float32
        assert all(np.allclose(one, other, atol=1e-3) for one, other in zip(exported, expected, strict=True))
    else:
        assert ours["checksum"] == unsplit["checksum"]
        assert all((one == other).all() for one, other in zip(exported, expected, strict=True))


def test_what_cannot_be_split_is_one_line(tmp_path: Path) -> None:
    for words, said in (
        (["--model.stages", "conv2d"], "model.split: no stage can begin with layer conv2d: expected some of "),
        (["--model.split", "layers:99"], "model.split: 99 stages, but the model can be cut at "),
        (["--model.split", "columns:2", "--optimizer.name", "lamb"], "model.split: Lamb uses norms, means or products"),
    ):
        ended = train(tmp_path, "none", "layers:2", *words, ranks=0)
        assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
