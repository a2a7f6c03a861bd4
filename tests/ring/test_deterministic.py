"""On three ranks, what Horovod happens to fuse changes the order of additions; in deterministic mode nothing does."""

from __future__ import annotations

import pytest
from trained import summary, train

OPTIONS = ["--data.name", "synthetic", "--data.num-samples", "800", "--data.image-size", "8", "--model.name", "cnn"]
OPTIONS += ["--train.epochs", "2", "--train.batch-size", "16"]
# Every gradient is sent as soon as it is there, or all wait for the last: what a busy machine or network makes of it.
SINGLY = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_FUSION_THRESHOLD": "0"}
TOGETHER = {"HOROVOD_CYCLE_TIME": "60"}


@pytest.mark.parametrize("deterministic", [pytest.param(True, marks=pytest.mark.quick), False])
def test_the_same_command_gives_the_same_weights(deterministic, tmp_path):
    """For any timing of the gradients. The control: without the option, the weights differ."""
    options = ["--hvd.deterministic"] if deterministic else []
    checksums = set()
    for name, env in {"singly": SINGLY, "together": TOGETHER}.items():
        train(tmp_path / name, *OPTIONS, *options, np=3, env=env)
        checksums.add(summary(tmp_path / name)["checksum"])
    assert (len(checksums) == 1) is deterministic
