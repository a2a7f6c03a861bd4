"""The old Horovod scripts in examples/ train after their one-line change, and not without it; the study runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import ROOT, run
from PIL import Image

DRIVER = Path(__file__).parent / "run_example.py"
MNIST = ROOT / "examples" / "keras_mnist.py"
IMAGENET = ROOT / "examples" / "keras_imagenet_resnet50.py"
OUR_LINE = "import ringtrain.hvd as hvd"
LIMIT_S = 300
NUM_RANKS = 2

BASE_LR, BATCHES_PER_ALLREDUCE, WARMUP_EPOCHS = 0.001, 2, 3
FULL_LR = BASE_LR * NUM_RANKS * BATCHES_PER_ALLREDUCE


def _start(folder: Path, script: Path, *arguments: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Runs an example on two ranks; returns the launch, and the report of each rank that came to its end."""
    finished = run(NUM_RANKS, [sys.executable, DRIVER, folder, script, *arguments], LIMIT_S, warm=True)
    files = [folder / str(rank) / "report.json" for rank in range(NUM_RANKS)]
    return finished, [json.loads(file.read_text()) for file in files if file.exists()]


def _succeeded(folder: Path, script: Path, *arguments: Any) -> tuple[str, dict[str, Any]]:
    """Runs an example that must end well with ranks in step; returns what it printed, and rank 0's report."""
    finished, reports = _start(folder, script, *arguments)
    assert finished.returncode == 0, f"{finished.stdout[-3000:]}\n{finished.stderr[-5000:]}"
    assert len(reports) == NUM_RANKS
    assert reports[0]["checksum"] == reports[1]["checksum"]
    # Weights, and metrics averaged over the ranks, are the same on both.
    assert reports[0] == reports[1]
    assert "[1,1]<stdout>" not in finished.stdout, "rank 1 printed something"
    return finished.stdout, reports[0]


def _written(folder: Path, rank: int) -> set[str]:
    return {path.name for path in (folder / str(rank)).iterdir()} - {"report.json"}


