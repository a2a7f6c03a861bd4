"""Parameter servers under the real launcher: what is equal to the ring, what is late, and what is done without."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from launching import ROOT, run, train_each
from PIL import Image

from ringtrain import cli, strategies
from ringtrain.config import Config, StrategyConfig
from ringtrain.errors import ConfigError
from ringtrain.protocol.env import SERVERS
from ringtrain.run.devices import Pinning
from ringtrain.strategies.parameter_server import cluster, server

pytestmark = pytest.mark.launch

STEPS, EPOCHS = 22, 2
OPTIONS = ["--data.name", "digits", "--model.name", "cnn", "--optimizer.clip-norm", "0.5"]
OPTIONS += ["--train.epochs", EPOCHS, "--checkpoint.every-steps", "6", "--checkpoint.keep", "99", "--run.name", "run"]
LIMIT_S = 300


def launch(
    folder: Path,
    *words: object,
    roles: tuple[object, ...] = ("--ps", 2, "--workers", 2),
    slots: int = 4,
    retries: int = 2,
    warm: bool = True,
):
    start = [sys.executable, "-m", "ringtrain", "launch", "-H", f"localhost:{slots}", *roles, "--max-restarts", retries]
    train = [sys.executable, "-m", "ringtrain.train", *OPTIONS, "--run.directory", folder, *words]
    return run(0, [*start, "--", *train], LIMIT_S, warm=warm)


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def saved(folder: Path, step: int) -> str:
    """Checksum of a checkpoint's weights and optimizer."""
    manifest = folder / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    return json.loads(manifest.read_text().partition("\n")[2])["files"]["state.npz"]


