"""Compressed gradients in runs: stopped, killed, resumed; and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching
import pytest

from ringtrain.run import checkpoint

TIMEOUT_S = 300
TRAIN = [sys.executable, "-m", "ringtrain.train", "--data.name", "digits", "--run.directory", ".", "--run.name", "run"]
SHORT = ["--model.name", "mlp", "--train.epochs", "2", "--train.batch-size", "48", "--checkpoint.every-steps", "4"]
POWERSGD = ["--hvd.compression", "powersgd:2", "--hvd.compression-start-step", "2"]
JOB = [*SHORT, *POWERSGD, "--optimizer.accumulation-steps", "2"]


def train(folder: Path, ranks: int, *options: str, code: int = 0) -> str:
    ended = launching.run(ranks, [*TRAIN, *options], TIMEOUT_S, cwd=folder, warm=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def last(folder: Path) -> checkpoint.Checkpoint:
    return checkpoint.verify(max((folder / "run" / "checkpoints").iterdir()))


def result(folder: Path) -> dict:
    """Checksum and metrics of a run, and all of its last checkpoint: also what differs between ranks."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    arrays = {file: last(folder).arrays(file) for file in ("state", "ranks")}
    state = {f"{file}/{name}": array.tobytes() for file, of in arrays.items() for name, array in of.items()}
    return {"checksum": summary["checksum"], "test": summary["test_accuracy"], "step": summary["global_step"]} | state


def test_stopped_and_killed_runs_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Within an update, and before compression starts; what a rank has not sent yet is not lost."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert "2 ranks in step" in train(tmp_path / "whole", 2, *JOB)
    killed = tmp_path / "killed"
    often = ["--health.agree-every-steps", "1"]
    train(killed, 2, *JOB, *often, "--chaos", "rank=1 step=1 mode=sigterm", code=143)
    stopped_at = json.loads((killed / "run" / "summary.json").read_text())["global_step"]
    assert 1 <= stopped_at < 10
    train(killed, 2, *JOB, *often, "--chaos", "rank=0 step=11 mode=sigterm", code=143)
    train(killed, 2, *JOB, "--chaos", "rank=1 step=21 mode=sigkill", code=137)
    assert "after step 20," in train(killed, 2, *JOB)
    assert result(killed) == result(tmp_path / "whole")
    assert any(name.startswith("ranks/1/") for name in result(killed)), "no state of ranks to lose"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hvd.compression", "powersgd"], "expected none, fp16, bf16, powersgd:1"),
        (["--hvd.compression", "powersgd:2", "--hvd.groups", "2"], "does not work with hvd.groups"),
        (["--hvd.compression", "powersgd:2", "--train.virtual-ranks", "4"], "does not work with hvd.compression"),
        (["--hvd.compression", "powersgd:2", "--train.precision", "mixed_float16"], "use mixed_bfloat16"),
        (["--hvd.compression", "powersgd:2", "--hvd.op", "adasum"], "does not work with hvd.op adasum"),
        (["--hvd.compression", "powersgd:2", "--strategy.name", "mpi-ring"], "hvd.compression"),
    ],
)
def test_what_does_not_work_together_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    assert message in train(tmp_path, 0, *options, code=2)
