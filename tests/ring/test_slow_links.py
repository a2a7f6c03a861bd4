"""Compressed gradients and local steps in runs: stopped, killed, resumed, on other ranks; and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching
import numpy as np
import pytest

from ringtrain.run import checkpoint, model_state

TIMEOUT_S = 300
TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--run.directory", ".", "--run.name", "run"]
SHORT = ["--model.name", "mlp", "--train.epochs", "2", "--train.batch-size", "48", "--checkpoint.every-steps", "4"]
POWERSGD = ["--hvd.compression", "powersgd:2", "--hvd.compression-start-step", "2"]
LOCAL = ["--hvd.local-steps", "3", "--hvd.outer-optimizer", "nesterov", "--hvd.local-warmup-steps", "5"]
JOBS = {
    "powersgd": [*SHORT, *POWERSGD, "--optimizer.accumulation-steps", "2"],
    "local": [*SHORT, *LOCAL],
    "both": [
        *SHORT,
        *LOCAL,
        "--hvd.compression",
        "powersgd:2",
        "--optimizer.name",
        "sgd",
        "--optimizer.learning-rate",
        "0.05",
    ],
}


def train(folder: Path, ranks: int, *options: str, code: int = 0) -> str:
    ended = launching.run(ranks, [*TRAIN, *options], TIMEOUT_S, cwd=folder, warm=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def last(folder: Path) -> checkpoint.Checkpoint:
    return checkpoint.verify(max((folder / "run" / "checkpoints").iterdir()))


def result(folder: Path) -> dict:
    """Checksum and metrics of a run, and all of its last checkpoint: also what differs between ranks."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    arrays = {file: last(folder).arrays(file) for file in ("state", "ranks")}
    state = {f"{file}/{name}": array.tobytes() for file, of in arrays.items() for name, array in of.items()}
    return {"checksum": summary["checksum"], "test": summary["test_accuracy"], "step": summary["global_step"]} | state


@pytest.mark.parametrize("job", JOBS)
def test_stopped_and_killed_runs_go_on_as_if_nothing_had_happened(job: str, tmp_path: Path) -> None:
    """Within an update, within a round, and before compression starts; what a rank has not sent yet is not lost."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    shown = train(tmp_path / "whole", 2, *JOBS[job])
    assert "2 ranks in step" in shown
    assert ("after each round of 3 local steps: its changes averaged" in shown) == (job != "powersgd")
    killed = tmp_path / "killed"
    often = ["--health.agree-every-steps", "1"]
    if job != "both":  # which is made of the other two
        train(killed, 2, *JOBS[job], *often, "--chaos", "rank=1 step=1 mode=sigterm", code=143)
        stopped_at = json.loads((killed / "run" / "summary.json").read_text())["global_step"]
        assert 1 <= stopped_at < 10
        train(killed, 2, *JOBS[job], *often, "--chaos", "rank=0 step=11 mode=sigterm", code=143)
    train(killed, 2, *JOBS[job], "--chaos", "rank=1 step=21 mode=sigkill", code=137)
    assert "after step 20," in train(killed, 2, *JOBS[job])
    assert result(killed) == result(tmp_path / "whole")
    assert any(name.startswith("ranks/1/") for name in result(killed)), "no state of ranks to lose"


def test_another_number_of_ranks_goes_on_from_the_mean(tmp_path: Path) -> None:
    """A checkpoint within a round has the weights of each rank; their mean is what other ranks take."""
    job = [*JOBS["local"], "--optimizer.learning-rate-scaling", "none"]
    train(tmp_path, 2, *job, "--chaos", "rank=1 step=13 mode=sigkill", code=137)
    saved = last(tmp_path)
    assert saved.global_step == 12  # 5 ordinary steps, two rounds of 3, and one step more
    own = model_state.by_rank(saved.arrays("ranks"), 2)
    state = saved.arrays("state").values()
    kernels = [name for name, array in own[0].items() if array.ndim == 2]
    assert len(kernels) >= 3, "moments and weights of each rank"
    for name in kernels:
        assert np.abs(own[0][name] - own[1][name]).max() > 0, name
        mean = ((own[0][name].astype(float) + own[1][name]) / 2).astype("float32")
        assert any(np.array_equal(mean, array) for array in state), name
    shown = train(tmp_path, 3, *job, "--train.batch-size", "32", "--train.epochs", "4")
    assert "after step 12," in shown
    assert "3 ranks in step after each round" in shown
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_accuracy"] > 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hvd.compression", "powersgd"], "expected none, fp16, bf16, powersgd:1"),
        (["--hvd.compression", "powersgd:2", "--hvd.groups", "2"], "does not work with hvd.groups"),
        (["--hvd.local-steps", "2", "--train.virtual-ranks", "4"], "does not work with hvd.local_steps 2"),
        (["--hvd.local-steps", "2", "--train.precision", "mixed_float16"], "use mixed_bfloat16"),
        (["--hvd.local-steps", "2", "--hvd.op", "adasum"], "does not work with hvd.op adasum"),
        (["--hvd.local-steps", "2", "--strategy.name", "mpi-ring"], "hvd.local_steps"),
    ],
)
def test_what_does_not_work_together_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    assert message in train(tmp_path, 0, *options, code=2)
