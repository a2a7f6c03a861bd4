"""Compressed gradients in runs: stopped, killed, resumed."""

from __future__ import annotations

from pathlib import Path

from trained import checkpoints, summary, train

from ringtrain.checkpoint import checkpoint

JOB = ["--model.name", "mlp", "--train.epochs", "2", "--train.batch-size", "48", "--checkpoint.every-steps", "4"]
JOB += ["--hvd.compression", "powersgd:2", "--optimizer.accumulation-steps", "2"]


def result(folder: Path) -> dict:
    """Checksum and metrics of a run, and all of its last checkpoint: also what differs between ranks."""
    last = checkpoint.verify(checkpoints(folder)[-1])
    arrays = {file: last.arrays(file) for file in ("state", "ranks")}
    state = {f"{file}/{name}": array.tobytes() for file, of in arrays.items() for name, array in of.items()}
    told = summary(folder)
    return {"checksum": told["checksum"], "test": told["test_accuracy"], "step": told["global_step"]} | state


def test_stopped_and_killed_runs_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Within an update; what a rank has not sent yet is not lost."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert "2 ranks in step" in train(whole, *JOB).stdout
    often = ["--health.agree-every-steps", "1"]
    train(killed, *JOB, *often, "--chaos", "rank=1 step=1 mode=sigterm", code=143)
    assert 1 <= summary(killed)["global_step"] < 10
    train(killed, *JOB, *often, "--chaos", "rank=0 step=11 mode=sigterm", code=143)
    train(killed, *JOB, "--chaos", "rank=1 step=21 mode=sigkill", code=137)
    assert "after step 20," in train(killed, *JOB).stdout
    assert result(killed) == result(whole)
    assert any(name.startswith("ranks/1/") for name in result(killed)), "no state of ranks to lose"
