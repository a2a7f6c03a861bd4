"""Faults are read rightly, happen to the right rank after the right step, and once in the life of a run."""

from __future__ import annotations

import pytest

from ringtrain.errors import ConfigError
from ringtrain.monitor.fault_injection import ChaosError, Fault, FaultInjector, parse
from ringtrain.monitor.journal import Journal


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
