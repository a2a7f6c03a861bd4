"""A run with a mirror under faults that a seed chooses; see mirrored.py."""

from __future__ import annotations

import pytest
from simulation.mirrored import simulate
from simulation.planted import seeds_to_find, text

from ringtrain.run import lease, mirror

NUM_SCHEDULES = 300
COUNT = 300
"""schedules in which a planted defect is found"""


def test_what_must_hold_does() -> None:
    for seed in range(NUM_SCHEDULES):
        violation = simulate(seed).violation
        assert not violation, f"python tests/simulation/run.py mirrored --seed {seed} --trace: {violation}"


def test_a_seed_is_one_schedule() -> None:
    assert simulate(11, is_traced=True).world.trace == simulate(11, is_traced=True).world.trace
    assert simulate(11, is_traced=True).world.trace != simulate(12, is_traced=True).world.trace


Lease, Mirror = lease.Lease, mirror.Mirror
IS_OLD = "is_old = step < newest or (step == newest and not is_complete)"
DEFECTS = {
    "checkpoints of all jobs in one folder": text(
        Mirror, "_copy_checkpoint", ('name = f"step-{step:08d}-{self.lease.writer}"', 'name = f"step-{step:08d}"')
    ),
    "half a checkpoint is taken for a whole one": text(
        Mirror, "_fetch_checkpoint", ("checkpoint.verify(unfinished)", "pass")
    ),
    "what another job has begun is removed": text(
        Mirror, "_remove_old", (IS_OLD, "is_old = step < newest or not is_complete")
    ),
    "another job's checkpoint of the same step is removed": text(
        Mirror, "_remove_old", (IS_OLD, "is_old = step <= newest")
    ),
    "old ones are removed before the newest is there": text(
        Mirror, "_remove_old", ("if newest not in self._there:", "if newest < 0:")
    ),
    "the oldest in place of the newest": text(Mirror, "fetch", ("step = max(self._there", "step = min(self._there")),
    "a start gives up what was removed meanwhile": text(
        Mirror,
        "fetch",
        (
            'folder / "checkpoints")\n    self._fetch_later',
            'folder / "checkpoints")\n        break\n    self._fetch_later',
        ),
    ),
    "what was incomplete counts as damaged for ever": text(Mirror, "_fetch_whole", ("self._damaged.clear()", "pass")),
    "a lease is taken over at once": text(Lease, "_take", ("while read_s < expiry_s or", "while False and")),
    "a lost lease is not noticed": text(
        Lease, "_check", ("if text and _token(text) not in (self._token, self._earlier):", "if False:")
    ),
    "a job that was frozen goes on writing": text(Lease, "confirm", ("if self.is_lost or", "if True or")),
    "a lease that is not renewed": text(Lease, "_check", ("        self._write()\n", "        pass\n")),
    "a job is not asked again after it was frozen while it asked": text(
        Lease, "confirm", ("self._check()\n", "self._check()\n        break\n")
    ),
    "a lease counts from the answer, not from the question": text(
        Lease, "_others", ("self._confirmed_s = read_s", "self._confirmed_s = time.monotonic()")
    ),
    "a start that is refused because its own write came late": text(
        Lease, "_take", ("if _token(now) == self._token:", "if False:")
    ),
}
FIRST_SEEDS = {
    "another job's checkpoint of the same step is removed": 2700,
    "what another job has begun is removed": 540,
    "what was incomplete counts as damaged for ever": 1_795_870_703_425,
    "a job is not asked again after it was frozen while it asked": 1500,
    "a lease counts from the answer, not from the question": 6700,
    "a start that is refused because its own write came late": 1080,
}
"""near one that finds it, for the time that the tests take"""


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str) -> None:
    assert seeds_to_find(DEFECTS[name], simulate, FIRST_SEEDS.get(name, 0), COUNT)
