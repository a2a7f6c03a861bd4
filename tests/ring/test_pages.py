"""The first command of each page on training does what the page says it does, in fewer epochs; so do whole scripts."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import launching
import numpy as np
import pages
import pandas as pd
import pytest

PAGES = ("checkpoints", "troubleshooting", "learning-rate", "models", "tracking")
EPOCHS = ["--train.epochs", "3"]


def first_command(page: str) -> list[str]:
    text = (launching.ROOT / "docs" / f"{page}.md").read_text()
    words = shlex.split(re.search(r"^horovodrun -np 2 -H localhost:2 (.*)$", text, re.MULTILINE)[1])
    return [word.replace("step=100", "step=20") for word in words]


@pytest.mark.parametrize("page", PAGES)
def test_the_first_command_of_a_page(page: str, tmp_path) -> None:
    argv = [*first_command(page), *EPOCHS, "--run.directory", tmp_path]
    ended = launching.run(2, argv, 600, launcher="mpi", warm=True)
    assert ended.returncode == (143 if page == "troubleshooting" else 0), ended.stdout + ended.stderr
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["in_sync"] is True and summary["num_ranks"] == 2
    assert f"weights and optimizer equal {summary['checksum']}" in ended.stdout


# ---- scripts, as they stand in the README and in pages ---------------------------------------------------------------


def test_the_script_of_the_readme_prints_what_its_picture_shows(tmp_path: Path) -> None:
    printed, summary = pages.start("README.md", tmp_path)
    assert summary["num_ranks"] == 2 and summary["in_sync"] is True
    assert summary["metrics"]["val_accuracy"] > 0.85
    prompt, *picture = filter(None, pages.shown(pages.TERMINAL.read_text()))
    assert prompt == f"$ {shlex.join(pages.command('README.md'))}"
    lines = {pages.alike(line) for line in printed.splitlines()}
    missing = {pages.alike(line) for line in picture} - lines
    assert len(picture) > 20 and not missing, f"{missing}: draw it again by python tests/pages.py"
    assert pages.alike("epoch 1/8  loss 0.5  speed 7,647 images/s") not in lines, "the control: a line of another form"


def test_the_script_for_keras_gives_the_loss_that_keras_gives_without_the_changes(tmp_path: Path) -> None:
    printed, _ = pages.start("docs/from-keras.md", tmp_path)
    before = pages.before(pages.scripts("docs/from-keras.md")[0])
    assert "ringtrain" not in before and "model.fit(" in before
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "cancer.py").write_text(before)
    alone = launching.run(0, [sys.executable, "cancer.py"], pages.LIMIT_S, cwd=tmp_path / "keras", warm=True)
    (loss,) = numbers("val_loss", alone.stdout)
    assert numbers("val_loss", printed) == pytest.approx([loss] * 2, abs=2e-5)
    # Another epoch has another loss, by far more than that.
    records = (tmp_path / "runs" / "cancer" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(record)["val_loss"] for record in records]
    assert len(losses) > 1 and min(abs(one - other) for one, other in itertools.pairwise(losses)) > 1e-3
    assert (tmp_path / "best.keras").exists()


def test_both_steps_of_a_script_for_horovod(tmp_path: Path) -> None:
    steps = [pages.start("docs/from-horovod.md", tmp_path, number) for number in (0, 1)]
    for printed, summary in steps:
        (accuracy, checksum), other = re.findall(r"accuracy (0\.\d{4}), weights ([0-9a-f]{16})", printed)
        assert (accuracy, checksum) == other and float(accuracy) > 0.85
        assert summary.get("checksum", checksum) == checksum
    assert summary["numbers"]["global_batch_size"] == 64 and not steps[0][1], "only ringtrain.fit has a folder"
    assert len([*tmp_path.glob("checkpoint-*.keras")]) == 4


def test_the_script_for_a_model_on_several_devices(tmp_path: Path) -> None:
    printed, summary = pages.start("docs/models.md", tmp_path)
    assert summary["in_sync"] is True and summary["num_ranks"] == 2
    stages = "[('CPU:0', ['dense', 'dense_1']), ('CPU:1', ['dense_2', 'dense_3'])]"
    assert printed.count(stages) == 2, printed


def test_the_script_for_slow_links(tmp_path: Path) -> None:
    printed, _ = pages.start("docs/slow-links.md", tmp_path)
    (accuracy, checksum), other = re.findall(r"accuracy (0\.\d{4}), weights ([0-9a-f]{16})", printed)
    assert (accuracy, checksum) == other
    assert float(accuracy) > 0.85


def test_the_script_for_accelerate_trains_each_row_once_per_epoch(tmp_path: Path) -> None:
    printed, summary = pages.start("docs/from-keras.md", tmp_path, 1)
    first, second = numbers("val_mae", printed)
    assert first == second < 0.25
    sizes = summary["numbers"]
    assert (sizes["num_train"], sizes["steps_per_epoch"]) == (900, 29)
    assert (summary["global_step"], sizes["accumulation_steps"]) == (232, 2)


def test_the_function_on_ranks(tmp_path: Path) -> None:
    """The function of docs/fit.md, in a script without a guard."""
    text = (launching.ROOT / "docs" / "fit.md").read_text()
    block = re.search(r"^```python\n(import ringtrain\n\n\ndef train.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    data = "import numpy\nx, y = numpy.ones((100, 3)), numpy.ones((100, 1))\n"
    printed = "print(len(values), len(history['loss']), [one.shape for one in weights])\n"
    (tmp_path / "function.py").write_text(data + block + printed)
    ended = launching.run(0, [sys.executable, "function.py"], pages.LIMIT_S, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 5 [(3, 32), (32,), (32, 1), (1,)]" in ended.stdout


def test_the_regression_from_a_table_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    """The page's script and command; one process with twice the batch gives the same model."""
    random = np.random.default_rng(0)
    table = pd.DataFrame({"km": random.random(1000) * 20, "minutes": random.random(1000) * 30})
    table["night"] = random.integers(0, 2, 1000)
    table["fare"] = 4 + 2 * table["km"] + 0.3 * table["minutes"] + 3 * table["night"]
    table.to_csv(tmp_path / "rides.csv")
    (tmp_path / "taxi.py").write_text(pages.scripts("docs/data.md")[0])
    text = (launching.ROOT / "docs" / "data.md").read_text()
    words = shlex.split(re.search(r"^ringtrain train -np 2 (.*taxi:rides.*)$", text, re.MULTILINE)[1])
    trainer = [sys.executable, "-m", "ringtrain.train", *words, *EPOCHS]
    for np_, batch in ((2, 32), (0, 64)):
        options = ["--run.name", f"on-{np_}", "--train.batch-size", str(batch)]
        ended = launching.run(
            np_, [*trainer, *options], 600, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}"}, warm=True
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "taxi:rides (arrays): 800 to train, 200 to evaluate" in ended.stdout
    both = [json.loads((tmp_path / f"runs/on-{one}/summary.json").read_text()) for one in (2, 0)]
    assert [one["num_ranks"] for one in both] == [2, 1] and both[0]["numbers"]["steps_per_epoch"] == 13
    assert {"test_mae", "test_r2_score", "test_loss"} <= both[0]["metrics"].keys()
    for metric, value in both[0]["metrics"].items():
        assert value == pytest.approx(both[1]["metrics"][metric], rel=1e-4), metric
    records = (tmp_path / "runs/on-2/metrics.jsonl").read_text().splitlines()
    assert json.loads(records[0])["test_mae"] > 1.2 * both[0]["metrics"]["test_mae"], "another epoch has another error"


def numbers(name: str, printed: str) -> list[float]:
    """Numbers that scripts print after a name, one for each rank."""
    return [float(number) for number in re.findall(rf"{name} (\d+\.\d+)", printed)]
