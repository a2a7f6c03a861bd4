"""What a run that resumes keeps, and what it is refused for."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringtrain.config import CheckpointConfig, Config, HvdConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from ringtrain.derived import derive
from ringtrain.errors import ConfigError
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import from_checkpoint, resume, resume_check, run_folder
from ringtrain.run.checkpoint import Checkpoint

ADASUM = Config(
    optimizer=OptimizerConfig(name="sgd", learning_rate=0.001),
    train=TrainConfig(batch_size=64),
    hvd=HvdConfig(op="adasum"),
)


def saved(config: Config, num_ranks: int, step: int = 20, **numbers: float) -> Checkpoint:
    derived = dataclasses.asdict(derive(config, num_ranks, 10_000, 10)) | numbers
    facts = {"global_step": step, "config": dataclasses.asdict(config), "numbers": derived, "num_ranks": num_ranks}
    return Checkpoint(Path("runs/a/checkpoints/step-00000020"), json.loads(json.dumps(facts)))


def resumes(found: Checkpoint, config: Config, num_ranks: int) -> None:
    resume_check.require_same_run(found, config, derive(config, num_ranks, 10_000, 10))


def replaced(config: Config, section: str, **options) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **options)})


def test_a_restart_with_fewer_ranks_keeps_the_learning_rate():
    for op, rate in (("adasum", 0.002), ("average", 0.016)):
        config = replaced(ADASUM, "hvd", op=op)
        restarted = resume.same_global_batch(config, Attempt(number=1, num_ranks=8), 4)
        assert derive(config, 8, 10_000, 10).learning_rate == derive(restarted, 4, 10_000, 10).learning_rate == rate
        resumes(saved(config, 8), restarted, 4)
        resumes(saved(restarted, 4), config, 8)


@pytest.mark.parametrize("warmup_epochs", [0.0, 5.0])
def test_a_learning_rate_that_follows_the_ranks_is_refused_and_may_be_kept(warmup_epochs):
    config = dataclasses.replace(ADASUM, schedule=ScheduleConfig(warmup_epochs=warmup_epochs))
    fewer = replaced(config, "train", batch_size=128)
    with pytest.raises(ConfigError, match=r"has the learning rate 0\.002.*, this run 0\.004.*keep it with") as refused:
        resumes(saved(config, 8), fewer, 4)
    options = dict(re.findall(r"--([\w.-]+) (none|[\d.e-]+)", str(refused.value)))
    kept = replaced(
        fewer,
        "optimizer",
        learning_rate_scaling=options["optimizer.learning-rate-scaling"],
        learning_rate=float(options["optimizer.learning-rate"]),
    )
    if warmup_epochs:
        kept = replaced(kept, "schedule", warmup_start=float(options["schedule.warmup-start"]))
    resumes(saved(config, 8), kept, 4)


def test_a_run_from_before_adasum_had_its_own_rule_is_refused():
    with pytest.raises(ConfigError, match=r"has the learning rate 0\.016 with 8 ranks, this run 0\.002 with 8: "):
        resumes(saved(replaced(ADASUM, "optimizer", learning_rate_scaling="linear"), 8, learning_rate=0.016), ADASUM, 8)


def test_scalings_are_compared_by_what_they_mean():
    linear, auto = (
        Config(optimizer=OptimizerConfig(name="sgd", learning_rate_scaling=word)) for word in ("linear", "auto")
    )
    resumes(saved(linear, 4), auto, 4)
    resumes(saved(auto, 4), linear, 4)
    adam = replaced(linear, "optimizer", name="adam")
    message = "was made with optimizer.learning_rate_scaling = 'linear', this run has 'sqrt'"
    with pytest.raises(ConfigError, match=message):
        resumes(saved(adam, 4), replaced(adam, "optimizer", learning_rate_scaling="auto"), 4)
    with pytest.raises(ConfigError, match=r"was made with optimizer.learning_rate = 0.001, this run has 0.5"):
        resumes(saved(auto, 4), replaced(auto, "optimizer", learning_rate=0.5), 4)


def test_a_run_is_complete_with_all_that_it_is_to_export(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ringtrain.hvd.rank", lambda: 0)  # Horovod is not started in this process
    monkeypatch.setattr("ringtrain.hvd.on_rank_0", lambda function: function())
    summary = {"global_step": 20, "stopped_by": "", "test_accuracy": 0.5, "started": 0.0, "fit_s": 1.0}
    run_folder.write_summary(tmp_path, summary | {"config": dataclasses.asdict(Config())})
    start = resume.Start(20, str(tmp_path / "checkpoints" / "step-00000020"))
    lock = run_folder.RunLock()
    lock.take(tmp_path)

    def is_complete(**options) -> bool:
        source = SimpleNamespace(is_quiet=False)
        process = SimpleNamespace(config=Config(checkpoint=CheckpointConfig(**options)), lock=lock, source=source)
        return bool(from_checkpoint.complete_summary(process, start, is_trained=True))

    assert not is_complete()
    (tmp_path / "model.keras").write_bytes(b"")
    assert is_complete()


@pytest.mark.parametrize(("step", "num_ranks", "is_refused"), [(20, 4, False), (21, 2, False), (21, 4, True)])
def test_the_number_of_ranks_may_not_change_between_two_updates(step: int, num_ranks: int, is_refused: bool) -> None:
    """Each rank has added gradients of its own."""
    config = replaced(ADASUM, "optimizer", accumulation_steps=4)
    newest = saved(config, 2, step)
    numbers = derive(config, num_ranks, 10_000, 10)
    if not is_refused:
        resume_check.require_whole_update(newest, numbers)
        return
    with pytest.raises(ConfigError, match=r"was made by 2 ranks between two updates .step 21, .*: resume with 2 ranks"):
        resume_check.require_whole_update(newest, numbers)
