"""Faults on order: whatever ends a job, the same command given again ends as the run that nothing happened to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import run

OPTIONS = ["--data.name", "digits", "--train.epochs", "2", "--checkpoint.every-steps", "6", "--run.name", "run"]
TRAIN = [sys.executable, "-m", "ringtrain.train", *OPTIONS]


def train(folder: Path, chaos: str):
    return run(2, [*TRAIN, "--run.directory", folder, "--chaos", chaos], 600)


def checksum(folder: Path) -> str:
    return json.loads((folder / "run" / "summary.json").read_text())["checksum"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder, "").returncode == 0
    return checksum(folder)


@pytest.mark.parametrize(
    ("chaos", "code", "step"),
    [
        ("rank=0 step=9 mode=kill", 137, 6),
        ("rank=1 step=25 mode=exception", 1, 24),
        ("rank=0 step=15 mode=kill during=save", 137, 12),
        ("rank=1 step=20 mode=nan", 2, 18),
    ],
)
def test_a_job_that_failed_goes_on_as_if_nothing_had_happened(chaos, code, step, undisturbed, tmp_path):
    failed = train(tmp_path, chaos)
    assert failed.returncode == code, failed.stdout + failed.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
    again = train(tmp_path, chaos)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"after step {step}, " in again.stdout
    assert checksum(tmp_path) == undisturbed
