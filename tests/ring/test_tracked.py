"""Two ranks with a tracker: only rank 0 records, and a missing server ends both before training."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from launching import run

TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--train.epochs", "1", "--run.name", "run"]
TRAIN += ["--device.threads", "1"]
TIMEOUT_S = 600.0


@pytest.fixture(autouse=True)
def packages() -> None:
    if "RINGTRAIN_REQUIRE_TRACKERS" not in os.environ:
        pytest.importorskip("wandb")
        pytest.importorskip("mlflow")


def test_rank_0_alone_records(tmp_path: Path) -> None:
    options = ["--run.directory", str(tmp_path), "--tracking.wandb", "offline", "--tracking.every-steps", "5"]
    ended = run(2, [*TRAIN, *options], TIMEOUT_S, warm=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (written,) = tmp_path.rglob("*.wandb")
    ids = json.loads((tmp_path / "run" / "tracking.json").read_text())
    assert written.is_relative_to(tmp_path / "run") and written.name == f"run-{ids['wandb']['id']}.wandb"
    shown = f"W&B +wandb sync {re.escape(str(tmp_path))}/run/wandb/offline-run-\\*"
    assert len(re.findall(shown, ended.stdout)) == 1, ended.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_ranks"] == 2 and summary["in_sync"] and "W&B" in summary["tracked"]
    assert not re.search("wandb:|WARNING", ended.stdout + ended.stderr), ended.stderr


def test_a_server_that_does_not_answer_ends_both_ranks_before_training(tmp_path: Path) -> None:
    options = ["--run.directory", str(tmp_path / "runs"), "--tracking.mlflow", "http://127.0.0.1:9"]
    ended = run(2, [*TRAIN, *options], TIMEOUT_S, warm=True, cwd=tmp_path)
    assert ended.returncode == 2
    lines = [line.partition(">:")[2] for line in ended.stderr.splitlines() if "ringtrain: " in line]
    assert len(lines) == 1 and "--tracking.mlflow: got http://127.0.0.1:9, which cannot be used: " in lines[0], (
        ended.stderr
    )
    assert "refused" in lines[0] and "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()
