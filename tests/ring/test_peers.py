"""benchmarks/measure_peers.py, a few steps of it: that it works and compares the same training, not how fast."""

from __future__ import annotations

import json
import sys

import pytest
from launching import ROOT, run
from measure_peers import PEERS

pytestmark = pytest.mark.launch

SMALL = ["--model.name", "mlp", "--train.batch-size", "16", "--optimizer.name", "adam"]


def test_peers_train_the_same_and_one_that_does_not_run_is_a_row(tmp_path):
    """All of them; PyTorch and JAX are mostly not installed, and then there are rows that say so."""
    told = ["--turns", "1", "--steps", "3", "--peers", ",".join(PEERS), "--out", tmp_path / "peers.json", "--", *SMALL]
    ended = run(0, [sys.executable, ROOT / "benchmarks" / "measure_peers.py", *told], 300, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "peers.json").read_text())["results"]
    failed = {name: one["error"] for name, one in found.items() if "error" in one}
    others = {name for name in PEERS if "torch" in name or "jax" in name}
    assert failed.keys() <= {"multi-worker-fit", "ps-fit", *others}, failed
    strategies = ("mpi-ring", "towers", "multi-worker", "ps-sync")  # two as those by hand, which are compared below
    assert {name for name, one in found.items() if one.get("same_weights")} >= {
        "by-hand",
        "ringtrain-alone",
        *strategies,
    }
    for name in found.keys() - failed.keys():
        assert found[name]["first_step_s"]["median"] > 0 and found[name]["memory_mb"]["median"] > 100
        assert found[name]["equal"] and found[name]["images_per_s"]["median"] > 0
    assert "does not run" in ended.stdout and found["ps-fit"]["error"].startswith("ValueError: ")
    ours, theirs = found["ringtrain"], found["towers-by-hand"]
    # The same samples, weights and updates; only the order of additions within one could differ.
    assert max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)) < 1e-4
    assert theirs["over"] == "ringtrain" and theirs["ratio"]["repeats"] == 1
