"""Four ranks over Gloo, killed within an epoch and started again; and the scripts of launch/ as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import BIN, ROOT, run

HERE, TIMEOUT_S = Path(__file__).parent, 600
FOUR = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--model.name", "odd_model:dropping"]
FOUR += ["--train.epochs", "2", "--train.batch-size", "32", "--checkpoint.every-steps", "6", "--run.directory", "."]
FOUR += ["--hvd.deterministic"]  # else additions of more than two ranks have no fixed order
KILLED = ["--chaos", "rank=1 step=16 mode=sigkill"]
"""in the second epoch of 11 steps"""


def test_four_ranks_over_gloo_resume_where_they_were(tmp_path: Path) -> None:
    summaries = []
    for name, starts in {"whole": [[]], "killed": [KILLED, []]}.items():
        for options in starts:
            command = [*FOUR, "--run.name", name, *options]
            ended = run(4, command, TIMEOUT_S, {"PYTHONPATH": f"{ROOT}:{HERE}"}, "gloo", tmp_path, warm=True)
            assert (ended.returncode == 0) == (not options), ended.stderr[-4000:]
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
    whole, resumed = summaries
    assert whole["in_sync"] is True and whole["num_ranks"] == 4
    assert resumed["resumed_from"].endswith("step-00000012")
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
