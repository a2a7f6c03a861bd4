"""Every source under the real launcher: what each rank is given, and what the trainer makes of it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import launching
import numpy as np
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

JOURNAL = """
import json, sys
sys.path.insert(0, {tests!r})
import pictures
from ringtrain import data, hvd
from ringtrain.config import DataConfig

hvd.init()
rank, size = hvd.rank(), hvd.size()
for name in ("image-folder", "imagenet-tfrecords"):
    data_set = data.source(DataConfig(name=name, dir={root!r} + "/" + name, image_size=8))()
    own = data.evaluation_shard(len(data_set.test), rank, size)
    batches = {{
        "train": data.training_batches(data_set.train, 4, rank, size, 3, 3),
        "rest": data.training_batches(data_set.train, 4, rank, size, 3, 3, first_step=7),
        "test": data.evaluation_batches(data_set.test, own, 4),
    }}
    journal = {{key: [[pictures.number_of(image) for image in images] for images, _ in value.as_numpy_iterator()]
               for key, value in batches.items()}}
    with open({root!r} + f"/{{name}}-{{rank}}.json", "w") as file:
        json.dump(journal, file)
"""


def test_two_ranks_train_every_sample_as_often_and_evaluate_each_once(tmp_path):
    pictures.write_numbered(tmp_path / "image-folder", 43, 9)
    pictures.write_records(tmp_path / "image-folder", tmp_path / "imagenet-tfrecords", 3)
    program = JOURNAL.format(root=str(tmp_path), tests=str(Path(pictures.__file__).parent))
    ended = launching.run(2, [sys.executable, "-c", program], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stderr
    for name in ("image-folder", "imagenet-tfrecords"):
        ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        assert [np.shape(rank["train"]) for rank in ranks] == [(15, 4)] * 2
        steps = np.concatenate([rank["train"] for rank in ranks], axis=1)
        for epoch in range(3):
            assert len(np.unique(steps[5 * epoch : 5 * epoch + 5])) == 40
        assert set(np.bincount(steps.ravel(), minlength=43)) == {2, 3}  # 3 of 43 are left out, others each time
        assert all(rank["rest"] == rank["train"][7:] for rank in ranks)
        tested = [number for rank in ranks for batch in rank["test"] for number in batch]
        assert sorted(tested) == list(range(1000, 1009))


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
    assert (
        summary["global_step"] == 2 * (5 if name == "records" else 4)
        and summary["skipped_samples"] == 0
        and summary["in_sync"] is True
    )
    alone = launching.run(0, one, timeout_s=TIMEOUT_S, cwd=place, warm=True)
    assert alone.returncode == 0 and alone.stderr == "", alone.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == len(two) == 2
    for expected, got in zip(one, two, strict=True):
        for metric in ("loss", "accuracy", "test_loss", "test_accuracy"):
            assert got[metric] == pytest.approx(expected[metric], rel=1e-5, abs=2e-5), metric


@pytest.fixture
def one_broken(tmp_path):
    """A folder of which one picture to train and one to test are broken, and the names of these."""
    root = pictures.write_folder(tmp_path / "folder", 32, 8)
    names = [root / "train" / "flower" / "0004.jpg", root / "val" / "temple" / "0003.jpg"]
    for path in names:
        path.write_bytes(path.read_bytes()[:200])
    return root, names


def test_a_broken_picture_ends_the_job_with_one_line_that_names_it(one_broken, tmp_path):
    root, names = one_broken
    options = [*SMALL, "--data.name", "image-folder", "--data.dir", root, "--run.directory", tmp_path / "runs"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    lines = [line.partition("<stderr>:")[2] for line in ended.stderr.splitlines() if "<stderr>:" in line]
    said = [line for line in lines if line.startswith("ringtrain: ")]
    assert len(said) == 1 and said[0].startswith(f"ringtrain: {names[0]}: Invalid JPEG data")
    assert [line for line in lines if line.strip()] == said


def test_broken_pictures_are_skipped_and_counted_over_all_ranks(one_broken, tmp_path):
    root, names = one_broken
    options = [*SMALL, "--data.name", "image-folder", "--data.dir", root, "--data.on-error", "skip"]
    options += ["--run.directory", tmp_path, "--run.name", "skipping"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.partition("<stderr>:")[2] for line in ended.stderr.splitlines() if "<stderr>:" in line]
    assert len({line for line in lines if line}) == 2 and all("skipped" in line for line in lines if line)
    folder = tmp_path / "skipping"
    assert json.loads((folder / "summary.json").read_text())["skipped_samples"] == 2
    logs = "".join((folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert all(f"ringtrain: skipped {name}: Invalid JPEG data" in logs for name in names)
    # 7 test samples: every accuracy is a whole number of sevenths
    sevenths = [7 * record["test_accuracy"] for record in metrics(folder)]
    assert sevenths == pytest.approx(np.rint(sevenths), abs=1e-4)
