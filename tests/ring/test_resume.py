"""A run that is stopped, killed or damaged ends as if nothing had happened; under the real mpirun, two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import run, train_each

HERE = Path(__file__).parent
EPOCHS = 4
STEPS_PER_EPOCH = 22
COMMON = ["--data.name", "digits", "--checkpoint.every-steps", "6", "--checkpoint.keep", "100", "--run.name", "run"]
TRAIN = [sys.executable, "-m", "ringtrain.train", *COMMON, "--train.epochs", EPOCHS]


def train(
    folder: Path, *options: object, np: int = 2, model: str = "dropping", warm: bool = True, **launch
) -> subprocess.CompletedProcess:
    words = [*TRAIN, "--run.directory", folder, "--model.name", f"odd_model:{model}", *options]
    return run(np, [str(word) for word in words], 600, env={"PYTHONPATH": str(HERE)}, warm=warm, **launch)


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def records(folder: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.endswith("_s")} for line in lines]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "checkpoints").glob("step-*"))


def files_of(folder: Path) -> dict:
    """Checksums of the files of the last checkpoint."""
    manifest = folder / "run" / "checkpoints" / f"step-{EPOCHS * STEPS_PER_EPOCH:08d}" / "manifest.json"
    return json.loads(manifest.read_text().partition("\n")[2])["files"]


def cut_off(whole: Path, folder: Path, step: int) -> Path:
    """The folder of a run that was killed some time after its checkpoint of a step."""
    shutil.copytree(whole, folder)
    for path in checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (folder / "run" / "summary.json").unlink()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    finished = train(folder)
    assert finished.returncode == 0, finished.stderr
    num_steps = EPOCHS * STEPS_PER_EPOCH
    saved = {*range(6, num_steps + 1, 6), *range(STEPS_PER_EPOCH, num_steps + 1, STEPS_PER_EPOCH)}
    assert [path.name for path in checkpoints(folder)] == [f"step-{step:08d}" for step in sorted(saved)]
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("step", [STEPS_PER_EPOCH, STEPS_PER_EPOCH + 8])
def test_a_killed_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path, step: int) -> None:
    """At the end of an epoch and in the middle of one: weights, slots, sample order, dropout, batch statistics."""
    folder = cut_off(whole, tmp_path / "cut", step)
    finished = train(folder)
    assert finished.returncode == 0, finished.stderr
    assert f"after step {int(checkpoints(cut_off(whole, tmp_path / 'again', step))[-1].name[5:])}," in finished.stdout
    assert summary(folder)["checksum"] == summary(whole)["checksum"]
    assert files_of(folder) == files_of(whole), "the ranks' seeds and moving statistics as well"
    assert records(folder) == records(whole), "in the middle of an epoch, metrics go on with what they had seen"


def test_another_seed_ends_elsewhere(whole: Path, tmp_path: Path) -> None:
    """The negative control: were nothing compared, this would pass as well."""
    finished = train(tmp_path, "--seed", 1)
    assert finished.returncode == 0
    assert summary(tmp_path)["checksum"] != summary(whole)["checksum"]


def test_damaged_checkpoints_are_passed_over_by_name(whole: Path, tmp_path: Path) -> None:
    folder = cut_off(whole, tmp_path / "cut", 3 * STEPS_PER_EPOCH)
    *_, good, flipped, truncated, missing = checkpoints(folder)
    data = bytearray((flipped / "state.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (flipped / "state.npz").write_bytes(data)
    os.truncate(truncated / "ranks.npz", 100)
    (missing / "manifest.json").unlink()
    finished = train(folder)
    assert finished.returncode == 0, finished.stderr
    for path in (flipped, truncated, missing):
        assert path.name in finished.stdout
    assert f"from {good}" in finished.stdout
    assert summary(folder)["checksum"] == summary(whole)["checksum"]


@pytest.mark.parametrize(
    ("number", "rank", "launcher"),
    [(signal.SIGTERM, 1, "mpi"), (signal.SIGTERM, 0, "mpirun"), (signal.SIGUSR1, 0, "mpirun")],
)
def test_a_signal_to_one_rank_saves_one_step_on_all(
    whole: Path, tmp_path: Path, number: int, rank: int, launcher: str
) -> None:
    """Under mpirun, and under horovodrun."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    ended = threading.Event()

    def signal_rank() -> None:
        while not ended.wait(0.01):
            if metrics.exists() and metrics.read_text().count("\n") >= 1:
                for process in ranks_of(tmp_path, rank):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                return

    watcher = threading.Thread(target=signal_rank)
    watcher.start()
    try:
        stopped = train(tmp_path, launcher=launcher, warm=launcher == "mpirun")
    finally:
        ended.set()
        watcher.join()
    assert stopped.returncode == 128 + number, stopped.stdout + stopped.stderr
    assert f"by {signal.Signals(number).name}" in stopped.stdout
    step = summary(tmp_path)["global_step"]
    assert checkpoints(tmp_path)[-1].name == f"step-{step:08d}"
    assert 0 < step < EPOCHS * STEPS_PER_EPOCH
    again = train(tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert summary(tmp_path)["checksum"] == summary(whole)["checksum"]
    assert files_of(tmp_path) == files_of(whole), "moving statistics as well"


def test_a_run_goes_on_on_another_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    folder = cut_off(whole, tmp_path / "cut", 2 * STEPS_PER_EPOCH)
    other_batch = train(folder, np=1)
    assert other_batch.returncode == 2
    assert "global batch of 64, this run one of 32" in other_batch.stderr
    finished = train(folder, "--train.batch-size", 64, np=1)
    assert finished.returncode == 0, finished.stderr
    assert summary(folder)["global_step"] == EPOCHS * STEPS_PER_EPOCH
    assert abs(summary(folder)["test_accuracy"] - summary(whole)["test_accuracy"]) < 0.05


def test_a_finished_run_has_nothing_left_to_do(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "copy")
    again = train(folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "complete" in again.stdout and f", after step {EPOCHS * STEPS_PER_EPOCH}\n" in again.stdout
    assert f"raise --train.epochs above {EPOCHS}" in again.stdout
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == {*files, Path("run/.lock")}
    assert all((folder / path).read_bytes() == (whole / path).read_bytes() for path in files)


def test_a_time_limit_is_a_planned_stop(tmp_path: Path) -> None:
    """At the ranks' first agreement after the limit."""
    finished = train(tmp_path, "--train.max-time-s", "1", "--train.epochs", 10_000)
    assert finished.returncode == 0, finished.stderr
    assert summary(tmp_path)["stopped_by"] == "train.max_time_s"
    assert summary(tmp_path)["fit_s"] > 1
    assert summary(tmp_path)["global_step"] < 10_000 * STEPS_PER_EPOCH


def test_checkpoints_by_the_clock_are_made_where_the_ranks_agree(tmp_path: Path) -> None:
    """After each agreement, the first step's included, if six milliseconds have passed; none at the end of epochs."""
    options = ["--checkpoint.every-steps", 0, "--checkpoint.every-epochs", 0, "--health.agree-every-steps", 5]
    finished = train(tmp_path, *options, "--checkpoint.every-minutes", "0.0001", "--train.epochs", 1)
    assert finished.returncode == 0, finished.stderr
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path)]
    assert set(steps) <= {1, 5, 10, 15, 20, 22} and len(steps) > 2
    assert summary(tmp_path)["saves"]["count"] == len(steps)


