"""ringtrain init and ringtrain runs: what they write and list, and what they refuse."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from test_report import make_run

from ringtrain import cli
from ringtrain.checkpoint.run_folder import RunLock, is_locked
from ringtrain.config import files
from ringtrain.config.help_texts import COMMON, texts
from ringtrain.config.sections import changed_options
from ringtrain.lab import postmortem, runs
from ringtrain.lab.init import VALUES


def test_init_writes_a_configuration_that_has_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a b" / "new"
    assert cli.main(["init", str(folder)]) == 0
    out = capsys.readouterr().out
    config, job = folder / "config.toml", folder / "job.py"
    assert out.splitlines()[:2] == [str(config), str(job)]
    assert out.endswith("\n  ringtrain train -np 2 --config config.toml\n")
    assert changed_options(files.read_toml(config)) == dict(VALUES)
    text = config.read_text()
    assert max(map(len, text.splitlines())) <= 120
    # As comments: every other common option with its default, and every option's help.
    given = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    assert not changed_options(files.read_toml(config)).keys() - set(VALUES)
    tables = tomllib.loads("\n".join(line for line in given.splitlines() if not line.startswith("#")))
    assert {f"{section}.{key}" for section, table in tables.items() for key in table} == {*COMMON}
    words = " ".join(text.replace("\n# ", " ").split())
    assert all(" ".join(texts()[option].split()) in words for option in COMMON)


@pytest.mark.parametrize("taken", ["config.toml", "job.py"])
def test_init_overwrites_nothing(taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / taken).write_text("mine")
    assert cli.main(["init", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"ringtrain: {tmp_path / taken}: exists already: give another folder, or remove the file\n"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(taken, "mine")]
    assert cli.main(["init", str(tmp_path / taken / "new")]) == 2
    assert capsys.readouterr().err.endswith("cannot be written: Not a directory: give another folder\n")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Four runs, started one after the other: complete, without a summary, hardly begun, and one that is no run."""
    for number, (name, whole) in enumerate({"first": True, "second": False}.items()):
        folder = make_run(tmp_path / "runs" / name, whole=whole)
        os.utime(folder / "config.toml", (number, number))
    (tmp_path / "runs" / "third").mkdir()
    (tmp_path / "runs" / "third" / "config.toml").write_text("")
    os.utime(tmp_path / "runs" / "third" / "config.toml", (9, 9))
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_newest_first(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", str(many)]) == 0
    head, _, *rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.strip()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (head, *rows)]
    assert [row[0] for row in cells] == ["run", "third", "second", "first"]
    columns = "run, state, steps, test accuracy, test loss, accuracy, speed, goodput, ranks, started"
    assert cells[0] == columns.split(", ")
    assert cells[1] == ["third", "killed", "0"]
    assert cells[3][:7] == ["first", "complete", "30", "0.5", "0.3333", "0.65", "2,000 rows/s"]
    assert cells[2][6] == "3,704 rows/s", "the last epoch's, as there is no summary"


def test_runs_as_json_have_all_metrics_and_null_for_nan(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"metrics": {"test_auc": float("nan"), "test_loss": 0.5}, "global_step": 7, "stopped_by": "SIGINT"}
    (many / "third" / "summary.json").write_text(json.dumps(summary))
    assert cli.main(["runs", str(many), "--json"]) == 0
    third, second, _ = json.loads(capsys.readouterr().out)
    assert third["metrics"] == {"test_auc": None, "test_loss": 0.5}
    assert (third["state"], third["global_step"], third["started_s"]) == ("killed", 7, None)
    assert second["metrics"]["test_accuracy"] == 0.5
    assert second["metrics"].keys() == {"loss", "accuracy", "test_loss", "test_accuracy"}


def test_a_run_folders_name_commands_no_terminal(
    many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (many / "third").rename(many / "\x1b[2Jthird")
    (many / "notes").rename(tmp_path / "\x1b]0;notes\x07")
    assert cli.main(["runs", str(many)]) == 0
    assert cli.main(["report", str(many / "\x1b[2Jthird")]) == 0
    assert cli.main(["runs", str(tmp_path / "\x1b]0;notes\x07")]) == 2
    said = "".join(capsys.readouterr())
    assert "\\x1b[2Jthird" in said and "\\x1b]0;notes\\x07: holds no runs" in said
    assert "\x1b" not in said and "\x07" not in said


def test_a_report_is_about_the_newest_run_and_a_folder_without_runs_is_one_line(
    many: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(many.parent)
    os.utime(many / "second" / "config.toml", (99, 99))
    assert cli.main(["report"]) == 0
    assert capsys.readouterr().out == "runs/second/report.html\n"
    monkeypatch.chdir(many)
    for words in (["runs"], ["report"]):
        assert cli.main(words) == 2
        said = f"ringtrain: {many}/runs: holds no runs: change to the directory in which the job was started"
        assert capsys.readouterr().err.startswith(said)
    assert cli.main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_run_whose_lock_is_held_is_running(many: Path) -> None:
    folder = many / "first"
    assert runs.facts_of(runs.read(folder))["state"] == "complete"
    lock = RunLock()
    lock.take(folder)
    assert runs.facts_of(runs.read(folder))["state"] == "running"
    assert is_locked(folder), "asking leaves the lock alone"
    lock.release()
    assert runs.facts_of(runs.read(folder))["state"] == "complete"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([("end", {"exit_code": 0, "stopped_by": "train.patience"})], "complete"),
        ([("end", {"exit_code": 0, "stopped_by": "train.max_time_s"})], "stopped"),
        ([("failure", {}), ("end", {"exit_code": 1})], "failed"),
        ([("failure", {}), ("stall", {})], "stalled"),
        ([], "killed"),
    ],
)
def test_the_state_is_that_of_the_last_start(events: list, state: str) -> None:
    earlier = {"event": "end", "exit_code": 0, "stopped_by": "", "start_s": 1.0, "time_s": 2.0}
    last = [{"event": event, "start_s": 3.0, "time_s": 4.0, **facts} for event, facts in [("start", {}), *events]]
    assert postmortem.state([earlier, *last]) == state
