"""The verdict on a run, from its journals; torn and missing ones too."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtrain import cli
from ringtrain.lab.postmortem import verdict
from ringtrain.monitor import journal


def write(folder: Path, start_s: float, rank: int, *events: tuple[str, dict], size: int = 2) -> None:
    own = journal.Journal(folder, rank, size, 0, start_s)
    for event, facts in events:
        own.write(event, **facts)


def run_of_three_starts(folder: Path) -> None:
    shut_down = {"kind": "UnknownError", "text": "Horovod has been shut down", "exit_code": 1}
    write(folder, 1.0, 0, ("start", {"global_step": 0}), ("failure", {**shut_down, "global_step": 9}))
    bug = {"kind": "ValueError", "text": "a bug\nin two lines", "exit_code": 1, "global_step": 8}
    write(folder, 1.0, 1, ("start", {"global_step": 0}), ("failure", bug))
    write(folder, 2.0, 0, ("start", {"global_step": 6}), ("save", {"global_step": 12, "stall_s": 0.1}))
    write(folder, 2.0, 1, ("start", {"global_step": 6}))
    for rank in (0, 1):
        end = {"global_step": 44, "exit_code": 0, "stopped_by": ""}
        write(folder, 3.0, rank, ("start", {"global_step": 12, "resumed_from": "step-12"}), ("end", end))


def test_each_start_has_its_first_cause(tmp_path: Path) -> None:
    run_of_three_starts(tmp_path)
    assert verdict(journal.read(tmp_path)) == [
        "started 3 times, complete",
        f"start 1: failed after step 8: rank 1 on {journal.socket.gethostname()}: ValueError: a bug",
        "start 2: from step 6: broken off without a word after step 12 or later: killed, or its host was",
        "start 3: from step 12: ended after step 44, exit code 0",
    ]


def test_what_is_missing_or_torn_is_no_hindrance(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_of_three_starts(tmp_path)
    whole = journal.path_of(tmp_path, 0)
    whole.write_bytes(whole.read_bytes()[:-20] + b"\xff\n{}\n[]\n17\n")
    journal.path_of(tmp_path, 1).unlink()
    assert verdict(journal.read(tmp_path))[0] == "started 3 times, not complete; no journal of ranks 1"
    assert cli.main(["report", str(tmp_path), "--post-mortem"]) == 0
    assert "global_step 12, stall_s 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("stopped_by", ["SIGTERM", "train.max_time_s"])
def test_a_run_that_was_stopped_is_not_complete(tmp_path: Path, stopped_by: str) -> None:
    write(tmp_path, 1.0, 0, ("end", {"global_step": 7, "exit_code": 0, "stopped_by": stopped_by}), size=1)
    first, second = verdict(journal.read(tmp_path))
    assert first == "started once, not complete"
    assert second.endswith(f"exit code 0, stopped by {stopped_by}")


def test_a_terminal_obeys_nothing_that_a_journal_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A run folder may be shared: another user's journal can hold any text."""
    evil = "\x1b]0;title\x07\x1b[2J\x9b1mÄ\u202e"
    write(tmp_path, 1.0, 0, ("failure", {"kind": evil, "text": f"{evil}\n{evil}", evil: evil}), size=1)
    assert cli.main(["report", str(tmp_path), "--post-mortem"]) == 0
    shown = capsys.readouterr().out
    assert not set(shown) & set("\x1b\x07\x9b\u202e")
    assert r"\x1b]0;title\x07\x1b[2J\x9b1mÄ\u202e" in shown


def test_no_journals_are_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for words in (["report", str(tmp_path), "--post-mortem"], ["report", str(tmp_path / "none"), "--post-mortem"]):
        assert cli.main(words) == 2
        assert "no journals in" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), str(tmp_path), "--post-mortem"]) == 2
    assert "got 2 runs, --post-mortem is about one" in capsys.readouterr().err
