"""ringtrain sweep: side by side, killed and gone on with; with tiny trainings, each under the real launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import BIN, ROOT, run, warm_env

from ringtrain.lab import runs
from ringtrain.monitor import journal

pytestmark = pytest.mark.launch

EPOCHS = 40
TIMEOUT_S = 600  # far above what anything here takes


def command(folder: Path, space: str, *words: object, epochs: int = EPOCHS) -> list[str]:
    (folder / "space.toml").write_text(space)
    own = ["--space", folder / "space.toml", "--sampler", "grid", "--folder", folder / "swept", *words]
    train = ["python", "-m", "ringtrain.train", "--train.epochs", epochs, "--train.batch-size", 16]
    return [str(word) for word in [BIN / "ringtrain", "sweep", *own, "--", *train]]


def epochs_of(run: Path) -> list[int]:
    return [record["epoch"] for record in runs.read(run).epochs]


def starts_of(run: Path) -> list[dict]:
    return [event for event in journal.read(run) if event["event"] == "start"]


def end_when_all_train(argv: list[str], runs: list[Path], number: int = signal.SIGKILL) -> str:
    """Starts a sweep, and signals it as soon as each run has a checkpoint and none is complete.

    Before that, starts it a second time, which is refused.
    """
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **warm_env()}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as sweep:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not all(list(run.glob("checkpoints/step-*")) for run in runs):
                assert sweep.poll() is None and time.monotonic() < deadline, sweep.communicate()[1]
                time.sleep(0.01)
            second = run(0, argv, TIMEOUT_S)
            assert second.returncode == 2 and "another ringtrain sweep works there" in second.stderr, second.stderr
            sweep.send_signal(number)
            _, said = sweep.communicate(timeout=TIMEOUT_S)
        finally:
            sweep.kill()
    assert sweep.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    return said


def test_two_at_once_killed_and_gone_on_with_none_is_lost_and_none_done_twice(tmp_path):
    """One of the four fails. At the end the best two are averaged."""
    folder = tmp_path / "swept"
    runs = [folder / f"trial-{number:04d}" / "fit-1" for number in range(4)]
    space = '"train.batch-size" = [16, 32, 1, 64]\n'
    argv = [*command(tmp_path, space, "-H", "localhost:2"), "--model.micro-batches", "2"]
    said = end_when_all_train(argv, runs[:2])
    assert (
        "trial 0: train.batch_size=16 on localhost:0" in said and "trial 1: train.batch_size=32 on localhost:1" in said
    )
    for one in runs[:2]:
        assert 0 < len(epochs_of(one)) < EPOCHS

    (first, second), ended = runs[:2], run(0, [*argv[:2], "--ensemble", "2", *argv[2:]], TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for one in (first, second):  # both, and at the same time
        then, again = starts_of(one)
        assert again["resumed_from"] and again["global_step"] > 0 and not then["resumed_from"]
        log = (one / "logs" / "rank-0.log").read_text()
        assert "CPU, 1 thread" in log or "GPU" in log or len(os.sched_getaffinity(0)) > 3, log
    times = [[event["time_s"] for event in journal.read(one)] for one in (first, second)]
    assert max(min(each) for each in times) < min(max(each) for each in times)
    for one in (first, second, runs[3]):
        assert epochs_of(one) == [*range(1, EPOCHS + 1)]
    assert len(starts_of(runs[3])) == 1 and not runs[2].exists()

    record = json.loads((folder / "results.json").read_text())["results"]
    assert [one["state"] for one in record["trials"]] == ["complete", "complete", "fail", "complete"]
    assert "model.micro_batches: got 2, expected no more than train.batch_size" in record["trials"][2]["reason"]
    summaries = {one.parent.name: json.loads((one / "summary.json").read_text()) for one in (first, second, runs[3])}
    losses = {name: one["test_loss"] for name, one in summaries.items()}
    best = min(losses, key=lambda name: losses[name])
    assert record["direction"] == "minimize" and f"trial-{record['best']:04d}" == best
    tuned = json.loads((folder / "best.json").read_text())
    assert tuned["options"] == {"train.batch_size": summaries[best]["config"]["train"]["batch_size"]}

    *singles, averaged = record["ensemble"]
    assert [Path(one["run"]).parent.name for one in singles] == sorted(losses, key=lambda name: losses[name])[:2]
    for one in singles:  # each alone is as its own run has it; one process adds in another order
        assert one["accuracy"] == pytest.approx(summaries[Path(one["run"]).parent.name]["test_accuracy"], abs=1e-6)
        assert one["loss"] == pytest.approx(losses[Path(one["run"]).parent.name], rel=1e-4)
    # Cross-entropy is convex: the average of probabilities is never worse than the average of the models.
    assert averaged["loss"] <= sum(one["loss"] for one in singles) / 2 + 1e-12
    assert "all averaged" in ended.stdout

    known = [path.read_bytes() for path in sorted(folder.glob("trial-*/fit-1/logs/journal-*.jsonl"))]
    again = run(0, argv, TIMEOUT_S)
    assert again.returncode == 0 and not re.search(r"trial \d", again.stderr), again.stderr
    assert [path.read_bytes() for path in sorted(folder.glob("trial-*/fit-1/logs/journal-*.jsonl"))] == known
    other = run(0, command(tmp_path, space.replace("64", "65"), "-H", "localhost:2"), TIMEOUT_S)
    assert other.returncode == 2 and "holds a sweep whose space of train.batch_size is" in other.stderr
    (folder / "optuna.db").unlink()  # without which nobody knows what was done
    lost = run(0, command(tmp_path, space, "-H", "localhost:2"), TIMEOUT_S)
    assert lost.returncode == 2 and "without optuna.db" in lost.stderr


SCRIPT = ROOT / "tests" / "ring" / "own_trial.py"


def test_a_script_is_swept_by_arguments_trial_values_and_options_of_fit_and_goes_on_when_killed(tmp_path):
    """The best trial's values then train the same weights in a launch of their own."""
    folder = tmp_path / "swept"
    (tmp_path / "space.toml").write_text("learning-rate = [0.02, 1e-9]\nunits = [3]\n[hvd]\ngroups = [2]\n")
    own = ["--space", tmp_path / "space.toml", "--sampler", "grid", "--folder", folder]
    own += ["--set", "--lr={learning_rate}", "-H", "localhost:2"]
    script = ["python", SCRIPT, "--epochs", EPOCHS]
    argv = [str(word) for word in [BIN / "ringtrain", "sweep", *own, "--", *script]]
    runs = [folder / f"trial-000{number}" / "fit-1" for number in range(2)]
    end_when_all_train(argv, runs)
    ended = run(0, argv, TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads((folder / "results.json").read_text())["results"]
    assert (results["objective"], results["direction"], results["best"]) == ("val_loss", "minimize", 0)
    rates, losses = (0.02, 1e-9), []
    for number, (one, trial, rate) in enumerate(zip(runs, results["trials"], rates, strict=True)):
        assert [bool(start["resumed_from"]) for start in starts_of(one)] == [False, True]
        summary = json.loads((one / "summary.json").read_text())
        assert summary["config"]["optimizer"]["learning_rate"] == pytest.approx(rate)
        assert summary["num_parameters"] == 8 * 3 + 3 + 3 + 1 and summary["config"]["hvd"]["groups"] == 2
        assert (trial["state"], trial["epochs"], trial["value"]) == (
            "complete",
            EPOCHS,
            summary["metrics"]["val_loss"],
        )
        assert (one.parent / "log.csv").read_text().count("\n") == EPOCHS + 1  # not in the script's own folder
        log = (folder / "starts" / f"trial-000{number}.log").read_text()
        assert "hvd.groups from ringtrain sweep" in log
        assert f"learning_rate={rate}, units=3 (from ringtrain sweep)" in log
        losses.append(trial["value"])
    assert losses[0] < losses[1]
    line = next(line for line in ended.stdout.splitlines() if "--tuned" in line)
    assert line.split()[-4:] == [str(SCRIPT), "--epochs", str(EPOCHS), "--lr=0.02"]
    launched = run(0, [BIN / "ringtrain", *line.split()[1:]], TIMEOUT_S, cwd=tmp_path)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    (again,) = (tmp_path / "runs").glob("*/summary.json")
    summaries = [json.loads(path.read_text()) for path in (again, runs[0] / "summary.json")]
    assert summaries[0]["checksum"] == summaries[1]["checksum"]
    assert "learning_rate=0.02, units=3 (from ringtrain sweep, trial 0)" in launched.stdout
