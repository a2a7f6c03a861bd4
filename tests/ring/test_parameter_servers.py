"""Parameter servers under the real launcher: what is equal to the ring, what is late, and what is done without."""

from __future__ import annotations

import math
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import run
from trained import checksums, cut_off, summary

from ringtrain import strategies
from ringtrain.config.sections import Config, StrategyConfig
from ringtrain.errors import ConfigError
from ringtrain.protocol.env import SERVERS
from ringtrain.strategies.parameter_server import cluster

pytestmark = pytest.mark.launch

STEPS, EPOCHS = 23, 2
OPTIONS = ["--data.name", "digits", "--model.name", "cnn", "--optimizer.clip-norm", "0.5"]
OPTIONS += ["--train.epochs", EPOCHS, "--checkpoint.every-steps", "6", "--checkpoint.keep", "99", "--run.name", "run"]
LIMIT_S = 300


def launch(
    folder: Path,
    *words: object,
    roles: tuple[object, ...] = ("--ps", 2, "-np", 4),
    slots: int = 4,
    warm: bool = True,
):
    start = [sys.executable, "-m", "ringtrain", "launch", "-H", f"localhost:{slots}", *roles, "--max-restarts", 2]
    train = [sys.executable, "-m", "ringtrain.train", *OPTIONS, "--run.directory", folder, *words]
    return run(0, [*start, "--", *train], LIMIT_S, {"PYTHONPATH": str(Path(__file__).parent)}, warm=warm)


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
    ended = launch(tmp_path, "--strategy.name", "ps-sync", "--chaos", chaos, warm=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found, of_ring = summary(tmp_path), summary(ring)
    assert found["checksum"] == of_ring["checksum"]
    killed = [f"rank {rank} on {socket.gethostname()} was killed by SIGKILL" for rank in (0, 1)]
    assert [cause.partition(" (")[0] for cause in found["restart_causes"]] == killed
    assert found["metrics"] == pytest.approx(of_ring["metrics"], abs=1e-6)
    for step in (6, 24, 46):
        assert checksums(tmp_path, step)["state.npz"] == checksums(ring, step)["state.npz"]
    told = found["strategy"]
    assert told["dropped"] == [0, 0] and told["ranks_talk_by"] == "mpi4py" and len(told["servers"]) == 2

    cut_off(ring, tmp_path / "cut", 30)
    words = ["--strategy.name", "ps-sync"]
    ended = launch(tmp_path / "cut", *words, roles=("--ps", 1, "-np", 3), slots=3, warm=False)  # for its stderr
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "after step 30," in ended.stdout and "2 workers, one copy of the weights: gradients averaged" in ended.stdout
    assert summary(tmp_path / "cut")["checksum"] == of_ring["checksum"]
    (line,) = ended.stderr.splitlines()
    assert "<stderr>" not in ended.stdout and line.endswith(cluster.OPEN_TO_ALL)


def test_a_nest_of_inputs_trains_as_in_the_ring(tmp_path: Path) -> None:
    pairs = ["--data.name", "odd_model:pairs", "--model.name", "odd_model:of_pairs", "--optimizer.clip-norm", "0"]
    servers = {"ring": (("-np", 2), 2), "ps-sync": (("--ps", 1, "-np", 3), 3)}
    found = {}
    for name, (roles, slots) in servers.items():
        ended = launch(tmp_path / name, *pairs, "--strategy.name", name, roles=roles, slots=slots)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found[name] = summary(tmp_path / name)
    assert found["ps-sync"]["checksum"] == found["ring"]["checksum"]
    assert found["ps-sync"]["metrics"] == pytest.approx(found["ring"]["metrics"], abs=1e-5)


@pytest.mark.parametrize("backup", [1, 0])
def test_late_gradients_are_dropped_where_backup_workers_cover_them(tmp_path: Path, backup: int) -> None:
    """The second is the negative control: everybody waits for the slow one."""
    words = ["--strategy.name", "ps-sync", "--strategy.backup-workers", backup, "--chaos", "rank=3 step=1 mode=slow"]
    ended = launch(tmp_path, *words, "--train.batch-size", 64, roles=("--ps", 1, "-np", 4))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = summary(tmp_path)
    told, steps = found["strategy"], found["global_step"]
    assert steps == EPOCHS * math.ceil(1437 / (64 * (3 - backup)))
    assert sum(told["updates"]) == steps * (3 - backup)
    slow = told["updates"][2]
    if backup:
        assert slow < steps / 2 and told["dropped"][2] > 0
        return
    assert slow == steps and told["dropped"] == [0, 0, 0]
    assert told["waiting"][2] < min(told["waiting"][:2])


def test_a_worker_that_dies_is_done_without_and_taken_back(tmp_path: Path) -> None:
    """Of two workers, the one that stays is so slow that the other one is back before it has done all the work."""
    chaos = "rank=1 step=1 mode=slow seconds=0.25, rank=2 step=20 mode=sigkill"
    words = ["--strategy.name", "ps-async", "--chaos", chaos, "--train.epochs", 4]
    ended = launch(tmp_path, *words, roles=("--ps", 1, "-np", 3), slots=3, warm=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = summary(tmp_path)
    told, steps = found["strategy"], found["global_step"]
    assert found["restarts"] == 0 and steps == 4 * math.ceil(1437 / 32) == sum(told["updates"])
    (lost,) = told["workers_lost"]
    assert (lost["rank"], lost["why"]) == (2, "ended by SIGKILL") and lost["back_s"] > lost["lost_s"]
    assert told["updates"][1] > 30  # at its death there were no more than 25, of both
    assert counted(tmp_path, steps) == steps
    assert told["staleness"]["max"] > 0 and found["test_accuracy"] > 0.8
    assert "so nothing is proven equal" in ended.stdout and "equality with ring" in told["not_promised"]


def test_updates_under_way_at_a_stop_are_no_steps_of_the_run(tmp_path: Path) -> None:
    """Three workers without locks: Keras' own way to count would lose updates that come at the same time."""
    words = ["--strategy.name", "ps-async", "--model.name", "mlp", "--chaos", "rank=0 step=60 mode=sigterm"]
    ended = launch(tmp_path, *words, roles=("--ps", 2, "-np", 5), slots=5)
    assert ended.returncode == 143, ended.stdout + ended.stderr
    stopped, steps = summary(tmp_path)["global_step"], EPOCHS * math.ceil(1437 / 32)
    assert 60 <= stopped < steps and counted(tmp_path, stopped) >= stopped
    ended = launch(tmp_path, *words, roles=("--ps", 2, "-np", 5), slots=5)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"after step {stopped}," in ended.stdout and counted(tmp_path, steps) == steps


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.name: ring has no parameter servers"):
        strategies.prepare(Config(), {SERVERS: "1"})
    both = Config(strategy=StrategyConfig("ps-async", servers=3))
    with pytest.raises(ConfigError, match=r"strategy\.servers: got 3, and ringtrain launch --ps 2"):
        strategies.prepare(both, {SERVERS: "2"})
