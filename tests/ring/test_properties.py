"""Everything ringtrain.hvd promises, under the real horovodrun: many properties in one start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sample
from one_start import functions_of, run_all

LAUNCHES = {("mpi", 2): 2, ("mpi", 3): 4, ("gloo", 2): 4}
"""of which one in so many properties is due each day; 2 ranks over MPI show what the others do"""
PROPERTIES = functions_of(Path(__file__).parent.glob("properties/*.py"))
# Modules whose properties are about Keras and files rather than about what carries the gradients, and between how many;
# and those that are about the number of ranks, but not about what carries the gradients.
OVER_MPI_ON_2_RANKS = ("callbacks", "custom_loops", "optimizers", "saving")
OVER_MPI = (*OVER_MPI_ON_2_RANKS, "batch_norm", "precision")


def _applies(name: str, launcher: str, np: int) -> bool:
    marks = PROPERTIES[name]
    if (launcher == "gloo" and name.startswith(OVER_MPI)) or (np != 2 and name.startswith(OVER_MPI_ON_2_RANKS)):
        return False
    if marks == {"quick": False} and not sample.is_due(f"{name} {launcher}", LAUNCHES[launcher, np]):
        return False
    return marks.get("np", np) == np and marks.get("launcher", launcher) == launcher


def _cases() -> Iterator[Any]:
    for launcher, np in LAUNCHES:
        for name, marks in PROPERTIES.items():
            if _applies(name, launcher, np):
                yield pytest.param(launcher, np, name, marks=[pytest.mark.quick] if marks["quick"] else [])


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], dict[str, str]]:
    """What is wrong with the properties that were selected for a launch, all of which it runs in one start."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    @functools.cache
    def of(launcher: str, np: int) -> dict[str, str]:
        cases = [(one.get("launcher"), one.get("np"), one.get("name")) for one in selected]
        names = [name for name in PROPERTIES if (launcher, np, name) in cases]
        return run_all(launcher, np, names, tmp_path_factory.mktemp(launcher))

    return of


@pytest.mark.parametrize(("launcher", "np", "name"), [*_cases()])
def test_property(outcomes: Callable[[str, int], dict[str, str]], launcher: str, np: int, name: str) -> None:
    wrong = outcomes(launcher, np)[name]
    assert not wrong, wrong


ODD = """
import os, time
import ringtrain.hvd as hvd

def holds():
    assert hvd.allreduce(1.0, op=hvd.Sum, name="x") == hvd.size()

def fails_on_rank_1():
    assert hvd.rank() == 0, "no such luck"
    hvd.allreduce(1.0, name="never")

def hangs():
    time.sleep(1000)

def dies():
    os._exit(3)
"""


def test_one_that_fails_on_one_rank_hangs_or_dies_is_named_and_the_next_ones_are_run(tmp_path: Path) -> None:
    """The negative control of all of them."""
    (tmp_path / "properties").mkdir()
    (tmp_path / "properties" / "odd.py").write_text(ODD)
    names = ["odd.holds", "odd.fails_on_rank_1", "odd.hangs", "odd.dies", "agreeing.ranks_fail_together_or_not_at_all"]
    wrong = run_all("mpi", 2, names, tmp_path / "out", 8, PYTHONPATH=str(tmp_path))
    assert [name for name, text in wrong.items() if text] == names[1:4]
    assert (
        "rank 1: " in wrong[names[1]] and "no such luck" in wrong[names[1]] and "ranks [0] did not" in wrong[names[1]]
    )
    assert "ranks [0, 1] did not come to its end" in wrong[names[2]] and "in hangs" in wrong[names[2]]
    assert "exit code 3" in wrong[names[3]]