def counted(folder: Path, step: int) -> int:
    """Updates, as a checkpoint's optimizer has counted them: the one whole number there."""
    with np.load(folder / "run" / "checkpoints" / f"step-{step:08d}" / "state.npz") as file:
        (number,) = (value.item() for value in file.values() if not value.shape and value.dtype == np.int64)
    return number


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ring")
    ended = launch(folder, roles=("-np", 2), slots=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_all_workers_together_are_the_ring(ring: Path, tmp_path: Path) -> None:
    """On two servers, over restarts after the chief's and a server's death, and from the ring's checkpoint."""
    chaos = "rank=0 step=9 mode=sigkill, rank=1 step=20 mode=sigkill"
    ended = launch(
        tmp_path, "--strategy.name", "ps-sync", "--strategy.variables", "by-size", "--chaos", chaos, warm=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found, of_ring = summary(tmp_path), summary(ring)
    assert found["checksum"] == of_ring["checksum"]
    killed = [f"rank {rank} on {socket.gethostname()} was killed by SIGKILL" for rank in (0, 1)]
    assert [cause.partition(" (")[0] for cause in found["restart_causes"]] == killed
    assert found["metrics"] == pytest.approx(of_ring["metrics"], abs=1e-6)
    assert [saved(tmp_path, step) for step in (6, 24, 44)] == [saved(ring, step) for step in (6, 24, 44)]
    told = found["strategy"]
    assert told["dropped"] == [0, 0] and told["ranks_talk_by"] == "mpi4py" and len(told["servers"]) == 2
    # The largest weight is alone on its server, all others are on the other one.
    largest = 64 * 2 * 2 * 1024 * 4
    assert largest <= max(told["server_bytes"]) < 1.01 * largest and min(told["server_bytes"]) > 0.2 * largest

    shutil.copytree(ring / "run", tmp_path / "cut" / "run")
    for path in (tmp_path / "cut" / "run" / "checkpoints").iterdir():
        if int(path.name[5:]) > 30:
            shutil.rmtree(path)
    words = ["--strategy.name", "ps-sync"]
    ended = launch(tmp_path / "cut", *words, roles=("--ps", 1, "--workers", 2), slots=3, warm=False)  # for its stderr
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "after step 30," in ended.stdout and "2 workers, one copy of the weights: gradients averaged" in ended.stdout
    assert summary(tmp_path / "cut")["checksum"] == of_ring["checksum"]
    (line,) = ended.stderr.splitlines()
    assert "<stderr>" not in ended.stdout and line.endswith(cluster.OPEN_TO_ALL)


@pytest.mark.parametrize("backup", [1, 0])
def test_late_gradients_are_dropped_where_backup_workers_cover_them(tmp_path: Path, backup: int) -> None:
    """The second is the negative control: everybody waits for the slow one."""
    words = ["--strategy.name", "ps-sync", "--strategy.backup-workers", backup, "--chaos", "rank=3 step=1 mode=slow"]
    ended = launch(tmp_path, *words, "--train.batch-size", 64, roles=("--ps", 1, "-np", 4))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = summary(tmp_path)
    told, steps = found["strategy"], found["global_step"]
    assert steps == EPOCHS * (1437 // (64 * (3 - backup)))
    assert sum(told["updates"]) == steps * (3 - backup)
    slow = told["updates"][2]
    if backup:
        assert slow < steps / 2 and told["dropped"][2] > 0
        return
    assert slow == steps and told["dropped"] == [0, 0, 0]
    assert told["waiting"][2] < min(told["waiting"][:2])


def test_a_worker_that_hangs_is_named(tmp_path: Path) -> None:
    words = ["--strategy.name", "ps-sync", "--chaos", "rank=2 step=20 mode=sigstop", "--health.stall-timeout", 4]
    ended = launch(tmp_path, *words, roles=("--ps", 1, "--workers", 2), slots=3, retries=0)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    host, first = socket.gethostname(), ended.stderr[ended.stderr.rindex("ringtrain: rank 0") :]
    assert first.startswith(f"ringtrain: rank 0 on {host} failed first:\nStalled: rank 0 on {host} has made")
    assert "in the wait for gradients of rank 2" in first


def test_a_worker_that_dies_is_done_without_and_taken_back(tmp_path: Path) -> None:
    """Of two workers, the one that stays is so slow that the other one is back before it has done all the work."""
    chaos = "rank=1 step=1 mode=slow seconds=0.25, rank=2 step=20 mode=sigkill"
    words = ["--strategy.name", "ps-async", "--chaos", chaos, "--train.epochs", 4]
    ended = launch(tmp_path, *words, roles=("--ps", 1, "--workers", 2), slots=3, warm=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = summary(tmp_path)
    told, steps = found["strategy"], found["global_step"]
    assert found["restarts"] == 0 and steps == 4 * (1437 // 32) == sum(told["updates"])
    (lost,) = told["workers_lost"]
    assert (lost["rank"], lost["why"]) == (2, "ended by SIGKILL") and lost["back_s"] > lost["lost_s"]
    assert told["updates"][1] > 30  # at its death there were no more than 25, of both
    assert counted(tmp_path, steps) == steps
    assert told["staleness"]["max"] > 0 and found["test_accuracy"] > 0.8
    assert "so nothing is proven equal" in ended.stdout and "equality with ring" in told["not_promised"]


def test_updates_under_way_at_a_stop_are_no_steps_of_the_run(tmp_path: Path) -> None:
    """Three workers without locks: Keras' own way to count would lose updates that come at the same time."""
    words = ["--strategy.name", "ps-async", "--model.name", "mlp", "--chaos", "rank=0 step=60 mode=sigterm"]
    ended = launch(tmp_path, *words, roles=("--ps", 2, "--workers", 3), slots=5)
    assert ended.returncode == 143, ended.stdout + ended.stderr
    stopped, steps = summary(tmp_path)["global_step"], EPOCHS * (1437 // 32)
    assert 60 <= stopped < steps and counted(tmp_path, stopped) >= stopped
    ended = launch(tmp_path, *words, roles=("--ps", 2, "--workers", 3), slots=5)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"after step {stopped}," in ended.stdout and counted(tmp_path, steps) == steps
    # In turns: on one server the two kernels and the number of updates, on the other the two biases and the rate.
    assert summary(tmp_path)["strategy"]["server_bytes"] == [4 * (64 * 100 + 100 * 10) + 8, 4 * (100 + 10) + 4]
    assert "gradient_norm" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_samples_that_a_worker_cannot_read_are_told(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for split, label in itertools.product(("train", "test"), "ab"):
        (tmp_path / "images" / split / label).mkdir(parents=True)
        for number in range(8):
            picture = Image.fromarray(draw.integers(0, 255, (8, 8, 3), np.uint8))
            picture.save(tmp_path / "images" / split / label / f"{number}.png")
    broken = tmp_path / "images" / "train" / "a" / "3.png"
    broken.write_bytes(b"broken")
    words = ["--data.name", "image-folder", "--data.dir", tmp_path / "images", "--data.image-size", 8]
    words += ["--strategy.name", "ps-async", "--model.name", "mlp", "--train.batch-size", 2, "--data.on-error"]
    ended = launch(tmp_path, *words, "skip", roles=("--ps", 1, "--workers", 2), slots=3)
    assert ended.returncode == 0 and summary(tmp_path)["skipped_samples"] == 1, ended.stdout + ended.stderr
    ended = launch(tmp_path / "fail", *words, "fail", roles=("--ps", 1, "--workers", 2), slots=3)
    assert ended.returncode == 2 and "Traceback" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    assert f"on {socket.gethostname()}: {broken}: " in ended.stderr


CANNOT = {
    "--data.name npz --data.file missing.npz": "missing.npz: cannot be read: No such file or directory",
    "--train.batch-size 800": "train.batch_size: got 800, and 2 workers, which are 1600 samples at a time",
    "--seed $OMPI_COMM_WORLD_RANK": "rank 1 has seed 1, rank 0 has 0",
}


@pytest.mark.parametrize("words", CANNOT)
def test_workers_that_cannot_begin_end_the_job_in_one_line(tmp_path: Path, words: str) -> None:
    train = f"exec python -m ringtrain.train {' '.join(map(str, OPTIONS))} --strategy.name ps-async {words}"
    start = [sys.executable, "-m", "ringtrain", "launch", "-H", "localhost:3", "--ps", 1, "--workers", 2]
    ended = run(0, [*start, "--", "bash", "-c", f"{train} --run.directory {tmp_path}"], LIMIT_S, warm=True)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert CANNOT[words] in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_servers_settings_limit_its_memory() -> None:
    settings = tf.compat.v1.ConfigProto()
    server.restrict(settings, Pinning(gpu=2, memory_mb=512))
    (limit,) = settings.gpu_options.experimental.virtual_devices
    assert settings.gpu_options.visible_device_list == "2" and list(limit.memory_limit_mb) == [512]
    assert not settings.gpu_options.allow_growth and not settings.device_count
    server.restrict(none := tf.compat.v1.ConfigProto(), Pinning(num_threads=1))
    assert dict(none.device_count) == {"GPU": 0}


ROLES = {
    ("--ps", "2", "-np", "2"): "got --ps 2 with -np 2: no rank is left to be a worker",
    ("--ps", "2", "--workers", "3", "-np", "4"): "got -np 4 with --ps 2 --workers 3",
    ("--ps", "0", "--workers", "3"): "got --ps 0 --workers 3, expected 1 or more of each",
    ("--ps", "1", "--workers", "3"): "4",  # ranks, but 2 slots
    ("--ps", "1", "--elastic"): "got --ps or --workers with --elastic",
    ("--ps", "1", "--launcher", "horovodrun-gloo"): "whose ranks have no MPI",
}


@pytest.mark.parametrize("words", ROLES)
def test_roles_that_do_not_fit_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "-H", "localhost:2", *words, "--dry-run", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert ROLES[words] in said and said.count("\n") == 1


def test_the_number_of_servers_reaches_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "-H", "localhost:8", "--ps", "2", "--workers", "6", "--dry-run", "--", "true"]) == 0
    said = capsys.readouterr().out
    assert " -np 8 " in said and f"{SERVERS}=2" in said


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.name: ring has no parameter servers"):
        strategies.prepare(Config(), {SERVERS: "1"})
    both = Config(strategy=StrategyConfig("ps-async", servers=3))
    with pytest.raises(ConfigError, match=r"strategy\.servers: got 3, and ringtrain launch --ps 2"):
        strategies.prepare(both, {SERVERS: "2"})


ALONE = {
    ("--strategy.name", "ps-async"): "this is one process alone: ringtrain launch --ps 1",
    ("--strategy.name", "ps-sync", "--train.jit"): "ps-sync has no train.jit True",
}


def test_without_ranks_there_are_no_servers() -> None:
    lines = [(ROOT, *OPTIONS, *words) for words in ALONE]
    for message, ended in zip(ALONE.values(), train_each(lines, LIMIT_S), strict=True):
        assert ended.returncode == 2 and message in ended.stderr and ended.stderr.count("\n") == 1
