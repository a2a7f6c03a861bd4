"""With virtual ranks, weights, slots, moving statistics and metrics have the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import checkpoints, records, summary, train

VIRTUAL = ["--train.virtual-ranks", "4", "--train.batch-size", "16"]
DROPPING = ["--model.name", "odd_model:dropping", "--train.epochs", "2", "--checkpoint.every-steps", "5"]
# Clipped Adam on batches of two steps, and momentum in half precision, whose loss is scaled.
JOBS = {
    "adam": [*VIRTUAL, *DROPPING, "--optimizer.accumulation-steps", "2", "--optimizer.clip-norm", "0.5"],
    "float16": [*VIRTUAL, *DROPPING, "--optimizer.name", "sgd", "--train.precision", "mixed_float16"],
}


def result(folder: Path) -> dict:
    """Checksum and metrics of a run, and the bytes of its last checkpoint: weights, statistics, slots, seeds."""
    state = (checkpoints(folder)[-1] / "state.npz").read_bytes()
    return {"checksum": summary(folder)["checksum"], "metrics": records(folder), "state": state}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Of one process, without a launcher."""
    folders = {name: tmp_path_factory.mktemp(name) for name in JOBS}
    for name, folder in folders.items():
        train(folder, *JOBS[name], np=0)
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
    shown = train(tmp_path, *JOBS[job], np=ranks, launcher=launcher).stdout
    assert f"{ranks} ranks in step: gradients averaged in a fixed order" in shown and "4 virtual ranks" in shown
    assert result(tmp_path) == alone[job]


def test_a_killed_run_goes_on_with_other_ranks(alone: dict, tmp_path: Path) -> None:
    """In the middle of an update of two steps; the rest of the run on two ranks, then one."""
    train(tmp_path, *JOBS["adam"], "--chaos", "rank=1 step=17 mode=sigkill", np=3, code=137)
    shown = train(tmp_path, *JOBS["adam"], "--chaos", "rank=0 step=37 mode=sigkill", np=2, code=137).stdout
    assert "after step 15," in shown and "4 virtual ranks" in shown
    train(tmp_path, *JOBS["adam"], np=0)
    assert result(tmp_path) == alone["adam"]


def test_another_order_of_additions_is_found(tmp_path: Path) -> None:
    ended = train(tmp_path, *JOBS["adam"], "--model.name", "reordered:model", np=4, launcher="gloo", code=1)
    assert "the sum over 4 virtual ranks differs from one process' by up to" in ended.stdout + ended.stderr


def test_more_ranks_than_virtual_ranks_are_refused(tmp_path: Path) -> None:
    ended = train(tmp_path, *VIRTUAL, "--train.virtual-ranks", "2", np=3, code=2)
    assert "train.virtual_ranks: got 2 on 3 ranks" in ended.stderr
