"""bench allreduce over two hosts with a slow link."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launching

TIMEOUT_S = 600  # far above what this takes
RATE = 200
"""Mbit/s of the link"""


def test_no_allreduce_has_more_bandwidth_than_the_link(lab_possible, tmp_path):
    """Bus bandwidth is a ring's bytes over time: no library sends fewer bytes."""
    out = tmp_path / "allreduce.json"
    bench = ["ringtrain", "bench", "allreduce", "-H", "host1:1,host2:1", "--sizes", "4MiB", "--turns", "1"]
    script = Path(__file__).with_name("on_hosts.py")
    ended = launching.run(0, [sys.executable, script, "--rate", str(RATE), "--", *bench, "--out", out], TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {one["method"]: one["bus_gb_per_s"]["median"] for one in json.loads(out.read_text())["results"]}
    assert set(found) == {"MPI_Allreduce", "ring in NumPy", "Horovod over MPI", "Horovod over Gloo"}
    assert all(0 < rate < 1.1 * RATE / 8e3 for rate in found.values()), found
