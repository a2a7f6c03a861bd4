"""Killed anywhere, a job goes on by itself and ends as the run that nothing happened to, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty import NUM_STEPS, final_files, run_in, summary, train
from launching import ROOT

from ringtrain.monitor import goodput, journal

sys.path.append(str(ROOT / "tests" / "cluster"))
from lab import wait_for

KILLS_PER_RUN = 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = train(folder, "")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary(folder)["restarts"] == 0
    return folder


def drawn(draw: random.Random, num_kills: int) -> str:
    """Kills at different steps of one run, each of any rank, a quarter of them of rank 0 while it saves."""
    kills = []
    for step in sorted(draw.sample(range(1, NUM_STEPS), num_kills)):
        saving = draw.random() < 0.25
        kills.append(f"rank={0 if saving else draw.randrange(2)} step={step} mode=sigkill{' during=save' * saving}")
    return ", ".join(kills)


def test_random_kills_change_nothing(undisturbed: Path, tmp_path: Path, count, tally) -> None:
    """The first run has no name: it keeps the one that its first start has found."""
    draw = random.Random(20)
    wanted, restarts, repeated, while_saving, recovery_s = count(6, 100), 0, 0, 0, []
    for number in range(-(-wanted // KILLS_PER_RUN)):
        num_kills = min(KILLS_PER_RUN, wanted - number * KILLS_PER_RUN)
        folder, chaos = tmp_path / str(number), drawn(draw, num_kills)
        unnamed = () if number else ("--run.name", "")
        ended = train(folder, chaos, "--max-restarts", str(num_kills), options=unnamed)
        assert ended.returncode == 0, f"{chaos}\n{ended.stdout}{ended.stderr}"
        assert final_files(folder) == final_files(undisturbed), chaos
        assert summary(folder)["checksum"] == summary(undisturbed)["checksum"], chaos
        events = journal.read(run_in(folder))
        of_rank_0 = [event for event in events if event["rank"] == 0]  # others begin at other times
        kills: dict[int, list[dict]] = {}
        for event in events:
            if event["event"] == "fault":
                kills.setdefault(event["run_start"], []).append(event)
        assert sum(map(len, kills.values())) == num_kills, chaos
        # Two may meet: one inside of a save, which takes place beside the next step, and one after that step.
        assert len(kills) == summary(folder)["restarts"] == len(summary(folder)["restart_causes"]), chaos
        begun = {event["run_start"]: event for event in of_rank_0 if event["event"] == "start"}
        again = {event["run_start"]: event for event in events if event["event"] == "training"}
        for run_start, faults in kills.items():
            repeated += max(fault["global_step"] for fault in faults) - begun[run_start + 1]["global_step"]
            recovery_s.append(again[run_start + 1]["time_s"] - faults[0]["time_s"])
            while_saving += sum(fault["during"] == "save" for fault in faults)
        restarts += len(kills)
        spent = goodput.of(events)
        assert spent is not None and len(spent.attempts) == 1 + len(kills)
        assert begun[0]["launched_s"] <= begun[0]["begun_s"]
        assert spent.total_s == pytest.approx(of_rank_0[-1]["time_s"] - begun[0]["launched_s"], rel=0.01)
        assert min(spent.seconds[part] for part in ("steps", "start")) > 0
    tally(
        f"{wanted} kills at random ({while_saving} of rank 0 inside a save), with restarts",
        f"{restarts} restarts, {repeated} steps repeated, every run ended, all weights as undisturbed, bit for bit;"
        f" from a kill to the first new step {statistics.median(recovery_s):.1f} s"
        f" ({min(recovery_s):.1f} to {max(recovery_s):.1f})",
    )


def test_killed_from_outside_at_any_moment(tmp_path: Path, count, tally) -> None:
    """Restoring, reducing, evaluating, saving or exporting: a model with dropout and batch normalization ends alike."""
    options = ("--model.name", "regular:model", "--train.epochs", "4")
    num_runs, kills_per_run, restarts = count(1, 15), count(2, 2), 0
    ended = train(tmp_path / "undisturbed", "", options=options)
    assert ended.returncode == 0, ended.stderr
    events = journal.read(run_in(tmp_path / "undisturbed"))
    lasted_s = max(e["time_s"] for e in events) - max(e["time_s"] for e in events if e["event"] == "start")
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    for number in itertools.count():  # a moment after a rank's end kills nothing
        if number >= num_runs and (restarts or number == 9):
            break
        folder, what = tmp_path / str(number), f"seed {seed}, run {number}"
        restart = ("--max-restarts", str(kills_per_run))
        with ThreadPoolExecutor() as threads:
            training = threads.submit(train, folder, "", *restart, options=options)
            for start in range(kills_per_run):
                wait_for(lambda: training.done() or len(_ranks(folder, start)) == 2, 120, what)  # noqa: B023
                with contextlib.suppress(TimeoutError):  # a moment of the rest of the run, unless it ends before
                    training.exception(draw.uniform(0, lasted_s))
                if not training.done():
                    # One rank, then the other: the same at the same step twice would end the job.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(_ranks(folder, start)[(number + start) % 2], signal.SIGKILL)
        ended = training.result()
        assert ended.returncode == 0, f"{what}\n{ended.stdout}{ended.stderr}"
        assert summary(folder)["checksum"] == summary(tmp_path / "undisturbed")["checksum"], what
        assert summary(folder)["metrics"] == summary(tmp_path / "undisturbed")["metrics"], what
        restarts += summary(folder)["restarts"]
    assert restarts, "no kill has met a rank"
    tally(f"{number * kills_per_run} kills from outside at any moment, {what}", f"{restarts} restarts, bit for bit")


def _ranks(folder: Path, start: int) -> list[int]:
    """Processes of an attempt, from 0."""
    events = journal.read(run_in(folder)) if folder.is_dir() and any(folder.iterdir()) else []
    return [event["process"] for event in events if event["event"] == "start" and event["run_start"] == start]


@pytest.mark.quick
def test_a_corrupt_checkpoint_a_bug_an_exit_and_a_full_disk_in_one_run(
    undisturbed: Path, tmp_path: Path, tally
) -> None:
    chaos = "step=20 mode=corrupt-checkpoint, rank=1 step=21 mode=exception, step=30 mode=exit, step=38 mode=disk-full"
    ended = train(tmp_path, chaos, "--max-restarts", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # The save of step 18 takes place beside the next steps: it was the newest at step 20, or was not there yet.
    assert ("after step 12, from " in ended.stdout) is ("skipped  " in ended.stdout)
    assert "after step 12, from " in ended.stdout or "after step 18, from " in ended.stdout
    first, second = summary(tmp_path)["restart_causes"]
    assert "rank 1 on " in first and "ChaosError" in first and "(step 21" in first
    assert "rank 0 on " in second and "exit code 1" in second and "(step 30" in second
    (failed,) = summary(tmp_path)["saves"]["failed"]
    assert failed["global_step"] == 42
    assert "step-00000042: cannot be written: No space left on device; training continues" in ended.stderr
    assert final_files(tmp_path) == final_files(undisturbed)
    tally("a corrupt checkpoint, a bug, an exit and a full disk in one run", "as undisturbed, bit for bit")


def test_what_is_restarted_follows_from_its_cause(undisturbed: Path, tmp_path: Path) -> None:
    """One run, started four times: what was asked for and what would happen again is not tried again."""
    faults = ("step=8 mode=sigterm", "step=14 mode=nan", "step=20 mode=exception", "step=26 mode=nan")
    chaos = ", ".join(f"rank=1 {fault}" for fault in faults)
    starts = (
        (143, 0, "not restarted: a rank was asked to stop"),
        (2, 0, "not restarted: the loss would become NaN or infinite again"),
        (2, 1, "not restarted: the loss would become NaN or infinite again"),  # after the exception
    )
    for code, restarts, message in starts:
        ended = train(tmp_path, chaos, "--max-restarts", "3")
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert message in ended.stderr.splitlines()[-1] and ended.stderr.count(" of 3") == restarts
    again = train(tmp_path, chaos, "--max-restarts", "1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert final_files(tmp_path) == final_files(undisturbed)


def test_the_same_step_twice_ends_it(tmp_path: Path) -> None:
    """A bug that a restart does not heal: a callback fails at each start after step 9."""
    ended = train(tmp_path, "", "--max-restarts", "5", options=("--train.callbacks", "bad_luck:at_step_9"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "not restarted: it failed at the same step twice (step 9" in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("restart 1 of 5") == 1 and "restart 2" not in ended.stderr
