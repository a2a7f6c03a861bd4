"""What ends a run or slows it down is a decision of all ranks; and what users add to a run sees all ranks' metrics."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from trained import STEPS_PER_EPOCH, records, summary, train

from ringtrain.monitor import journal

HERE = Path(__file__).parent


@pytest.mark.parametrize(("callback", "epochs"), [("StopsAfterSecondEpoch", 2), ("StopsInTheMiddle", 1)])
def test_a_callback_that_stops_one_rank_stops_all_after_the_same_step(callback, epochs, tmp_path):
    """With such callbacks, ranks agree after each step. Were it left to Keras, the other rank would wait for ever.

    The epoch under way ends, as in Keras.
    """
    step = epochs * STEPS_PER_EPOCH
    train(tmp_path, "--train.callbacks", f"odd_callbacks:{callback}", "--train.epochs", 5)
    assert summary(tmp_path)["stopped_by"] == "a callback"
    assert summary(tmp_path)["global_step"] == step
    assert summary(tmp_path)["in_sync"] is True
    assert [record["epoch"] for record in records(tmp_path)] == [*range(1, epochs + 1)]
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").is_dir()


def test_patience_ends_all_ranks_and_a_run_that_has_ended_so_stays_ended(tmp_path):
    """The ranks see other values of the monitor: rank 1's gets better all the time."""
    options = ["--train.patience", 2, "--train.epochs", 9, "--train.callbacks", "odd_callbacks:LocalMonitor"]
    train(tmp_path, *options)
    assert summary(tmp_path)["stopped_by"] == "a callback"
    assert [record["epoch"] for record in records(tmp_path)] == [1, 2, 3]
    checksum = summary(tmp_path)["checksum"]
    train(tmp_path, *options)
    assert summary(tmp_path)["global_step"] == 3 * STEPS_PER_EPOCH
    assert summary(tmp_path)["checksum"] == checksum


def test_steps_are_written_down(tmp_path):
    train(tmp_path, "--tracking.every-steps", 8, "--train.epochs", 1)
    steps = records(tmp_path, "steps.jsonl")
    assert [step["global_step"] for step in steps] == [8, 16]
    assert all(step["loss"] > 0 for step in steps)


@pytest.mark.parametrize(("batch", "every_steps", "step"), [(-1, 500, 1), (6, 5, 11), (STEPS_PER_EPOCH - 1, 500, 23)])
def test_a_rank_that_gets_out_of_step_ends_all_and_is_named(batch, every_steps, step, tmp_path, monkeypatch):
    """After the first step, every so many, and at the end."""
    monkeypatch.setenv("RINGTRAIN_TEST_CHANGED_AFTER", str(batch))
    checked = ["--train.check-every-steps", every_steps, "--train.epochs", 1 if step == STEPS_PER_EPOCH else 9]
    ended = train(tmp_path, "--train.callbacks", "odd_callbacks:ChangesAWeight", *checked, code=2)
    failures = [event for event in journal.read(tmp_path / "run") if event["event"] == "failure"]
    assert {event["global_step"] for event in failures} == {step}
    (line,) = [line for line in ended.stderr.splitlines() if "ringtrain:" in line]
    assert "ranks out of step: rank 1 differs in" in line and "/kernel" in line
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()] or step == STEPS_PER_EPOCH, "saved before the last check"


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """After a single one, training ends with the step, and writes the summary."""
    train(tmp_path, "--train.callbacks", "odd_callbacks:InterruptsTwice", np=0, code=128 + signal.SIGINT)
    assert not (tmp_path / "run" / "summary.json").exists()
