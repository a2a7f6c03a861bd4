"""The training job under the real launcher: what it learns, writes, shows, and how it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import launching
import numpy as np
import pytest

from ringtrain.config.sections import Config, DataConfig
from ringtrain.monitor import goodput, journal

TRAIN = [sys.executable, "-m", "ringtrain.train"]
TIMEOUT_S = 600  # far above what anything here takes: for machines with other work to do
CONFIGS = launching.ROOT / "configs"
STEPS = 23
"""of an epoch of digits: 22 batches of 64 rows, and one of 29"""
SMALL = ["--data.name", "synthetic", "--data.num-samples", "408", "--data.image-size", "8", "--train.epochs", "2"]
SUMMARY_KEYS = {
    *("test_accuracy", "test_loss", "images_per_s", "num_ranks", "global_step", "in_sync", "checksum", "versions"),
    *("hosts", "config", "numbers", "started", "fit_s", "check_s", "stopped_by", "resumed_from"),
    *("metrics", "evaluate_s", "saves", "restarts", "restart_causes", "ranks", "strategy"),
    *("num_parameters", "samples", "frozen", "frozen_as_compiled", "on_resume", "own_code", "unlike_one_process"),
}


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def said(ended, stream: str = "stdout") -> list[str]:
    """Lines that ranks wrote, without the launcher's prefix and without its own lines."""
    lines = getattr(ended, stream).splitlines()
    return [line.partition(f"<{stream}>:")[2] for line in lines if f"<{stream}>:" in line]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The main job, at two ranks, and the folder that it was given."""
    folder = tmp_path_factory.mktemp("digits")
    options = ["--config", CONFIGS / "digits.toml", "--run.directory", folder, "--run.name", "main"]
    ended = launching.run(2, [*TRAIN, *options], timeout_s=TIMEOUT_S, launcher="mpi")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended, folder / "main"


@pytest.mark.quick
def test_digits_are_learned_and_the_summary_is_complete(digits):
    _, folder = digits
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["test_accuracy"] > 0.97
    assert summary["num_ranks"] == 2 and len(summary["hosts"]) == 2
    assert summary["in_sync"] is True and len(summary["checksum"]) == 16
    assert summary["global_step"] == summary["numbers"]["num_steps"] == 30 * STEPS
    assert summary["images_per_s"] > 0
    assert {"ringtrain", "tensorflow", "keras", "horovod", "python"} <= set(summary["versions"])


@pytest.mark.quick
def test_files_are_where_they_are_promised(digits):
    _, folder = digits
    steps = 30 * STEPS
    events = {name for name in files_in(folder) if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(events) == 1  # rank 0's alone
    checkpoints = {name for name in files_in(folder) if name.startswith("checkpoints/")}
    kept = sorted({Path(name).parent.name for name in checkpoints})
    assert kept[-3:] == [f"step-{step:08d}" for step in (steps - 2 * STEPS, steps - STEPS, steps)]
    assert len(kept) <= 4  # the newest three and the best
    assert checkpoints == {f"checkpoints/{n}/{f}" for n in kept for f in ("state.npz", "ranks.npz", "manifest.json")}
    assert files_in(folder) - events - checkpoints == {
        *(".lock", "config.toml", "metrics.jsonl", "steps.jsonl", "summary.json", "model.keras"),
        *("logs/rank-0.log", "logs/rank-1.log", "logs/journal-0.jsonl", "logs/journal-1.jsonl"),
    }
    assert [path.name for path in folder.parent.iterdir()] == ["main"]


def test_the_journal_tells_where_the_time_went(digits):
    """The parts add up to the clock; what other files say of saves and steps agrees with them."""
    _, folder = digits
    events = journal.read(folder)
    of_rank_0 = [event for event in events if event["rank"] == 0]
    spent = goodput.of(events)
    assert spent is not None
    assert spent.total_s == pytest.approx(of_rank_0[-1]["time_s"] - of_rank_0[0]["begun_s"], rel=0.01)
    summary = json.loads((folder / "summary.json").read_text())
    assert spent.seconds["save"] == pytest.approx(summary["saves"]["stall_s"], rel=0.5, abs=0.5)
    assert 0 < spent.seconds["steps"] + spent.seconds["input"] < summary["fit_s"]
    assert spent.seconds["repeated"] == spent.seconds["away"] == 0
    assert not any("spent_s" in event for event in events if event["rank"])


def test_tensorboard_and_metrics_have_every_epoch_once(digits):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = digits
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert {"loss", "accuracy", "test_loss", "test_accuracy", "learning_rate", "images_per_s"} <= set(
        events.Tags()["tensors"]
    )
    steps = [STEPS * epoch for epoch in range(1, 31)]
    assert [event.step for event in events.Tensors("test_accuracy")] == steps
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["global_step"] for record in records] == steps


@pytest.mark.quick
def test_terminal_shows_the_proof_last_and_no_chatter(digits):
    ended, folder = digits
    lines = said(ended)
    checksum = json.loads((folder / "summary.json").read_text())["checksum"]
    assert lines[-1] == f"2 ranks in step: gradients averaged, weights and optimizer equal {checksum}"
    assert any(line.startswith("test accuracy") and "%" in line for line in lines)
    assert any(line.startswith("global batch") and "64 = 32 x 2" in line for line in lines)
    assert any(line.startswith("files") and str(folder) in line for line in lines)
    assert {line.partition("]")[0] for line in ended.stdout.splitlines() if line} == {"[1,0"}  # rank 0 alone speaks
    assert said(ended, "stderr") == []
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert all(f"rank {rank} of 2" in log for rank, log in enumerate(logs))


@pytest.mark.quick
def test_exported_model_is_plain_keras_with_the_accuracy_it_was_said_to_have(digits):
    import keras

    from ringtrain import data

    _, folder = digits
    summary = json.loads((folder / "summary.json").read_text())
    model = keras.models.load_model(folder / "model.keras")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    inputs, labels = data.source(DataConfig(name="digits"))().test.nest
    loss, accuracy = model.evaluate(inputs, labels, verbose=0)
    assert accuracy == pytest.approx(summary["test_accuracy"], abs=1e-6)
    assert loss == pytest.approx(summary["test_loss"], abs=1e-5)


@pytest.mark.quick
def test_one_rank_without_launcher(tmp_path):
    ended = launching.run(0, [*TRAIN, *SMALL, "--run.directory", tmp_path], timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("synthetic-20")
    summary = json.loads((folder / "summary.json").read_text())
    last = ended.stdout.splitlines()[-1]
    assert last == f"1 rank: nothing to compare, weights and optimizer {summary['checksum']}"
    assert ended.stderr == ""
    assert (folder / "logs" / "rank-0.log").exists() and summary["num_ranks"] == 1


@pytest.mark.quick
def test_two_ranks_over_gloo_learn_what_one_rank_with_the_big_batch_learns(tmp_path):
    """The whole path: shards, averaged gradients, and evaluation of 51 samples, which two ranks cannot halve."""
    common = [*TRAIN, *SMALL, "--optimizer.learning-rate-scaling", "none", "--run.directory", tmp_path]
    two = [*common, "--train.batch-size", "16", "--run.name", "two"]
    one = [*common, "--train.batch-size", "32", "--run.name", "one"]
    ended = launching.run(2, two, timeout_s=TIMEOUT_S, launcher="gloo", warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert launching.run(0, one, timeout_s=TIMEOUT_S, warm=True).returncode == 0
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for alone, together in zip(*records, strict=True):
        for metric in ("loss", "accuracy", "test_loss", "test_accuracy"):
            assert together[metric] == pytest.approx(alone[metric], abs=2e-5), metric


def test_own_model_and_data_of_the_example(tmp_path):
    own = ["--model.name", "examples.own_model:model", "--data.name", "examples.own_model:data"]
    options = ["--train.epochs", "25", "--schedule.warmup-epochs", "2"]
    options += ["--train.callbacks", "examples.own_callbacks:WeightNorm"]
    folder = ["--run.directory", tmp_path, "--run.name", "own"]
    ended = launching.run(2, [*TRAIN, *own, *options, *folder], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.95 and summary["in_sync"] is True
    records = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["weight_norm"] > records[0]["weight_norm"] > 0
    rates = [record["learning_rate"] for record in records]
    base = Config().optimizer.learning_rate
    assert base < rates[0] < rates[1] < rates[2] == pytest.approx(2**0.5 * base) == pytest.approx(rates[-1])


BAD_INPUT = {
    "unknown model": (["--model.name", "ccn"], "model.name: got ccn, did you mean cnn? "),
    "corrupt data": (
        ["--data.name", "npz", "--data.file", "{folder}/damaged.npz"],
        "{folder}/damaged.npz: not a file of arrays written by numpy.savez: ",
    ),
    "unwritable": (["--run.directory", "/proc/runs"], "/proc/runs/"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_is_written(case, tmp_path):
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    before = files_in(tmp_path)
    options, message = BAD_INPUT[case]
    options = [option.format(folder=tmp_path) for option in options]
    ended = launching.run(0, [*TRAIN, *options], timeout_s=TIMEOUT_S, cwd=tmp_path, warm=True)
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ringtrain: " + message.format(folder=tmp_path))
    assert files_in(tmp_path) == before and not (tmp_path / "runs").exists()


BY_RANK = """
import os, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
from ringtrain.train import main
sys.exit(main({options!r}[rank] + ["--run.directory", {runs!r}]))
"""


@pytest.mark.quick
@pytest.mark.parametrize("case", ["missing data", "another option"])
def test_what_only_one_rank_has_ends_all_and_names_it(case, tmp_path):
    files, runs = (tmp_path / "good.npz", tmp_path / "none.npz"), tmp_path / "runs"
    rows, classes = np.zeros((9, 4, 4), np.uint8), np.arange(9) % 3
    np.savez(files[0], x_train=rows, y_train=classes, x_test=rows, y_test=classes)
    options = [["--data.name", "npz", "--data.file", str(file)] for file in files]
    words = f"rank 1 on {os.uname().nodename}: {tmp_path}/none.npz: cannot be read: No such file"
    if case == "another option":
        options = [["--data.name", "synthetic", "--data.num-samples", number] for number in ("400", "800")]
        words = "rank 1 has data.num_samples 800, rank 0 has 400: "
    program = BY_RANK.format(options=options, runs=str(runs))
    ended = launching.run(2, [sys.executable, "-c", program], timeout_s=TIMEOUT_S, warm=True)
    assert ended.returncode == 2 and not runs.exists()
    (line,) = (line for line in said(ended, "stderr") if line.strip())
    assert line.startswith(f"ringtrain: {words}")