def test_nan_on_one_rank_ends_all_and_names_it(tmp_path: Path) -> None:
    finished = train(tmp_path, model="nan_on_rank_1")
    assert finished.returncode == 2
    assert "on rank 1 " in finished.stderr
    assert "at step 8 (epoch 1, batch 8)" in finished.stderr
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000006"], "the one from before the NaN"


def test_what_cannot_go_on_is_refused_in_one_line(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "copy")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    cases = [
        (["--run.resume", "must", "--run.name", "none"], "no checkpoint here"),
        (["--optimizer.learning-rate", "0.5"], "was made with optimizer.learning_rate = 0.001"),
        (["--train.batch-size", 32], "so that they are equal, or give the run another --run.name"),
        (["--schedule.name", "cosine", "--run.resume", folder / "run"], "same value, or leave out --run.resume"),
        (["--run.resume", tmp_path / "nowhere"], "no checkpoint here"),
        (["--run.resume", "never"], "exists already"),
    ]
    words = [*TRAIN[3:], "--run.directory", folder, "--model.name"]
    lines = [(HERE, *words, "odd_model:dropping", "--train.batch-size", 64, *options) for options, _ in cases]
    lines += [(HERE, *words, "odd_model:wider", "--run.init-from", folder / "run", "--run.name", "other")]
    messages = [*(message for _, message in cases), "of another model"]
    for message, refused in zip(messages, train_each(lines, 600, {"PYTHONPATH": str(HERE)}), strict=True):
        assert refused.returncode == 2, message
        assert message in refused.stderr
        assert len([line for line in refused.stderr.splitlines() if line.startswith("ringtrain:")]) == 1
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before, "something was written"


def test_a_run_goes_on_for_longer_unless_its_learning_rate_would_have_been_another(tmp_path: Path) -> None:
    small = ["--train.epochs", 2, "--train.batch-size", 64]
    for schedule, code in (("constant", 0), ("cosine", 2)):
        rule = ["--schedule.name", schedule]
        assert train(tmp_path / schedule, *small, *rule, np=0).returncode == 0
        longer = train(tmp_path / schedule, *small, *rule, "--train.epochs", 3, np=0)
        assert longer.returncode == code, longer.stderr
        assert ("was made with train.epochs = 2, this run has 3" in longer.stderr) is (code == 2)
        assert summary(tmp_path / schedule)["global_step"] == (3 - code // 2) * STEPS_PER_EPOCH


def test_a_run_that_is_running_is_not_started_again(tmp_path: Path) -> None:
    options = ["--train.callbacks", "odd_callbacks:StartsTheSameRun", "--train.epochs", 2]
    finished = train(tmp_path, *options, np=0, warm=False)  # it starts its own command
    assert finished.returncode == 0, finished.stderr
    process, code, message = finished.stdout.partition("second start: ")[2].split(" ", 2)
    assert code == "2", message
    assert f"run: in use by process {process} on {socket.gethostname()} since" in message
    assert "choose another --run.name" in message
    assert [record["epoch"] for record in records(tmp_path)] == [1, 2]


def test_weights_alone_are_taken_over(whole: Path, tmp_path: Path) -> None:
    for source in (whole / "run", whole / "run" / "model.keras"):
        name = f"from-{source.name}"
        begun = train(tmp_path, "--run.init-from", source, "--run.name", name, "--train.epochs", 1)
        assert begun.returncode == 0, begun.stderr
        first = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        assert first["test_accuracy"] > records(whole)[0]["test_accuracy"]
        assert first["global_step"] == STEPS_PER_EPOCH


def ranks_of(folder: Path, rank: int) -> list[int]:
    """Processes of one rank of the job that writes into a folder."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            is_rank = f"OMPI_COMM_WORLD_RANK={rank}\0".encode() in environment.read_bytes()
            if is_rank and str(folder).encode() in (environment.parent / "cmdline").read_bytes():
                found.append(int(environment.parent.name))
    return found
