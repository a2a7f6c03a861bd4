"""Ranks over Gloo start again after their end, however late one of them tells the server that it is connected."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

import ringtrain.hvd  # noqa: F401 (it finds Horovod)

LIMIT_S = 120
RANK_STARTS_TWICE = """
import ringtrain.hvd as hvd
import horovod.tensorflow as horovod
for start in range(2):
    {start}()
    assert hvd.allreduce(1.0, op=hvd.Sum, name="x") == 2
    hvd.shutdown()
"""
EARLY, LATE = "/local_localhost/0", "/local_localhost/1"


@pytest.mark.parametrize("start", ["hvd.init", "horovod.init"])
def test_a_rank_that_is_connected_late_does_not_leave_its_old_address(start: str) -> None:
    """Rank 1 is done with a scope after rank 0 is with the next, and is there again after rank 0 has looked for it.

    Horovod's own `init` shows that rank 0 would find the old address. Whether it then connects depends on port numbers.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

    next_scope_is_complete, looked_for_again = threading.Event(), threading.Event()
    found: list[bool] = []

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def do_PUT(self) -> None:
            if self.path == EARLY:
                found.append(self._get_value(*LATE.split("/")[1:]) is not None)
            if self.path == LATE and next_scope_is_complete.is_set():
                looked_for_again.wait(LIMIT_S)
            super().do_PUT()

        def do_GET(self) -> None:
            super().do_GET()
            if self.path == LATE and len(found) == 2:
                looked_for_again.set()

        def do_DELETE(self) -> None:
            if self.path == LATE:
                next_scope_is_complete.wait(LIMIT_S)
            super().do_DELETE()
            if self.path == "/cross_0/0":
                next_scope_is_complete.set()

    server = RendezvousServer()
    port = server.start(Handler)
    server.init([SlotInfo("localhost", rank, rank, 0, 2, 2, 1) for rank in range(2)])
    common = {"SIZE": 2, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1, "HOSTNAME": "localhost"}
    common |= {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    common |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port}
    command = [sys.executable, "-c", RANK_STARTS_TWICE.format(start=start)]
    ranks = []
    for rank in range(2):
        values = {
            f"HOROVOD_{name}": str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        ranks.append(subprocess.Popen(command, env=os.environ | values))
    try:
        if start == "hvd.init":
            assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0]
        else:
            assert looked_for_again.wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.stop()
    assert found[1] is (start == "horovod.init")
