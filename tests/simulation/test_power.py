"""A run whose machine loses its power at moments that a seed chooses; see power.py."""

from __future__ import annotations

import pytest
from simulation.planted import seeds_to_find, text
from simulation.power import simulate

from ringtrain.checkpoint import checkpoint, durable, run_folder

NUM_SCHEDULES, COUNT = 300, 300


def test_what_must_hold_does() -> None:
    for seed in range(NUM_SCHEDULES):
        violation = simulate(seed).violation
        assert not violation, f"python tests/simulation/run.py power --seed {seed} --trace: {violation}"


FLUSHES = "                os.fsync(file.fileno())\n"
DEFECTS = {
    "files of a checkpoint are not flushed": text(
        checkpoint, "save", (f"                file.flush()\n{FLUSHES}", "                file.flush()\n")
    ),
    "the manifest is not flushed": text(checkpoint, "save", ("            os.fsync(text.fileno())\n", "")),
    "names of a checkpoint's files are not flushed": text(checkpoint, "save", ("durable.flush(unfinished)", "pass")),
    "a new checkpoint's name is not flushed": text(checkpoint, "save", ("durable.flush(folder)", "pass")),
    "the new one is there before it is complete": text(
        checkpoint, "save", ('f"{UNFINISHED}{global_step:08d}-{socket.gethostname()}-{os.getpid()}"', "final.name")
    ),
    "folders above a run are not flushed": text(
        durable, "make_folders", ("        flush(path.parent)\n", "        pass\n")
    ),
    "a run's folder is not flushed": text(run_folder, "create_folder", ("        durable.flush(parent)\n", "")),
    "a file takes its name before its content is flushed": text(
        durable, "write", ("        os.fsync(file.fileno())\n", "")
    ),
    "the name of a file is not flushed": text(durable, "write", ("    flush(path.parent)\n", "")),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str) -> None:
    assert seeds_to_find(DEFECTS[name], simulate, 0, COUNT)