def _warmup_lr(epoch: int) -> float:
    """At the end of an epoch, counted from 0; Goyal et al. 2017, section 2.2."""
    return FULL_LR / NUM_RANKS * ((epoch + 1) * (NUM_RANKS - 1) / WARMUP_EPOCHS + 1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy pictures of three classes, each with a colour of its own: 96 to train, 21 to validate."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 7)):
        for channel, colour in enumerate(("red", "green", "blue")):
            (folder / split / colour).mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 100, (40, 36, 3), np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(folder / split / colour / f"{index}.png")
    return folder


def _imagenet_arguments(pictures: Path, epochs: int) -> list[Any]:
    options = {
        "train-dir": pictures / "train",
        "val-dir": pictures / "val",
        "model": "MobileNet",
        "image-size": 32,
        "batch-size": 4,
        "base-lr": BASE_LR,
        "warmup-epochs": WARMUP_EPOCHS,
        "batches-per-allreduce": BATCHES_PER_ALLREDUCE,
        "epochs": epochs,
    }
    return [*(word for name, value in options.items() for word in (f"--{name}", value)), "--fp16-allreduce"]


@pytest.fixture(scope="module")
def two_epochs(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The ImageNet example's first two epochs: its folder, and its report."""
    folder = tmp_path_factory.mktemp("imagenet")
    return folder, _succeeded(folder, IMAGENET, *_imagenet_arguments(pictures, epochs=2))[1]


@pytest.mark.parametrize("script", [MNIST, IMAGENET], ids=lambda path: path.stem)
def test_only_the_import_is_ours(script: Path) -> None:
    code = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in code if "ringtrain" in line] == [OUR_LINE]
    assert not [line for line in code if "horovod" in line]


def test_mnist(tmp_path: Path) -> None:
    printed, report = _succeeded(tmp_path, MNIST, "--epochs", 3, "--warmup-epochs", 2, "--base-lr", 0.001)
    assert report["test_accuracy"] > 0.8
    assert f"Test accuracy: {report['test_accuracy']:.4f}" in printed
    assert report["history"]["lr"] == pytest.approx([0.0015, 0.002, 0.002])
    assert _written(tmp_path, 0) == {"checkpoint-1.keras", "checkpoint-2.keras", "checkpoint-3.keras"}
    assert _written(tmp_path, 1) == set()


def test_imagenet_starts(two_epochs: tuple[Path, dict[str, Any]]) -> None:
    folder, report = two_epochs
    assert report["epochs"] == [0, 1]
    assert report["history"]["lr"] == pytest.approx([_warmup_lr(0), _warmup_lr(1)])
    assert _written(folder, 0) == {"checkpoint-1.keras", "checkpoint-2.keras", "logs"}
    assert list((folder / "0" / "logs").rglob("events.out.*"))
    assert _written(folder, 1) == set()


def test_imagenet_resumes_in_its_warmup(
    pictures: Path, two_epochs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 1 has no checkpoint to see: where to go on, and from which weights, it hears from rank 0."""
    before = two_epochs[1]["history"]
    shutil.copytree(two_epochs[0], tmp_path, dirs_exist_ok=True)
    printed, report = _succeeded(tmp_path, IMAGENET, *_imagenet_arguments(pictures, epochs=4))
    assert "Resuming after epoch 2 from ./checkpoint-2.keras" in printed
    assert "Epoch 3/4" in printed
    assert "Epoch 2/4" not in printed
    assert report["epochs"] == [2, 3]
    assert report["history"]["lr"] == pytest.approx([_warmup_lr(2), FULL_LR])
    assert report["history"]["accuracy"][-1] > 0.6
    assert report["history"]["loss"][-1] < before["loss"][0]
    assert _written(tmp_path, 0) == {*(f"checkpoint-{epoch}.keras" for epoch in (1, 2, 3, 4)), "logs"}
    assert _written(tmp_path, 1) == set()


def test_negative_control_horovods_own_line_fails(tmp_path: Path) -> None:
    """The script as it was before: its header quotes the line."""
    source = MNIST.read_text()
    (old_line,) = [line.strip("# ") for line in source.splitlines() if line.startswith("#     import horovod")]
    before = tmp_path / MNIST.name
    before.write_text(source.replace(f"\n{OUR_LINE}\n", f"\n{old_line}\n"))
    finished, reports = _start(tmp_path, before)
    assert finished.returncode != 0
    assert reports == []
    failures = [path.read_text() for path in tmp_path.glob("*/failure.txt")]
    assert failures
    # It comes as far as training, and there Horovod asks Keras for what Keras 3 no longer has.
    assert all("model.fit(" in failure and "AttributeError: module 'keras" in failure for failure in failures)


def test_the_large_batch_study_trains_four_ways_and_draws_them(tmp_path):
    """On digits, where it takes a minute; a second call finds everything done and says the same."""
    study = ["python", ROOT / "examples" / "large_batch.py", "--config", ROOT / "configs" / "digits.toml"]
    study += ["--small-batch", 32, "--large-batch", 512, "--epochs", 2, "--seeds", 1, "--output", tmp_path]
    first = run(0, study, LIMIT_S, warm=True)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = (tmp_path / "large-batch.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        *("small batch", "large, scaled and warmed up", "large, scaled, no warm-up", "large, unscaled")
    ]
    assert [row.split("|")[2].strip() for row in rows[2:]] == ["32", "512", "512", "512"]
    assert [float(row.split("|")[3]) for row in rows[2:]] == [0.001, 0.016, 0.016, 0.001]
    assert all("%" in row for row in rows[2:])
    assert (tmp_path / "large-batch.png").read_bytes()[:4] == b"\x89PNG"
    again = run(0, study, LIMIT_S, warm=True)
    assert again.stdout.splitlines()[-len(rows) - 2 : -2] == rows
    assert len(again.stdout.splitlines()) < len(first.stdout.splitlines())
