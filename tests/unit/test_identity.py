"""What a run that resumes keeps, and what it is refused for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ringtrain.checkpoint.checkpoint import Checkpoint
from ringtrain.config.derived import derive
from ringtrain.config.sections import Config, HvdConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from ringtrain.errors import ConfigError
from ringtrain.training import identity

ADASUM = Config(
    optimizer=OptimizerConfig(name="sgd", learning_rate=0.001),
    train=TrainConfig(batch_size=64),
    hvd=HvdConfig(op="adasum"),
)


def in_common(config: Config, num_ranks: int) -> dict[str, str]:
    return identity.in_common(config, derive(config, num_ranks, 10_000, 10), {}, ())


def saved(config: Config, num_ranks: int, step: int = 20) -> Checkpoint:
    facts = {"global_step": step, "in_common": in_common(config, num_ranks), "num_ranks": num_ranks}
    return Checkpoint(Path("runs/a/checkpoints/step-00000020"), json.loads(json.dumps(facts)))


def resumes(found: Checkpoint, config: Config, num_ranks: int) -> None:
    identity.require_same(found, in_common(config, num_ranks), config, derive(config, num_ranks, 10_000, 10))


def replaced(config: Config, section: str, **options) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **options)})


def test_a_restart_with_fewer_ranks_keeps_the_learning_rate():
    for op, rate in (("adasum", 0.002), ("average", 0.016)):
        config = replaced(ADASUM, "hvd", op=op)
        restarted = derive(config, 3, 10_000, 10, rows_per_step=8 * 64)
        assert derive(config, 8, 10_000, 10).learning_rate == restarted.learning_rate == rate
        common = identity.in_common(config, restarted, {}, ())
        assert common == in_common(config, 8)


def test_a_learning_rate_that_follows_the_ranks_is_refused_and_may_be_kept():
    fewer = replaced(ADASUM, "train", batch_size=128)
    with pytest.raises(ConfigError, match=r"was made with learning rate 0\.002, this run has 0\.004"):
        resumes(saved(ADASUM, 8), fewer, 4)
    resumes(saved(ADASUM, 8), replaced(fewer, "optimizer", learning_rate_scaling="none", learning_rate=0.002), 4)
    warm = dataclasses.replace(ADASUM, schedule=ScheduleConfig(warmup_epochs=5.0))
    with pytest.raises(ConfigError, match=r"was made with first learning rate"):
        resumes(saved(warm, 8), replaced(warm, "schedule", warmup_start=0.25), 8)


def test_scalings_are_compared_by_what_they_mean():
    linear, auto = (
        Config(optimizer=OptimizerConfig(name="sgd", learning_rate_scaling=word)) for word in ("linear", "auto")
    )
    resumes(saved(linear, 4), auto, 4)
    resumes(saved(auto, 4), linear, 4)
    with pytest.raises(ConfigError, match=r"was made with learning rate 0.004, this run has 2"):
        resumes(saved(auto, 4), replaced(auto, "optimizer", learning_rate=0.5), 4)
    with pytest.raises(ConfigError, match=r"was made with optimizer.momentum 0.9, this run has 0.5"):
        resumes(saved(auto, 4), replaced(auto, "optimizer", momentum=0.5), 4)


@pytest.mark.parametrize(("step", "num_ranks", "is_refused"), [(20, 4, False), (21, 2, False), (21, 4, True)])
def test_the_number_of_ranks_may_not_change_between_two_updates(step: int, num_ranks: int, is_refused: bool) -> None:
    """Each rank has added gradients of its own."""
    config = replaced(replaced(ADASUM, "hvd", op="average"), "optimizer", accumulation_steps=4)
    config = replaced(config, "train", batch_size=64 * 2 // num_ranks)
    newest = saved(replaced(config, "train", batch_size=64), 2, step)
    if not is_refused:
        resumes(newest, config, num_ranks)
        return
    with pytest.raises(ConfigError, match=r"was made by 2 ranks between two updates .step 21, .*: resume with 2 ranks"):
        resumes(newest, config, num_ranks)
