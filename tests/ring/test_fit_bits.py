"""Jobs that people bring to `ringtrain.fit` have the same bits on any number of ranks, with virtual ranks."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import sample
from launching import ROOT, run

from ringtrain.protocol.for_script import ForScript

JOBS = ROOT / "tests" / "matrix" / "jobs.py"
TIMEOUT_S = 1200
ALL = (
    "sample_weights",
    "tf_data_from_files",
    "py_dataset_with_workers",
    "variational_autoencoder",
    "several_labels",
    "mixed_precision",
)
TRAINED = ("transformer", *(job for job in ALL if sample.is_due(job)))
ALL_OF_ONE_PROCESS = {"inputs_and_outputs_with_masks": 2e-4, "weights_that_divide": 1e-5, "half_precision": 1e-5}
"""jobs that are those of one process without virtual ranks, with the distance of their losses; Adam squares the parts
of an embedding's gradient one by one there"""
OF_ONE_PROCESS = {
    job: within for job, within in ALL_OF_ONE_PROCESS.items() if job == "weights_that_divide" or sample.is_due(job)
}
REFUSED = {"adversarial": "several optimizers"}


def results(folder: Path, np: int, jobs: tuple[str, ...], **options: object) -> dict[str, str]:
    """Checksum and history of each job, or why it is refused."""
    told = ForScript(by="test", options={"run.directory": str(folder / f"{np}"), **options})
    env = {"RINGTRAIN_FOR_SCRIPT": told.to_json()}
    ended = run(np, [sys.executable, JOBS, *jobs], TIMEOUT_S, env, cwd=folder, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.findall(r"(?:RESULT|REFUSED) (\w+) (\w+ \{[^{}]*\}|[\w.]+: .*)", ended.stdout)
    return dict(found)


def losses(result: str) -> list[float]:
    """Numbers of a job's history, in the order of their names."""
    history = ast.literal_eval(result.partition(" ")[2])
    return [value for name in sorted(history) for value in history[name]]


def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    virtual = {"train.virtual_ranks": 4}
    trained = (*TRAINED, *OF_ONE_PROCESS)
    alone = results(tmp_path, 0, (*trained, *REFUSED), **virtual)
    for name, reason in REFUSED.items():
        assert reason in alone[name], alone[name]
    for np in (2, 3):
        several = results(tmp_path, np, trained, **virtual)
        assert {name: several[name] for name in trained} == {name: alone[name] for name in trained}
    plan = json.loads((tmp_path / "3" / "transformer" / "summary.json").read_text())
    assert plan["virtual_ranks"] == 4 and plan["num_ranks"] == 3
    # What masks and weights leave divides the losses of whole batches, and no other steps are skipped.
    whole = results(tmp_path, 0, tuple(OF_ONE_PROCESS), **{"run.directory": str(tmp_path / "whole")})
    for name, within in OF_ONE_PROCESS.items():
        assert losses(alone[name]) == pytest.approx(losses(whole[name]), rel=within), name
    # Without virtual ranks, dropout draws other numbers on each rank.
    plain = results(tmp_path, 2, ("transformer",), **{"run.directory": str(tmp_path / "plain")})
    assert plain["transformer"] != alone["transformer"]
