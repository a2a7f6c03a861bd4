"""A rank that keeps the others waiting, or is slow, gets a name; under the real launchers, two ranks."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import ROOT, run

from ringtrain import cli
from ringtrain.monitor import journal

HERE = Path(__file__).parent
HOST = socket.gethostname()
STEP = 20
STALLED = 75
TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--run.name", "run"]
LAUNCH = [sys.executable, "-m", "ringtrain", "launch", "-np", "2", "--"]


def train(folder: Path, *options: object, epochs: int = 2, launcher: tuple[str, ...] = (), warm: bool = False):
    words = [*launcher, *TRAIN, "--train.epochs", epochs, "--run.directory", folder, *options]
    environment = {"PYTHONPATH": f"{HERE}:{ROOT}"}
    return run(0 if launcher else 2, [str(word) for word in words], 300, environment, launcher="mpi", warm=warm)


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def waited_s(folder: Path, text: str, begin: str) -> float:
    """Least time without progress before the job was ended: by its report, and by the journals from an event on."""
    events = journal.read(folder / "run")
    begin_s = max(event["time_s"] for event in events if event["event"] == begin)
    end_s = min(event["time_s"] for event in events if event["event"] == "stall")
    said = re.search(r"has made no progress for (\d+) s", text[text.rindex("ringtrain: rank") :])
    assert said
    return min(int(said[1]), end_s - begin_s)


def left_over(folder: Path) -> list[str]:
    """Processes that still have the run's folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and "ringtrain" in words:
            found.append(words)
    return found


@pytest.mark.parametrize(("rank", "launcher"), [(1, "ringtrain"), (0, "horovodrun")])
def test_a_rank_that_is_stopped_is_named(rank: int, launcher: str, tmp_path: Path, capsys) -> None:
    """In the configured trainer, and in a script of one's own with `ringtrain.fit`."""
    if launcher == "ringtrain":
        options = ["--chaos", f"rank={rank} step={STEP} mode=sigstop", "--health.stall-timeout", 5]
        stalled = train(tmp_path, *options, launcher=tuple(LAUNCH))
    else:
        stalled = run(2, [sys.executable, HERE / "stopping_fit.py", tmp_path, str(STEP)], 300, launcher="mpi")
    assert stalled.returncode == STALLED, stalled.stdout + stalled.stderr
    said = f"rank {rank} on {HOST} has made no progress for "
    where = f"at step {STEP}, in callbacks; no heartbeat: its process is stopped"
    assert re.search(rf"{said}\d+ s: {where}.*; rank {1 - rank} waits for it", stalled.stderr)
    assert waited_s(tmp_path, stalled.stderr, begin="fault" if launcher == "ringtrain" else "training") >= 5
    if launcher == "ringtrain":
        last = stalled.stderr.rstrip().splitlines()[-1]
        assert last.startswith(f"ringtrain: rank 1 on {HOST} failed first: Stalled: {said}")
    assert left_over(tmp_path) == []
    events = [event for event in journal.read(tmp_path / "run") if event["event"] == "stall"]
    assert (events[0]["rank"], events[0]["phase"]) == (1 - rank, "reduce")
    assert events[0]["of_ranks"] == [rank]  # if mpirun wakes the other, it may find that this one has left
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "run"), "--post-mortem"]) == 0
    told = capsys.readouterr().out
    assert "started once" in told
    assert f"stalled at step {STEP}: rank {rank} on {HOST}" in " ".join(told.split())


def test_the_stack_of_a_rank_that_hangs_names_the_function(tmp_path: Path) -> None:
    hanging = ["--train.callbacks", "hanging:Hanging", "--health.stall-timeout", 9]
    stalled = train(tmp_path, *hanging, launcher=tuple(LAUNCH))
    assert stalled.returncode == STALLED, stalled.stdout + stalled.stderr
    said = rf"rank 1 on {HOST} has made no progress for \d+ s: at step {STEP}, in callbacks; rank 0 waits for it"
    report = stalled.stderr[stalled.stderr.rindex("failed first") :]
    assert re.search(said, report)
    assert "in wait_for_a_file_that_never_comes" in report
    assert left_over(tmp_path) == []
    events = [event for event in journal.read(tmp_path / "run") if event["event"] == "stall"]
    assert {event["rank"] for event in events} == {0, 1}, "in every rank's journal"
    assert waited_s(tmp_path, stalled.stderr, begin="training") >= 9


def test_a_slow_rank_is_named_while_training_and_nobody_else(tmp_path: Path) -> None:
    slow = train(tmp_path, "--chaos", "rank=1 step=5 mode=slow seconds=0.1", epochs=5, warm=True)
    assert slow.returncode == 0, slow.stderr
    lines = [line for line in slow.stderr.splitlines() if "straggler: " in line]
    assert len(lines) == 1, slow.stderr
    assert re.search(rf"straggler: rank 1 on {HOST} .* of which [\d.]+ ms in callbacks", lines[0])
    at_rank_0, at_rank_1 = summary(tmp_path)["ranks"]
    assert at_rank_1["callbacks_s"] > max(0.1, 2 * at_rank_0["callbacks_s"])
    assert at_rank_0["wait_s"] > 0.05, "less than the 0.1 s that it waits for"
    assert at_rank_0["wait_s"] > 2 * at_rank_1["wait_s"], "the time of the one that waits is not its own"
    (event,) = [event for event in journal.read(tmp_path / "run") if event["event"] == "straggler"]
    assert (event["of_rank"], event["part"]) == (1, "callbacks")
    assert "slow" in slow.stdout[slow.stdout.rindex("epoch 5/5") :], "a table at the end"


def test_a_job_that_is_suspended_for_longer_than_the_stall_timeout_goes_on(tmp_path: Path) -> None:
    words = [*LAUNCH, *TRAIN, "--train.epochs", 200, "--run.directory", tmp_path, "--health.stall-timeout", 4]
    records = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE, text=True, cwd=ROOT) as job:
        try:
            while not (records.exists() and records.read_text()):
                assert job.poll() is None
                time.sleep(0.05)
            family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
            for process in family:
                process.suspend()
            time.sleep(9)
            stopped_at = len(records.read_text().splitlines())
            for process in reversed(family):
                process.resume()
            while len(records.read_text().splitlines()) < stopped_at + 5:
                assert job.poll() is None
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            _, said = job.communicate(timeout=60)
        finally:
            job.kill()
    assert "has made no progress" not in said and "silent" not in said, said
    assert left_over(tmp_path) == []


def test_an_undisturbed_run_names_nobody_and_learns_what_one_without_a_monitor_does(tmp_path: Path) -> None:
    watched = train(tmp_path / "watched", epochs=3, warm=True)
    off = ["--health.stall-timeout", 0, "--health.straggler-factor", 0]
    unwatched = train(tmp_path / "unwatched", *off, epochs=3, warm=True)
    assert watched.returncode == unwatched.returncode == 0, watched.stderr + unwatched.stderr
    assert "progress" not in watched.stderr
    assert "slow" not in watched.stderr + watched.stdout
    assert summary(tmp_path / "watched")["checksum"] == summary(tmp_path / "unwatched")["checksum"]
    events = [event["event"] for event in journal.read(tmp_path / "watched" / "run")]
    assert (events.count("start"), events.count("end")) == (2, 2)
    assert set(events) <= {"start", "training", "save", "end"}
