"""With virtual ranks, weights, slots, moving statistics and metrics have the same bits on any number of ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import launching
import pytest

TIMEOUT_S = 300
VIRTUAL = ["--train.virtual-ranks", "4", "--train.batch-size", "16"]
TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--run.directory", ".", "--run.name", "run"]
DROPPING = ["--model.name", "odd_model:dropping", "--train.epochs", "2", "--checkpoint.every-steps", "5"]
# Clipped Adam on batches of two steps, and momentum in half precision, whose loss is scaled.
JOBS = {
    "adam": [*VIRTUAL, *DROPPING, "--optimizer.accumulation-steps", "2", "--optimizer.clip-norm", "0.5"],
    "float16": [*VIRTUAL, *DROPPING, "--optimizer.name", "sgd", "--train.precision", "mixed_float16"],
}
PATHS = f"{launching.ROOT}{os.pathsep}{Path(__file__).parent}"


def train(folder: Path, ranks: int, *options: str, launcher: str = "mpirun", code: int = 0) -> str:
    ended = launching.run(ranks, [*TRAIN, *options], TIMEOUT_S, {"PYTHONPATH": PATHS}, launcher, folder, warm=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def result(folder: Path) -> dict:
    """Checksum and metrics of a run, and the bytes of its last checkpoint: weights, statistics, slots, seeds."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    epochs = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    timed = ("images_per_s", "epoch_s", "seconds", "time_s")
    metrics = [{name: value for name, value in one.items() if "_s" not in name and name not in timed} for one in epochs]
    last = max((folder / "run" / "checkpoints").iterdir())
    return {"checksum": summary["checksum"], "metrics": metrics, "state": (last / "state.npz").read_bytes()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Of one process, without a launcher."""
    folders = {name: tmp_path_factory.mktemp(name) for name in JOBS}
    for name, folder in folders.items():
        train(folder, 0, *JOBS[name])
    return {name: result(folder) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("job", "ranks", "launcher"),
    [
        ("adam", 3, "gloo"),
        ("adam", 4, "mpirun"),
        ("float16", 3, "mpirun"),
        ("float16", 4, "gloo"),
    ],
)
def test_every_bit_is_that_of_one_process(job: str, ranks: int, launcher: str, alone: dict, tmp_path: Path) -> None:
    shown = train(tmp_path, ranks, *JOBS[job], launcher=launcher)
    assert f"{ranks} ranks in step: gradients averaged in a fixed order" in shown and "4 virtual ranks" in shown
    assert result(tmp_path) == alone[job]


def test_a_killed_run_goes_on_with_other_ranks(alone: dict, tmp_path: Path) -> None:
    """In the middle of an update of two steps; the rest of the run on two ranks, then one."""
    train(tmp_path, 3, *JOBS["adam"], "--chaos", "rank=1 step=17 mode=sigkill", code=137)
    shown = train(tmp_path, 2, *JOBS["adam"], "--chaos", "rank=0 step=37 mode=sigkill", code=137)
    assert "after step 15," in shown and "4 virtual ranks" in shown
    train(tmp_path, 0, *JOBS["adam"])
    assert result(tmp_path) == alone["adam"]


def test_another_order_of_additions_is_found(tmp_path: Path) -> None:
    shown = train(tmp_path, 4, *JOBS["adam"], "--model.name", "reordered:model", launcher="gloo", code=1)
    assert "the sum over 4 virtual ranks differs from one process' by up to" in shown


def test_more_ranks_than_virtual_ranks_are_refused(tmp_path: Path) -> None:
    shown = train(tmp_path, 3, *VIRTUAL, "--train.virtual-ranks", "2", code=2)
    assert "train.virtual_ranks: got 2 on 3 ranks" in shown


def test_layers_that_use_the_rows_of_real_ranks_are_refused(tmp_path: Path) -> None:
    shown = train(tmp_path, 2, *VIRTUAL, "--model.name", "proved:synced", code=2)
    assert "(SyncBatchNormalization) would use the rows of real ranks: use BatchNormalization" in shown


def test_random_numbers_without_a_seed_of_their_own_are_refused(tmp_path: Path) -> None:
    shown = train(tmp_path, 0, *VIRTUAL, "--model.name", "odd_model:noisy", code=2)
    assert "train.virtual_ranks: odd_model:noisy draws numbers of keras.random without a seed" in shown
