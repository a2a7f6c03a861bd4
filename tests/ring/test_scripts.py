"""The scripts of launch/ as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import BIN, ROOT, run

TIMEOUT_S = 600


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
