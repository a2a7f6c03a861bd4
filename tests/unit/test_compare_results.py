"""ringtrain compare, without training: what is asked for, and what runs' folders tell."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ringtrain import cli, config_io
from ringtrain.config import Config
from ringtrain.errors import LaunchError
from ringtrain.lab.compare import cli as compare_cli
from ringtrain.lab.compare import results

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "compare").glob("*.toml"))


def test_a_strategy_may_have_options_and_towers_get_their_copies() -> None:
    entries = compare_cli.read("ring,one,towers:reduction=all:controller=gpu:0,ring:hvd.groups=4", 3)
    assert [one.words for one in entries] == [
        ("--strategy.name", "ring"),
        ("--strategy.name", "ring"),
        (
            *("--strategy.name", "towers", "--strategy.towers", "3"),
            *("--strategy.reduction", "all", "--strategy.controller", "gpu:0"),
        ),
        ("--strategy.name", "ring", "--hvd.groups", "4"),
    ]
    assert len({compare_cli.file_name(one) for one in entries}) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "ring,tower"], "'tower' is none: did you mean towers?"),
        (["--strategies", "ring,towers,ring"], "ring is there twice"),
        (["--strategies", "ring:group=4"], "unknown option --strategy.group"),
        (["--strategies", "towers:reduction=some"], "--strategy.reduction"),
        (["--strategies", "ring", "--budget", "steps=4"], "got --budget steps=4, expected epochs=5"),
        (["--strategies", "ring", "--budget", "time=soon"], "got --budget soon, expected a time such as 90s"),
        (["--strategies", "ring", "--budget", "accuracy=97"], "train.target_accuracy: got 97.0, expected 0 to 1"),
        (["--strategies", "ring", "--seeds", "0"], "got --seeds 0, expected 1 or more"),
        (["--strategies", "ring", "--workers", "2"], "got --workers 2: all have as many"),
        (["--strategies", "ps-sync", "--ps", "0"], "got --ps 0, expected 1 or more"),
        (["--strategies", "ring", "--timeline", "t.json"], "got --timeline: each run keeps its own"),
        (["--strategies", "ring", "--launcher", "sbatch"], "got --launcher sbatch, expected one of mpirun"),
        (["--strategies", "ring", "-np", "3"], "got -np 3, but 1 host with 2 slots"),
        (["--strategies", "ring", "--dry-run"], "leave out --dry-run"),
        (["--strategies", "ring", "--", "--model.name", "mlpp"], "did you mean mlp?"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "-H", "localhost:2", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_a_budget_is_options_of_training() -> None:
    words = compare_cli.budget("accuracy=0.97,epochs=50,time=2m")
    assert words == ["--train.target-accuracy", "0.97", "--train.epochs", "50", "--train.max-time-s", "120.0"]
    assert compare_cli.budget("") == []
    with pytest.raises(LaunchError):
        compare_cli.budget("0.97")


def test_every_strategy_is_started_with_the_same_number_of_copies() -> None:
    servers = ["--ps", "2", "--workers", "3", "--oversubscribe"]
    expected = {"ring": ["-np", "3"], "towers": ["-np", "1"], "one": ["-np", "1"], "ps-async": servers}
    assert {name: compare_cli.launch_words(name, 3, 2) for name in expected} == expected
    for words in expected.values():
        cli.parse(["launch", *words])


def make_run(folder: Path, strategy: str, told: dict[str, Any], accuracies: list[float], target: float) -> Path:
    folder.mkdir(parents=True)
    text = f'[strategy]\nname = "{strategy}"\n[train]\ntarget_accuracy = {target}\n'
    (folder / "config.toml").write_text(f'{text}[hvd]\nop = "average"\ncompression = "fp16"\n')
    records = [
        {"epoch": epoch, "global_step": 10 * epoch, "train_s": 0.5, "test_accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    totals = [{"totals": {"step_s": step_s, "wait_s": 1.0}} for step_s in (2.0, 2.0, 0.0)]
    summary: dict[str, Any] = {"images_per_s": 100.0, "num_parameters": 1000, "ranks": totals, "strategy": told}
    summary["numbers"] = {"num_train": 103, "dropped_per_epoch": 3, "num_ranks": 4}
    summary["numbers"] |= {"steps_per_epoch": 10, "accumulation_steps": 1}
    summary["reduced_bytes"] = 2 * 1000
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_figures_are_read_from_the_runs(tmp_path: Path) -> None:
    told = {"staleness": {"mean": 1.5, "p50": 1, "p90": 2, "max": 3}, "dropped": [3, 4], "waiting": [0.2, 0.3]}
    trained = [
        results.Result("ring", 0, make_run(tmp_path / "ring-0", "ring", {}, [0.5, 0.9, 0.8], 0.9)),
        results.Result("ps-async", 0, make_run(tmp_path / "ps-0", "ps-async", told, [0.5, 0.6, 0.7], 0.9)),
        results.Result("towers", 0, tmp_path / "towers-0", "no GPU"),
        results.Result("ring", 1, make_run(tmp_path / "ring-1", "ring", {}, [0.5, 0.6, 0.7], 0.9)),
        results.Result("one", 0, make_run(tmp_path / "one-0", "ring", {}, [], 0.9)),
    ]
    ring, servers = trained[0].measured, trained[1].measured
    assert (ring["to_target_s"], ring["to_target_samples"], ring["train_s"]) == (1.0, 200, 1.5)
    assert (ring["test_accuracy"], ring["best_test_accuracy"], servers["to_target_s"]) == (0.8, 0.9, None)
    assert ring["waiting_share"] == 0.5 and servers["waiting_share"] == 0.25  # the last rank has trained nothing
    assert ring["bytes_per_update"] == 0.5 * 4 * 1000 * 2 * 3 / 4 and servers["bytes_per_update"] == 2 * 4 * 1000
    assert ring["to_target_bytes"] == 20 * ring["bytes_per_update"]
    assert servers["to_target_bytes"] is None
    assert (servers["staleness"], servers["dropped"], ring["staleness"]) == (1.5, 7, None)
    assert trained[4].points == [] and "no complete epoch" in results.in_words(trained[4])

    first, second = results.tables(results.summaries(trained), 0.9)
    assert first.head == ["", "test accuracy, %", "s to 90 %", "samples to it", "MB to it", "training, s"]
    by_name = {row[0]: row[1:] for row in first.rows}
    assert by_name["ring"] == ["75.00 (71.00 to 79.00)", "1.00 [1 of 2]", "200 [1 of 2]", "0.1 [1 of 2]", "1.50"]
    assert by_name["towers"] == ["failed", "", "", "", ""] and by_name["ps-async"][1] == ""
    assert second.head[-2:] == ["staleness", "dropped"] and second.rows[1][-2:] == ["1.50", "7"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_can_be_read_and_names_its_own_command(recipe: Path) -> None:
    assert config_io.read_toml(recipe) != Config()
    (command,) = re.findall(r"^#   ringtrain (compare .*)$", recipe.read_text(), re.MULTILINE)
    _, given = cli.parse(shlex.split(command))
    assert ROOT / given.values["config"] == recipe
