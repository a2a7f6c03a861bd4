"""What ends a run or slows it down is a decision of all ranks; and what users add to a run sees all ranks' metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import run, train_each

from ringtrain.monitor import journal

HERE = Path(__file__).parent
TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--run.name", "run"]
ENV = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
STEPS_PER_EPOCH = 22


def train(folder: Path, *options: object, np: int = 2, warm: bool = True, **launch) -> subprocess.CompletedProcess:
    words = [*TRAIN, "--run.directory", folder, *options]
    return run(np, [str(word) for word in words], 600, env=ENV, warm=warm, **launch)


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


@pytest.mark.parametrize(("callback", "epochs"), [("StopsAfterSecondEpoch", 2), ("StopsInTheMiddle", 1)])
def test_a_callback_that_stops_one_rank_stops_all_after_the_same_step(callback, epochs, tmp_path):
    """With such callbacks, ranks agree after each step. Were it left to Keras, the other rank would wait for ever.

    The epoch under way ends, as in Keras.
    """
    step = epochs * STEPS_PER_EPOCH
    ended = train(tmp_path, "--train.callbacks", f"odd_callbacks:{callback}", "--train.epochs", 5)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary(tmp_path)["stopped_by"] == "a callback"
    assert summary(tmp_path)["global_step"] == step
    assert summary(tmp_path)["in_sync"] is True
    assert [record["epoch"] for record in records(tmp_path)] == [*range(1, epochs + 1)]
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").is_dir()


def test_patience_ends_all_ranks_and_a_run_that_has_ended_so_stays_ended(tmp_path):
    """The ranks see other values of the monitor: rank 1's gets better all the time."""
    options = ["--train.patience", 2, "--train.epochs", 9, "--train.callbacks", "odd_callbacks:LocalMonitor"]
    ended = train(tmp_path, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 epochs without a better test_loss" in ended.stdout
    assert summary(tmp_path)["stopped_by"] == "train.patience"
    assert [record["epoch"] for record in records(tmp_path)] == [1, 2, 3]
    checksum = summary(tmp_path)["checksum"]
    again = train(tmp_path, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert summary(tmp_path)["global_step"] == 3 * STEPS_PER_EPOCH
    assert summary(tmp_path)["checksum"] == checksum


def test_steps_are_written_down_with_the_gradients_norm(tmp_path):
    """Two ranks' averaged gradient is as long as that of one rank with the big batch; histograms on request."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["--tracking.every-steps", 8, "--tracking.histograms", "--train.epochs", 1]
    options += ["--optimizer.learning-rate-scaling", "none", "--optimizer.clip-norm", 0.001]
    norms = []
    for name, np, batch in (("two", 2, 32), ("one", 0, 64)):
        ended = train(tmp_path / name, *options, "--train.batch-size", batch, np=np)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        steps = records(tmp_path / name, "steps.jsonl")
        assert [step["global_step"] for step in steps] == [8, 16]
        norms.append([step["gradient_norm"] for step in steps])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert min(norms[0]) > 0.01, "before clipping"
    events = EventAccumulator(str(tmp_path / "two" / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert {"steps/gradient_norm", "steps/loss", "gradient_norm"} <= set(events.Tags()["tensors"])
    assert any(tag.endswith("/kernel") for tag in events.Tags()["tensors"])


@pytest.mark.parametrize(("batch", "every_steps", "step"), [(-1, 500, 1), (6, 5, 11), (STEPS_PER_EPOCH - 1, 500, 22)])
def test_a_rank_that_gets_out_of_step_ends_all_and_is_named(batch, every_steps, step, tmp_path, monkeypatch):
    """After the first step, every so many, and at the end."""
    monkeypatch.setenv("RINGTRAIN_TEST_CHANGED_AFTER", str(batch))
    checked = ["--train.check-every-steps", every_steps, "--train.epochs", 1 if step == STEPS_PER_EPOCH else 9]
    ended = train(tmp_path, "--train.callbacks", "odd_callbacks:ChangesAWeight", *checked, warm=step != 11)
    assert ended.returncode == 2
    failures = [event for event in journal.read(tmp_path / "run") if event["event"] == "failure"]
    assert {event["global_step"] for event in failures} == {step}
    (line,) = [line for line in ended.stderr.splitlines() if "ringtrain:" in line]
    assert "ranks out of step: rank 1 differs in" in line and "/kernel" in line
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()] or step == STEPS_PER_EPOCH, "saved before the last check"


def test_what_cannot_be_watched_or_called_is_one_line(tmp_path):
    cases = {
        ("--train.monitor", "test_los"): "train.monitor: got test_los, did you mean test_loss?",
        ("--train.callbacks", "early"): "train.callbacks: got early, expected module:function",
        (
            "--train.callbacks",
            "odd_callbacks:no_callback",
        ): "odd_callbacks:no_callback returned ndarray, expected a Keras",
        ("--model.metrics", "top5"): "model.metrics: got top5, did you mean top-5?",
        (
            "--model.metrics",
            "odd_callbacks:no_callback",
        ): "odd_callbacks:no_callback returned ndarray, expected a Keras",
    }
    lines = [(tmp_path, *TRAIN[3:], "--run.directory", tmp_path / "runs", *options) for options in cases]
    for message, refused in zip(cases.values(), train_each(lines, 600, ENV), strict=True):
        assert refused.returncode == 2, refused.stderr
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("ringtrain:")]
        assert message in line
    assert not (tmp_path / "runs").exists()


def test_on_a_full_disk_training_goes_on_and_the_checkpoint_before_stays(tmp_path):
    """No room for the third checkpoint nor for what follows: told at once, and once more by the last, which must be."""
    if os.getuid():
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", disk]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode and not os.environ.get("RINGTRAIN_REQUIRE_LAB"):
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    assert mounted.returncode == 0, mounted.stderr
    try:
        ended = train(disk, "--train.epochs", 9, "--checkpoint.keep", 100, warm=False)
        names = sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    *others, last = [line for line in ended.stderr.splitlines() if "ringtrain:" in line]
    assert others and all("No space left on device; training continues" in line for line in others)
    assert f"step-{9 * STEPS_PER_EPOCH:08d}: cannot be written: No space left on device; earlier" in last
    assert "epoch 9/9" in ended.stdout
    assert names and names[0] == f"step-{STEPS_PER_EPOCH:08d}"
    assert all(name.startswith("step-") for name in names), "nothing half done is left"


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """The first one waits for the ranks' agreement, which is a long epoch away here."""
    ended = threading.Event()

    def interrupt() -> None:
        log, sent = tmp_path / "run" / "steps.jsonl", 0
        while sent < 2 and not ended.wait(0.01):
            if log.exists() and log.read_text().count("\n") > 2 * sent:
                os.kill(process_of(tmp_path), signal.SIGINT)
                sent += 1

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    options = ["--data.num-samples", 400000, "--data.image-size", 4, "--health.agree-every-steps", 10**6]
    try:
        stopped = train(tmp_path, "--data.name", "synthetic", *options, "--tracking.every-steps", 10, np=0, warm=False)
    finally:
        ended.set()
        watcher.join()
    assert stopped.returncode == 128 + signal.SIGINT
    assert len(records(tmp_path, "steps.jsonl")) >= 2, "the first one let training go on"
    assert not (tmp_path / "run" / "summary.json").exists()


def process_of(folder: Path) -> int:
    """The process that trains into a folder."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and b"ringtrain.train" in words:
            return int(command.parent.name)
    raise ProcessLookupError(folder)


def test_a_script_whose_ranks_wait_for_different_things_ends_and_names_them():
    """Rank 0 is done with its epoch and averages metrics, rank 1 has a batch more.

    Before, rank 0 has evaluated in a graph for longer than the limit, while rank 1 waited: that ended nothing.
    """
    finished = run(2, [sys.executable, HERE / "hanging.py"], 120, env={"RINGTRAIN_STALL_TIMEOUT": "3"}, warm=True)
    assert finished.returncode == 75, finished.stderr
    host = socket.gethostname()
    (warning,) = [line for line in finished.stderr.splitlines() if "the other ranks have waited" in line]
    assert f"rank 0 on {host}: in a TensorFlow graph at {HERE}/hanging.py:" in warning
    assert f"rank 0 on {host}: in allreduce ringtrain_metric_average at {HERE}/hanging.py:" in finished.stderr
    assert "after epoch 1, batch 5" in finished.stderr
    assert f"rank 1 on {host}: in the reduction of gradients at {HERE}/hanging.py:" in finished.stderr
    assert "in epoch 1, batch 6" in finished.stderr


def test_an_interrupt_while_libraries_load_ends_the_process_without_a_traceback() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "ringtrain.train", "--data.name", "digits"]
    with subprocess.Popen(words, cwd=HERE.parents[1], stderr=subprocess.PIPE, text=True) as process:
        loading = next(line for line in process.stderr if line.rstrip().endswith(" numpy"))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert loading and process.returncode == -signal.SIGINT
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest
