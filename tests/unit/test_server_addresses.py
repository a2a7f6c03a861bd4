"""Addresses of TensorFlow's own servers, which ranks find out together."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from ringtrain.protocol import transport
from ringtrain.strategies.parameter_server import cluster


@pytest.mark.parametrize("hosts", [("host1", "host2", "host1"), ("host1", "host1")])
def test_ports_are_open_to_other_hosts_alone(
    hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each thread is a rank. While they find each other's addresses, ports of a job on one host answer nobody."""
    together, lock = threading.Barrier(len(hosts), timeout=60), threading.Lock()
    told: list[dict[int, Any]] = [{}]
    open_ports: list[int] = []
    found: dict[int, Any] = {}
    own = threading.local()
    monkeypatch.setattr(cluster.socket, "gethostname", lambda: hosts[own.rank])
    monkeypatch.setattr(transport, "own_addresses", lambda: [f"127.0.0.{own.rank + 2}"])

    def allgather(value: Any) -> list[Any]:
        with lock:
            told[-1][own.rank] = value
        if together.wait() == 0:
            of_ranks = told[-1]
            for _, _, ports in (place for place in of_ranks.values() if isinstance(place, tuple) and len(place) == 3):
                with socket.socket() as stranger:
                    open_ports.extend(port for port in ports if not stranger.connect_ex(("127.0.0.1", port)))
            told.append({})
        together.wait()
        return [told[-2][rank] for rank in range(len(hosts))]

    def rank_of(rank: int) -> None:
        own.rank = rank
        found[rank] = cluster.addresses(rank, allgather, num_ports=2)

    ranks = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(len(hosts))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    endpoints, *others = [found[rank] for rank in range(len(hosts))]
    assert others == [endpoints] * len(others)
    assert capfd.readouterr().err == f"{cluster.OPEN_TO_ALL}\n", "from rank 0 alone"
    assert open_ports == []
    if len(set(hosts)) == 1:
        assert {place.partition(":")[0] for ports in endpoints for place in ports} == {"127.0.0.1"}
    else:
        assert [ports[0].partition(":")[0] for ports in endpoints] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
