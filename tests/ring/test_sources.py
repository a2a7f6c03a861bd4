"""Every source under the real launcher: what each rank is given, and what the trainer makes of it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import launching
import pictures
import pytest

TRAIN = [sys.executable, "-m", "ringtrain.train"]
TIMEOUT_S = 600
PAGE = (launching.ROOT / "docs" / "data.md").read_text()
SMALL = [
    "--data.image-size",
    "16",
    "--train.batch-size",
    "4",
    "--train.epochs",
    "2",
    "--optimizer.learning-rate",
    "0.01",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the commands of docs/data.md can be run."""
    root = tmp_path_factory.mktemp("sources")
    pictures.write_folder(root / "pictures", 35, 7)
    pictures.write_records(root / "pictures", root / "records", 16)
    (root / "decode.py").write_text(re.search(r"```python\n(import tensorflow.*?)```", PAGE, re.DOTALL)[1])
    return root


def command_for(name: str) -> list[str]:
    """What docs/data.md says after the launcher's name and ranks, with options that make it short."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith("horovodrun ") and f"--data.name {name} " in line)
    assert line.startswith("horovodrun -np 2 -H localhost:2 python ")
    return [sys.executable, *shlex.split(line)[6:], *SMALL, "--optimizer.learning-rate-scaling", "none"]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["image-folder", "imagenet-tfrecords", "records"])
def test_two_ranks_learn_from_each_source(place, name, tmp_path):
    """What one rank with the big batch learns; with random crops and flips, where a source has them."""
    common = [*command_for(name), "--run.directory", tmp_path]
    two, one = [*common, "--run.name", "two"], [*common, "--run.name", "one", "--train.batch-size", "8"]
    ended = launching.run(2, two, timeout_s=TIMEOUT_S, cwd=place, launcher="mpi", warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "<stderr>" not in ended.stderr
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["global_step"] == 2 * 5 and summary["in_sync"] is True
    alone = launching.run(0, one, timeout_s=TIMEOUT_S, cwd=place, warm=True)
    assert alone.returncode == 0 and alone.stderr == "", alone.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == len(two) == 2
    for expected, got in zip(one, two, strict=True):
        for metric in ("loss", "accuracy", "test_loss", "test_accuracy"):
            assert got[metric] == pytest.approx(expected[metric], rel=1e-5, abs=2e-5), metric


def test_a_broken_picture_ends_the_job_with_one_line_that_names_it(tmp_path):
    root = pictures.write_folder(tmp_path / "folder", 32, 8)
    name = root / "train" / "flower" / "0004.jpg"
    name.write_bytes(name.read_bytes()[:200])
    options = [*SMALL, "--data.name", "image-folder", "--data.dir", root, "--run.directory", tmp_path / "runs"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    lines = [line.partition("<stderr>:")[2] for line in ended.stderr.splitlines() if "<stderr>:" in line]
    said = [line for line in lines if line.startswith("ringtrain: ")]
    assert len(said) == 1 and said[0].startswith(f"ringtrain: {name}: Invalid JPEG data")
    assert [line for line in lines if line.strip()] == said
