"""ringtrain bench, a few steps of it: that it works, not how fast."""

from __future__ import annotations

import json
import sys

import pytest
from launching import BIN, ROOT, run

from ringtrain import cli

pytestmark = pytest.mark.launch

LAUNCH = ["-H", "localhost:2", "--turns", 2]


def bench(*words: object):
    ended = run(0, [BIN / "ringtrain", "bench", *map(str, words)], 600, warm=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def test_train_measures_two_ways_in_turns(tmp_path):
    out = tmp_path / "train.json"
    small = ["--data.name", "synthetic", "--data.num-samples", 512, "--data.image-size", 8, "--model.name", "mlp"]
    ended = bench("train", *LAUNCH, "--steps", 5, "--out", out, "--", *small, "--train.batch-size", 16)
    assert "ring efficiency" in ended.stdout and "mlp, synthetic, batch 16 on each of 2 ranks" in ended.stdout
    record = json.loads(out.read_text())
    assert record["versions"]["keras"]
    results = record["results"]
    assert results["num_ranks"] == 2 and results["ring_efficiency"]["repeats"] == 2


def test_allreduce_measures_every_library_and_checks_its_sums(tmp_path):
    out = tmp_path / "allreduce.json"
    few = ["--sizes", "1KiB,256KiB", "--turns", 1]
    ended = bench("allreduce", "-H", "localhost:2", *few, "--out", out)
    results = json.loads(out.read_text())["results"]
    methods = ["MPI_Allreduce", "ring in NumPy", "Horovod over MPI", "Horovod over Gloo"]
    assert [one["method"] for one in results] == 2 * methods
    assert [one["bytes"] for one in results] == 4 * [2**10] + 4 * [2**18]
    assert all(method in ended.stdout for method in methods) and "256KiB" in ended.stdout
    by_method = {one["method"]: one for one in results}
    assert by_method["MPI_Allreduce"]["speed"]["median"] == 1
    horovod = by_method["Horovod over Gloo"]
    assert horovod["bus_gb_per_s"]["median"] == pytest.approx(2**18 / horovod["seconds"]["median"] / 1e9)


@pytest.mark.parametrize("np", [2, 3, 5])
def test_the_ring_in_numpy_is_the_sum_with_the_same_bits_everywhere(np):
    """With the negative control: a lost message is noticed, by bench allreduce as well."""
    ended = run(
        np,
        [sys.executable, ROOT / "tests" / "ring" / "adding_by_hand.py"],
        120,
        {"OMPI_MCA_rmaps_base_oversubscribe": "1"},
    )
    assert "ring True, broken False, refused by bench True" in ended.stdout, ended.stdout + ended.stderr


def test_bad_input_is_one_line(capsys):
    """The first in a process of its own."""
    ended = run(0, [BIN / "ringtrain", "bench", "train", "--turns", "0"], 60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("ringtrain: got --turns 0") and ended.stderr.count("\n") == 1
    for words, said in (
        (["train", "--turns", "0"], "got --turns 0, expected 1 or more"),
        (["train", "--", "python", "own.py"], "got python after --, expected options of ringtrain.train"),
        (["launch"], "got launch, expected one of allreduce, train"),
        (["allreduce", "--sizes", "1kB"], "got --sizes 1kB, expected sizes such as"),
        (["allreduce", "--dry-run"], "unrecognized arguments: --dry-run"),
    ):
        assert cli.main(["bench", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
