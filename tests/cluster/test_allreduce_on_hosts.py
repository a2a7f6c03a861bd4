"""bench allreduce over two hosts with a slow link."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching

TIMEOUT_S = 600  # far above what this takes
SIZE = 2**20


def test_no_allreduce_sends_less_than_a_ring_so_that_none_has_more_bandwidth_than_the_link(lab_possible, tmp_path):
    """Bus bandwidth is a ring's bytes over time: with as many bytes on the wire it cannot be above the link's rate."""
    out = tmp_path / "allreduce.json"
    bench = ["ringtrain", "bench", "allreduce", "-H", "host1:1,host2:1", "--sizes", "1MiB", "--turns", "1"]
    script = Path(__file__).with_name("on_hosts.py")
    told = [sys.executable, script, "--rate", "200", "--", *bench, "--repeats", "1", "--out", out]
    ended = launching.run(0, told, TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wire = {one["method"]: one["wire_bytes"] / SIZE for one in json.loads(out.read_text())["results"]}
    assert wire.pop("memory copy") < 0.01
    assert wire.pop("link") > 0.49  # hosts send in turns
    assert set(wire) == {"MPI_Allreduce", "ring in NumPy", "Horovod over MPI", "Horovod over Gloo"}
    assert all(1 <= share < 2.5 for share in wire.values()), wire
