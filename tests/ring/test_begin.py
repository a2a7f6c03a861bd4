"""The first commands of a new user: ringtrain init, train, runs and report, and ranks that never meet."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import run

pytestmark = pytest.mark.launch

LIMIT_S = 300
RINGTRAIN = [sys.executable, "-m", "ringtrain"]
ALONE = """
import keras, numpy
import ringtrain.hvd as hvd
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rows = numpy.zeros((64, 4))
model.fit(rows, rows[:, 0], verbose=0)
"""


@pytest.mark.quick
def test_what_init_writes_trains_as_it_is_and_is_listed(tmp_path: Path) -> None:
    assert run(0, [*RINGTRAIN, "init"], LIMIT_S, cwd=tmp_path).returncode == 0
    for options in ([], ["-H", "localhost:2"]):
        ended = run(0, [*RINGTRAIN, "train", *options, "--config", "config.toml"], LIMIT_S, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert ("2 ranks in step" if options else "1 rank: nothing to compare") in ended.stdout.splitlines()[-1]
        assert "without meeting" not in ended.stderr
    listed = json.loads(run(0, [*RINGTRAIN, "runs", "--json"], LIMIT_S, cwd=tmp_path).stdout)
    assert [(one["state"], one["num_ranks"], one["global_step"]) for one in listed] == [
        ("complete", 2, 375),
        ("complete", 1, 750),
    ]
    assert all(one["metrics"]["test_accuracy"] > 0.8 for one in listed)
    assert run(0, [*RINGTRAIN, "report"], LIMIT_S, cwd=tmp_path).stdout == f"{listed[0]['folder']}/report.html\n"


def test_ranks_that_never_met_are_named(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    ended = run(0, [*RINGTRAIN, "train", "-H", "localhost:2", "alone.py"], LIMIT_S, cwd=tmp_path)
    assert ended.returncode == 0
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ringtrain: 2 ranks ran without meeting: they import ringtrain.hvd")
