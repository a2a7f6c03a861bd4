"""benchmarks/measure_peers.py, a few steps of it: that it works and compares the same training, not how fast."""

from __future__ import annotations

import json
import sys

import pytest
from launching import ROOT, run
from measure_peers import PEERS

pytestmark = pytest.mark.launch

SMALL = ["--model.name", "mlp", "--train.batch-size", "16", "--optimizer.name", "adam"]


def peers(names: str, *words: object):
    told = ["--turns", 1, "--steps", 3, "--peers", names, *words, "--", *SMALL]
    ended = run(0, [sys.executable, ROOT / "benchmarks" / "measure_peers.py", *map(str, told)], 300, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def test_peers_train_the_same_and_one_that_does_not_run_is_a_row(tmp_path):
    """All of them; PyTorch and JAX are mostly not installed, and then there are rows that say so."""
    ended = peers(",".join(PEERS), "--out", tmp_path / "peers.json")
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
    for name in (
        "by-hand",
        *strategies,
        "multi-worker-by-hand",
        "ps-async",
        "ps-async-by-hand",
        "fit-alone",
        "fit-all-cores",
        "ringtrain-alone",
    ):
        assert found[name]["first_step_s"]["median"] > 0 and found[name]["memory_mb"]["median"] > 100
        assert found[name]["equal"] and found[name]["images_per_s"]["median"] > 0
    efficiency = found["by-hand"]["images_per_s"]["median"] / found["fit-alone"]["images_per_s"]["median"] / 2
    assert found["by-hand"]["efficiency"]["median"] == pytest.approx(efficiency)
    assert "efficiency" not in found["fit-alone"]
    assert "does not run" in ended.stdout and found["ps-fit"]["error"].startswith("ValueError: ")
    ours, theirs, broken = found["ringtrain"], found["towers-by-hand"], found["multi-worker-fit"]
    # The rows of all workers in each step: ringtrain's loss is that of rank 0's.
    whole = found["fit-all-cores"]["losses"]
    assert len(whole) == 13 and whole != ours["losses"] and abs(whole[-1] - ours["losses"][-1]) < 0.3
    for one in (ours, theirs):
        assert one["equal"] and len(one["checksums"]) == 2 and one["images_per_s"]["median"] > 0
        assert len(one["losses"]) == 13 and one["losses"][-1] < one["losses"][0]
    # The same samples, weights and updates; only the order of additions within one could differ.
    assert max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)) < 1e-4
    assert theirs["over"] == "ringtrain" and theirs["ratio"]["repeats"] == 1
    assert broken["error"].startswith("ValueError: ") and broken["error"] in ended.stdout.replace("\n", "")


def test_a_peer_that_takes_too_long_is_ended_and_is_a_row():
    assert (
        "does not run: TimeoutError: no end within 1 s" in peers("towers-by-hand", "--limit", 1, "--steps", 3000).stdout
    )
