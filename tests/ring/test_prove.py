"""ringtrain prove lets right jobs pass, and names what is wrong with others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launching import ROOT, run

TIMEOUT_S = 600
PATHS = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
TRAIN = ["python", "-m", "ringtrain.train"]
DATA = ["--data.name", "proved:data"]


def prove(folder: Path, *options: str, code: int = 0) -> tuple[dict[str, tuple[bool | None, str]], str]:
    """Holds and evidence by claim, and the output."""
    words = [
        sys.executable,
        "-m",
        "ringtrain",
        "prove",
        "-np",
        "2",
        "--out",
        "proof.json",
        "--",
    ]
    ended = run(0, [*words, *options], TIMEOUT_S, env={"PYTHONPATH": PATHS}, cwd=folder, warm=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    results = json.loads((folder / "proof.json").read_text())["results"]
    assert all(one["claim"] in ended.stdout for one in results)
    return {one["claim"]: (one["holds"], one["evidence"]) for one in results}, ended.stdout


def test_a_right_job_passes(tmp_path: Path) -> None:
    found, shown = prove(tmp_path, *TRAIN, *DATA, "--model.name", "proved:model")
    assert {holds for holds, _ in found.values()} == {True} and f"{len(found)} of {len(found)} hold" in shown
    assert len(found) == 6


def test_a_random_layer_outside_of_the_seeds_is_named(tmp_path: Path) -> None:
    found, _ = prove(tmp_path, *TRAIN, *DATA, "--model.name", "proved:noisy", code=1)
    (resumed,) = (each for claim, each in found.items() if claim.startswith("stopped, resumed"))
    assert resumed[0] is False and "tf.random" in resumed[1]
    assert found["two equal runs"][0] is found["every sample once in an epoch, on all ranks together"][0] is True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--data.name", "proved:shuffled", "--model.name", "proved:model"], "shuffles or draws without a seed"),
        (
            [*DATA, "--model.name", "proved:model", "--train.callbacks", "proved:on_one_rank"],
            "changes weights on one rank",
        ),
    ],
)
def test_what_only_ranks_show_is_named(options: list[str], reason: str, tmp_path: Path) -> None:
    found, _ = prove(tmp_path, *TRAIN, *options, code=1)
    ((claim, (holds, evidence)),) = found.items()
    assert claim == "the job trains on 2 ranks" and holds is False and reason in evidence


SCRIPT = str(Path(__file__).with_name("proved_script.py"))


def test_a_script_passes_as_it_is(tmp_path: Path) -> None:
    """Its runs are in the folder of the proof, and have another length than the script asks for."""
    found, _ = prove(tmp_path, "python", SCRIPT)
    assert {holds for holds, _ in found.values()} == {True}, found
    assert len(found) == 6
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["prove"]


def test_the_variable_with_which_a_script_gets_out_of_step_is_named(tmp_path: Path) -> None:
    found, _ = prove(tmp_path, "python", SCRIPT, "callback", code=1)
    ((claim, (holds, evidence)),) = found.items()
    assert claim == "the job trains on 2 ranks" and holds is False
    assert "changes weights on one rank" in evidence and "dense" in evidence
