"""The first command of each page on training does what the page says it does, in fewer epochs."""

from __future__ import annotations

import json
import re
import shlex

import launching
import pytest

PAGES = ("checkpoints", "faults", "learning-rate", "models", "tracking")
EPOCHS = ["--train.epochs", "3"]


def first_command(page: str) -> list[str]:
    text = (launching.ROOT / "docs" / f"{page}.md").read_text()
    words = shlex.split(re.search(r"^horovodrun -np 2 -H localhost:2 (.*)$", text, re.MULTILINE)[1])
    return [word.replace("step=100", "step=20") for word in words]


@pytest.mark.parametrize("page", PAGES)
def test_the_first_command_of_a_page(page: str, tmp_path) -> None:
    argv = [*first_command(page), *EPOCHS, "--run.directory", tmp_path]
    ended = launching.run(2, argv, 600, launcher="mpi", warm=True)
    assert ended.returncode == (143 if page == "faults" else 0), ended.stdout + ended.stderr
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["in_sync"] is True and summary["num_ranks"] == 2
    assert f"weights and optimizer equal {summary['checksum']}" in ended.stdout
