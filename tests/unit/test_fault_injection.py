"""Faults are read rightly, happen to the right rank after the right step, and once in the life of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtrain.errors import ConfigError
from ringtrain.monitor.fault_injection import ChaosError, Fault, FaultInjector, parse
from ringtrain.monitor.journal import Journal, read


def test_faults_as_they_are_typed():
    assert parse("") == ()
    assert parse("rank=1 step=20 mode=sigkill") == (Fault("sigkill", rank=1, step=20),)
    assert parse("mode=sigterm epoch=2, mode=slow seconds=0.5 rank=3 step=1") == (
        Fault("sigterm", epoch=2),
        Fault("slow", rank=3, step=1, seconds=0.5),
    )
    assert parse("mode=exit during=save seed=4") == (Fault("exit", during="save", seed=4),)


@pytest.mark.parametrize(
    "text",
    [
        "sigkill",
        "rank=1 step=20",
        "rank=1 mode=kil",
        "rank=one mode=sigkill",
        "step=1 epoch=1 mode=sigkill",
        "rank=1 during=save mode=sigkill",
        "rank=1 mode=disk-full",
    ],
)
def test_what_is_no_fault_is_said(text):
    with pytest.raises(ConfigError, match=rf"^chaos: got '{text}', expected such as"):
        parse(text)


def happens_at(faults, rank, folder, steps=60) -> list[int]:
    """Steps after which mode=exception happens on a rank of a run of 60 steps, 20 in an epoch."""
    (folder / "logs").mkdir(exist_ok=True)
    saboteur = FaultInjector(faults, rank, 60, 20, folder, Journal(folder, rank, 2))
    found = []
    for step in range(1, steps + 1):
        try:
            saboteur.after_step(step, None)
        except ChaosError:
            found.append(step)
    return found


def test_a_fault_happens_to_its_rank_once_in_the_life_of_a_run(tmp_path):
    faults = parse("rank=1 step=7 mode=exception, rank=1 epoch=2 mode=exception")
    assert happens_at(faults, 0, tmp_path) == []
    assert happens_at(faults, 1, tmp_path, steps=10) == [7]
    assert happens_at(faults, 1, tmp_path) == [40]  # started again
    assert happens_at(faults, 1, tmp_path) == []


def test_a_random_step_follows_from_the_seed(tmp_path):
    steps = []
    for seed in range(20):
        (tmp_path / str(seed)).mkdir()
        steps += happens_at(parse(f"mode=exception seed={seed}"), 0, tmp_path / str(seed))
    assert len(steps) == 20 and len(set(steps)) > 5
    (tmp_path / "again").mkdir()
    assert happens_at(parse("mode=exception seed=3"), 0, tmp_path / "again") == [steps[3]]


def test_during_a_save_means_in_the_middle_of_the_next_one(tmp_path):
    (tmp_path / "logs").mkdir()
    for text, error, said in (
        ("step=7 mode=exception during=save", ChaosError, "chaos"),
        ("step=7 mode=disk-full", OSError, "No space left"),
    ):
        saboteur = FaultInjector(parse(text), 0, 60, 20, tmp_path, Journal(tmp_path, 0, 1))
        saboteur.after_step(7, None)
        saboteur.while_saving(6)
        with pytest.raises(error, match=said):
            saboteur.while_saving(8)
        saboteur.while_saving(9)


def test_the_newest_checkpoint_is_corrupted_as_soon_as_there_is_one(tmp_path):
    def state(step: int) -> Path:
        return tmp_path / "checkpoints" / f"step-{step:08d}" / "state.npz"

    saboteur = FaultInjector(parse("step=7 mode=corrupt-checkpoint"), 0, 60, 20, tmp_path, Journal(tmp_path, 0, 1))
    saboteur.after_step(8, None)
    for step in (6, 12):
        state(step).parent.mkdir(parents=True)
        state(step).write_bytes(bytes(100))
    saboteur.after_step(12, None)
    assert state(6).read_bytes() == bytes(100)
    assert state(12).read_bytes() == bytes(50) + b"\1" + bytes(49)
    assert [event["mode"] for event in read(tmp_path)] == ["corrupt-checkpoint"]
