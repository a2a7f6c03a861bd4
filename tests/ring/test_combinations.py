"""Four ranks, Gloo, a resume in mid-epoch and few test samples in one run; and the scripts of launch/ as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import test_options
from launching import BIN, ROOT, run

TIMEOUT_S = 600
FOUR = [*test_options.MODEL, "--data.name", "odd_model:three_to_test", "--optimizer.name", "adamw"]
FOUR += ["--hvd.deterministic"]  # else additions of more than two ranks have no fixed order


def test_four_ranks_over_gloo_resume_where_they_were(tmp_path: Path) -> None:
    """With fewer test samples than ranks."""
    command = [sys.executable, "-c", test_options.SCRIPT, tmp_path, 12, json.dumps({"four": FOUR})]
    ended = run(4, command, TIMEOUT_S, env={"PYTHONPATH": str(test_options.HERE)}, launcher="gloo", warm=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    whole, resumed = json.loads((tmp_path / "results.json").read_text())["four"]
    assert whole["in_sync"] is True and whole["num_ranks"] == 4 and whole["numbers"]["num_test"] == 3
    assert whole["numbers"]["steps_per_epoch"] == 1437 // (4 * 32)
    assert resumed["resumed_from"].endswith("step-00000012"), "in the second epoch"
    assert resumed["checksum"] == whole["checksum"] and resumed["metrics"] == whole["metrics"]


SCRIPTS = {
    "smoke.sh": [],
    "horovodrun.sh": ["hostfiles/localhost.txt", "-np", "2", "--", "python", "-m", "ringtrain.train"],
    "launch.py": ["-np", "2", "--", sys.executable, "-m", "ringtrain.train"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_two_ranks(name: str, tmp_path: Path) -> None:
    python = [sys.executable] if name.endswith(".py") else []
    options = ["--data.name", "digits", "--run.directory", tmp_path, "--run.name", "run"]
    command = [*python, ROOT / "launch" / name, *SCRIPTS[name], *options, *(["--train.epochs", "1"] if python else [])]
    ended = run(0, command, TIMEOUT_S, env={"PATH": f"{BIN}:/usr/bin:/bin"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["in_sync"] is True and summary["num_ranks"] == 2 and summary["metrics"]["test_accuracy"] > 0.2
