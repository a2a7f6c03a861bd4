"""The kernel's filter in front of TensorFlow's servers: interpreted here, and seen to work on a socket."""

from __future__ import annotations

import socket
import struct
import threading
from ipaddress import IPv4Address
from typing import Any

import pytest

from ringtrain.protocol import transport
from ringtrain.strategies.parameter_server import cluster, listening


def accepts(code: bytes, packet: bytes) -> bool:
    """What the kernel does with a packet: a program of classic BPF, interpreted."""
    assert len(code) // 8 <= 4096  # the kernel takes no more
    at = value = 0
    while True:
        operation, if_equal, if_not, number = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        offset = number - 0xFFF00000
        match operation:
            case 0x30:
                value = packet[offset]
            case 0x20:
                (value,) = struct.unpack_from(">I", packet, offset)
            case 0x54:
                value &= number
            case 0x15:
                at += if_equal if value == number else if_not
            case 0x06:
                return number > 0


def packet_from(address: str) -> bytes:
    return bytes([0x45]) + bytes(11) + IPv4Address(address).packed + bytes(4)


@pytest.mark.parametrize("addresses", [[], ["10.1.0.3"], [f"10.1.{n // 250}.{n % 250}" for n in range(1500)]])
def test_packets_of_the_jobs_hosts_are_accepted_and_no_others(addresses: list[str]) -> None:
    code = listening.program(addresses)
    for address in ("127.0.0.1", "127.1.2.3", *addresses):
        assert accepts(code, packet_from(address)), address
    for address in ("10.1.0.253", "11.1.0.3", "126.0.0.1", "128.0.0.1", "0.0.0.0", "255.255.255.255"):
        assert not accepts(code, packet_from(address)), address
    assert not accepts(code, bytes([0x60]) + bytes(39))  # version 6


def test_many_hosts_are_known_by_their_networks() -> None:
    code = listening.program([f"10.{n // 250}.{n % 250}.7" for n in range(1700)])
    assert accepts(code, packet_from("10.6.1.9"))
    assert not accepts(code, packet_from("10.7.1.9"))


def test_a_server_answers_this_host_alone(capfd: pytest.CaptureFixture) -> None:
    """An address of a network card, and one of version 6, stand for other hosts: here they are none of the job's."""
    both = socket.has_dualstack_ipv6()
    family, strangers = (socket.AF_INET6, ["::1"]) if both else (socket.AF_INET, [])
    strangers += [one for one in transport.own_addresses() if ":" not in one]
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        friend = socket.create_connection(("127.0.0.1", port), 5)
        accepted = [socket.create_connection((address, port), 5) for address in strangers]
        at_server = [server.accept()[0] for _ in (friend, *accepted)]
        waiting = [socket.create_connection((address, port), 5) for address in strangers]
        with listening.only_for(["10.255.255.1", "fe80::7"], [port]):
            pass
        for stranger in (*accepted, *waiting):
            assert stranger.recv(1) == b"", "it was there before the filter"
            stranger.close()
        friend.sendall(b"x")
        assert at_server[0].recv(1) == b"x"
        for connection in (friend, *at_server):
            connection.close()
        socket.create_connection(("127.0.0.1", port), 5).close()
        for address in strangers:
            with pytest.raises(TimeoutError):
                socket.create_connection((address, port), 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("hosts", [("host1", "host2", "host1"), ("host1", "host1")])
def test_ports_are_open_to_other_hosts_alone(hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
    (endpoints, callers), *others = [found[rank] for rank in range(len(hosts))]
    assert others == [(endpoints, callers)] * len(others)
    assert open_ports == []
    if len(set(hosts)) == 1:
        assert {place.partition(":")[0] for ports in endpoints for place in ports} == {"127.0.0.1"}
        assert callers == ()
    else:
        assert [ports[0].partition(":")[0] for ports in endpoints] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        assert {"127.0.0.2", "127.0.0.3", "127.0.0.4"} <= set(callers)


def test_where_it_cannot_be_a_line_says_what_a_firewall_has_to_do(capfd: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, listening.only_for(["fe80::7"], [server.getsockname()[1]]):
        pass
    said = capfd.readouterr().err
    assert "obeys everyone" in said and "-s fe80::7 -j ACCEPT" in said
