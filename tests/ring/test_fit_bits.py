"""Jobs that people bring to `ringtrain.fit` have the same bits on any number of ranks, with virtual ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import sample
from launching import ROOT, run

from ringtrain.protocol.for_script import ForScript

JOBS = ROOT / "tests" / "matrix" / "jobs.py"
TIMEOUT_S = 400
ALL = (
    "sample_weights",
    "tf_data_from_files",
    "py_dataset_with_workers",
    "variational_autoencoder",
    "several_labels",
    "mixed_precision",
)
TRAINED = ("transformer", *(job for job in ALL if sample.is_due(job)))
REFUSED = {
    "adversarial": "several optimizers",
    "inputs_and_outputs_with_masks": "divided by what masks or weights leave",
}


def results(folder: Path, np: int, jobs: tuple[str, ...], **options: object) -> dict[str, str]:
    """Checksum and history of each job, or why it is refused."""
    told = ForScript(by="test", options={"run.directory": str(folder / f"{np}"), **options})
    env = {"RINGTRAIN_FOR_SCRIPT": told.to_json()}
    ended = run(np, [sys.executable, JOBS, *jobs], TIMEOUT_S, env, cwd=folder, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.findall(r"(?:RESULT|REFUSED) (\w+) (\w+ \{[^{}]*\}|train.*)", ended.stdout)
    return dict(found)


def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    virtual = {"train.virtual_ranks": 4}
    alone = results(tmp_path, 0, (*TRAINED, *REFUSED), **virtual)
    for name, reason in REFUSED.items():
        assert reason in alone[name], alone[name]
    for np in (2, 3):
        several = results(tmp_path, np, TRAINED, **virtual)
        assert {name: several[name] for name in TRAINED} == {name: alone[name] for name in TRAINED}
    plan = json.loads((tmp_path / "3" / "transformer" / "summary.json").read_text())
    assert plan["virtual_ranks"] == 4 and plan["num_ranks"] == 3
    # Without virtual ranks, dropout draws other numbers on each rank.
    plain = results(tmp_path, 2, ("transformer",), **{"run.directory": str(tmp_path / "plain")})
    assert plain["transformer"] != alone["transformer"]
