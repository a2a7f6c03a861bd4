"""Jobs of `ringtrain.fit` on 2 and 3 ranks in which ranks differ or fail: all others are drawn by tests/fuzz."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sample
from launching import ROOT, run
from one_start import LAUNCH_LIMIT_S, functions_of, run_all

from ringtrain.protocol.cores import count_cores

HERE = Path(__file__).parent
FIRST = {"snippet_jobs.snippet_of_models": {"np": 2, "quick": False}}
"""the configured trainer, which sets the threads of TensorFlow: nothing may have used them before"""
NAMES = FIRST | functions_of([*HERE.glob("*_jobs.py"), HERE / "run_fit.py"])
HANDED_OVER = {"resume_jobs.seeds_go_on_with_another_number_of_ranks"}
"""jobs that 2 ranks begin and 3 continue"""
JOB = """
import keras, numpy as np, ringtrain
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
ringtrain.fit(model, np.ones((32, 4)), np.ones((32, 1)), verbose=0)
"""


def _cases() -> Iterator[Any]:
    """Most are for one number of ranks, to which another one adds nothing; a third of them is due each day.

    Batches of 32 are cut into equal parts on 2 ranks, and unequal ones on 3.
    """
    for np in (2, 3):
        for name, marks in NAMES.items():
            if marks.get("np", np) == np and (marks["quick"] or sample.is_due(name, one_in=3)):
                yield pytest.param(np, name, marks=[pytest.mark.quick] if marks["quick"] else [])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """What is wrong with the selected jobs on so many ranks, which run in one start."""
    folder = tmp_path_factory.mktemp("fit")
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_job"]
    selected = {(item.callspec.params["np"], item.callspec.params["name"]) for item in items}
    selected |= {(2, name) for _, name in selected if name in HANDED_OVER}

    @functools.cache
    def of(np: int) -> dict[str, str]:
        return run_all("mpirun", np, [name for name in NAMES if (np, name) in selected], folder)

    return of


@pytest.mark.parametrize(("np", "name"), [*_cases()])
def test_job(outcomes: Callable[[int], dict[str, str]], np: int, name: str) -> None:
    if name in HANDED_OVER:
        outcomes(2)  # begins it
    wrong = outcomes(np)[name]
    assert not wrong, wrong


def test_the_example_under_the_launcher_and_alone(tmp_path: Path) -> None:
    """The same model on 2 ranks and on 1; started again, the run is complete."""
    python, script = sys.executable, ROOT / "examples" / "own_fit.py"
    for np in (2, 0):
        ended = run(np, [python, script, "--name", f"on-{np}"], LAUNCH_LIMIT_S, cwd=tmp_path, warm=True)
        assert ended.returncode == 0, ended.stderr[-5000:]
        share = f"CPU, {max(1, count_cores()[1] // 2)} thread"
        assert not np or share in ended.stdout  # though the script builds its model before ringtrain.fit
    once_more = run(2, [python, script, "--name", "on-2"], LAUNCH_LIMIT_S, cwd=tmp_path, warm=True)
    assert "complete" in once_more.stdout and "files in runs/on-2" in once_more.stdout
    summaries = [json.loads((tmp_path / f"runs/on-{np}/summary.json").read_text()) for np in (2, 0)]
    assert [one["num_ranks"] for one in summaries] == [2, 1]
    assert summaries[0]["metrics"].keys() == summaries[1]["metrics"].keys()
    for metric, value in summaries[0]["metrics"].items():
        assert value == pytest.approx(summaries[1]["metrics"][metric], rel=0.05), metric


def test_a_rank_with_another_script_is_refused(tmp_path: Path) -> None:
    """As on a host with an older copy."""
    for rank in range(2):
        (tmp_path / f"job{rank}.py").write_text(f"{JOB}print({rank})\n")
    start = ["bash", "-c", f"exec {sys.executable} job$OMPI_COMM_WORLD_RANK.py"]
    ended = run(2, start, LAUNCH_LIMIT_S, cwd=tmp_path)
    assert ended.returncode != 0 and "has another script than rank 0" in ended.stderr, ended.stderr[-3000:]
