"""A run that is stopped, killed or damaged ends as if nothing had happened; under the real mpirun, two ranks."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trained
from trained import STEPS_PER_EPOCH, checkpoints, checksums, cut_off, records, summary

EPOCHS = 4
STEPS = EPOCHS * STEPS_PER_EPOCH
COMMON = ["--model.name", "odd_model:dropping", "--train.epochs", EPOCHS]
COMMON += ["--checkpoint.every-steps", "6", "--checkpoint.keep", "100"]


def train(folder: Path, *options: object, **more: Any) -> subprocess.CompletedProcess[str]:
    return trained.train(folder, *COMMON, *options, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    saved = {*range(6, STEPS + 1, 6), *range(STEPS_PER_EPOCH, STEPS + 1, STEPS_PER_EPOCH)}
    assert [path.name for path in checkpoints(folder)] == [f"step-{step:08d}" for step in sorted(saved)]
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("step", [STEPS_PER_EPOCH, STEPS_PER_EPOCH + 8])
def test_a_killed_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path, step: int) -> None:
    """At the end of an epoch and in the middle of one: weights, slots, sample order, dropout, batch statistics."""
    folder = cut_off(whole, tmp_path / "cut", step)
    last = int(checkpoints(folder)[-1].name.removeprefix("step-"))
    finished = train(folder)
    assert f"after step {last}," in finished.stdout
    assert summary(folder)["checksum"] == summary(whole)["checksum"]
    assert checksums(folder, STEPS) == checksums(whole, STEPS), "the ranks' seeds and moving statistics as well"
    assert records(folder) == records(whole), "in the middle of an epoch, metrics go on with what they had seen"


@pytest.mark.parametrize(
    ("number", "rank", "launcher"),
    [(signal.SIGTERM, 1, "mpi"), (signal.SIGTERM, 0, "mpirun"), (signal.SIGUSR1, 0, "mpirun")],
)
def test_a_signal_to_one_rank_saves_one_step_on_all(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, rank: int, launcher: str
) -> None:
    """Under mpirun, and under horovodrun."""
    monkeypatch.setenv("RINGTRAIN_TEST_SIGNAL", f"{rank} {number:d}")
    signals = ["--train.callbacks", "odd_callbacks:Signals"]
    stopped = train(tmp_path, *signals, launcher=launcher, code=128 + number)
    assert f"by {signal.Signals(number).name}" in stopped.stdout
    step = summary(tmp_path)["global_step"]
    assert checkpoints(tmp_path)[-1].name == f"step-{step:08d}"
    assert 26 <= step < STEPS
    train(tmp_path, *signals)
    assert summary(tmp_path)["checksum"] == summary(whole)["checksum"]
    assert checksums(tmp_path, STEPS) == checksums(whole, STEPS), "moving statistics as well"


def test_a_run_goes_on_on_another_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    folder = cut_off(whole, tmp_path / "cut", 2 * STEPS_PER_EPOCH)
    other_batch = train(folder, np=1, code=2)
    assert "was made with global batch (batch_size x ranks) 64, this run has 32" in other_batch.stderr
    train(folder, "--train.batch-size", 64, np=1)
    assert summary(folder)["global_step"] == STEPS
    assert abs(summary(folder)["test_accuracy"] - summary(whole)["test_accuracy"]) < 0.05


def test_a_time_limit_is_a_planned_stop(tmp_path: Path) -> None:
    """At the ranks' first agreement after the limit."""
    train(tmp_path, "--train.max-time-s", "1", "--train.epochs", 10_000)
    assert summary(tmp_path)["stopped_by"] == "train.max_time_s"
    assert summary(tmp_path)["fit_s"] > 1
    assert summary(tmp_path)["global_step"] < 10_000 * STEPS_PER_EPOCH


def test_nan_on_one_rank_ends_all_and_names_it(tmp_path: Path) -> None:
    finished = train(tmp_path, "--chaos", "rank=1 step=7 mode=nan", code=2)
    assert "on rank 1 " in finished.stderr
    assert "at step 8 (epoch 1, batch 8)" in finished.stderr
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000006"], "the one from before the NaN"


@pytest.mark.parametrize(
    ("resume", "name", "message"), [("must", "none", "no checkpoint here"), ("never", "run", "exists already")]
)
def test_a_start_may_have_to_resume_or_not(whole: Path, resume: str, name: str, message: str) -> None:
    refused = train(whole, "--run.resume", resume, "--run.name", name, code=2)
    assert message in refused.stderr


def test_a_run_goes_on_for_longer_unless_its_learning_rate_would_have_been_another(tmp_path: Path) -> None:
    small = ["--train.epochs", 2, "--train.batch-size", 64]
    for schedule, code in (("constant", 0), ("cosine", 2)):
        rule = ["--schedule.name", schedule]
        train(tmp_path / schedule, *small, *rule, np=0)
        longer = train(tmp_path / schedule, *small, *rule, "--train.epochs", 3, np=0, code=code)
        assert ("was made with train.epochs 2, this run has 3" in longer.stderr) is (code == 2)
        assert summary(tmp_path / schedule)["global_step"] == (3 - code // 2) * STEPS_PER_EPOCH
