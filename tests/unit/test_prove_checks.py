"""What ringtrain prove concludes from its runs; tests/ring/test_prove.py has whole proofs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringtrain.lab import prove_checks as checks
from ringtrain.lab.prove_checks import Outcome

KINDS = {"0": "weights", "1": "weights", "2": "momentum"}


def outcome(folder: Path, *epochs: dict[str, Any], code: int = 0) -> Outcome:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps({'global_step': 1} | epoch)}\n" for epoch in epochs))
    return Outcome(folder, "failed" if code else "", code)


def test_an_array_of_rounding_counts_little_and_a_wrong_one_fully() -> None:
    """The bias of an attention's keys has a gradient of zero: what it holds is rounding."""
    one = {"0": np.full(100, 1.0), "1": np.full(4, 1e-9), "2": np.full(100, 1e-6)}
    assert checks.apart(one | {"1": np.full(4, -1e-9)}, one, KINDS) < 1e-7
    assert checks.apart(one | {"1": np.full(4, 0.01)}, one, KINDS) > 0.1
    assert checks.apart(one | {"2": np.full(100, 2e-6)}, one, KINDS) == pytest.approx(1)
    assert checks.apart(one | {"0": np.full(100, 1.01)}, one, KINDS) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("ours", "expected", "holds"),
    [
        ({"f1": [0.5, 0.25]}, {"f1": [0.5, 0.25]}, True),
        ({"f1": [0.5, 0.25]}, {"f1": [0.5, 0.5]}, False),
        ({"loss": None}, {"loss": None}, True),
        ({"loss": None}, {"loss": 0.5}, False),
        ({"loss": 0.5}, {"loss": 0.5000001}, True),
    ],
)
def test_metrics_may_be_arrays_and_not_finite(ours: dict, expected: dict, holds: bool, tmp_path: Path) -> None:
    one, ranks = outcome(tmp_path / "one", expected), outcome(tmp_path / "ranks", ours)
    assert checks.same_metrics("float64", one, ranks).holds is holds


def test_another_number_of_epochs_is_a_difference(tmp_path: Path) -> None:
    one, ranks = outcome(tmp_path / "one", {"loss": 1.0}, {"loss": 0.5}), outcome(tmp_path / "ranks", {"loss": 1.0})
    assert checks.same_metrics("float32", one, ranks).holds is False


@pytest.mark.parametrize(("codes", "holds"), [((0, 0, 0), None), ((143, 0, 0), None), ((143, 137, 1), False)])
def test_a_run_that_was_not_killed_shows_nothing(codes: tuple[int, ...], holds: bool | None, tmp_path: Path) -> None:
    resumed = outcome(tmp_path / "resumed", code=codes[-1])
    undisturbed = outcome(tmp_path / "undisturbed")
    assert checks.killed("killed", codes, undisturbed, resumed).holds is holds
