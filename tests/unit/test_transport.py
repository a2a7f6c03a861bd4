"""Heartbeats over real sockets: only a peer that knows the token is heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ringtrain.protocol import transport

pytestmark = pytest.mark.quick

LIMIT_S = 60  # far above what anything here takes


@pytest.fixture
def hub():
    wire = transport.Wire("secret", listens=True)
    yield wire
    wire.close()


def until(condition: Callable[[], Any], action: Callable[[], Any]) -> None:
    """Does something again and again until a condition holds."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {LIMIT_S} s"
        action()


def call(hub: transport.Wire, number: int = 1, token: str = "secret") -> list[Connection]:
    """Connections of ranks, which the hub accepts meanwhile; of a token that is not the hub's there are none."""
    callers = [transport.Wire(token) for _ in range(number)]

    def connect() -> None:
        for caller in callers:
            caller.connect(["127.0.0.1"], hub.port, {})

    thread = threading.Thread(target=connect)
    thread.start()
    until(lambda: not thread.is_alive(), lambda: hub.exchange({}, 0.05))
    hub.exchange({}, 0.05)
    return [connection for caller in callers for connection in caller._connections]


def test_both_sides_hear_each_other(hub: transport.Wire) -> None:
    caller = transport.Wire("secret")
    heard: list[dict] = []
    answers = threading.Thread(target=lambda: until(lambda: heard, lambda: heard.extend(hub.exchange({"n": 1}, 0.2))))
    answers.start()
    assert caller.connect(["127.0.0.1"], hub.port, {"first": 1})
    answers.join()
    assert heard[0] == {"first": 1}, "without the token"
    hub.exchange({"last": 1}, 0.0)
    until(lambda: {"last": 1} in heard, lambda: heard.extend(caller.exchange({}, 0.2)))
    caller.close()


HOSTILE = [
    b'{"token": "guess"}\n',
    b"\0\0\0\2[]",
    b"\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"x" * (2 * transport.MAX_MESSAGE_BYTES),
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:20]))
def test_who_does_not_know_the_token_is_not_heard_and_told_nothing(hub: transport.Wire, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as stranger:
        stranger.settimeout(LIMIT_S)
        received = b""
        try:
            stranger.sendall(data)
            assert hub.exchange({"secrets": 2}, 0.2) == []
            stranger.shutdown(socket.SHUT_WR)
            while more := stranger.recv(1000):
                received += more
        except OSError:  # it is hung up on
            pass
    assert b"secret" not in received and not hub.is_connected


@pytest.mark.parametrize("data", [b"[" * 60_000, b"[]", b"\xff"], ids=lambda data: repr(data[:20]))
def test_a_broken_message_ends_its_connection_and_not_the_watch(hub: transport.Wire, data: bytes) -> None:
    (rank,) = call(hub)
    rank.send_bytes(data)
    assert hub.exchange({}, 0.2) == []
    with pytest.raises((EOFError, ConnectionError)):
        while rank.recv_bytes() == b"{}":
            pass


def test_a_message_that_is_not_completed_ends_its_connection_and_not_the_watch(
    hub: transport.Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "IO_S", 0.2)
    half, whole = call(hub, 2)
    with socket.socket(fileno=half.fileno()) as same:
        same.sendall(b"\0\0\0\x10half")
        same.detach()
    whole.send_bytes(b'{"rank": 2}')
    heard: list[dict] = []
    until(lambda: heard, lambda: heard.extend(hub.exchange({}, 0.5)))
    assert heard == [{"rank": 2}]


def test_a_peer_that_takes_nothing_does_not_stop_the_watch(
    hub: transport.Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "IO_S", 0.2)
    call(hub)
    until(lambda: not hub.is_connected, lambda: hub.exchange({"row": "x" * 100_000}, 0.0))


def test_who_proves_another_token_is_not_heard(hub: transport.Wire) -> None:
    assert call(hub, token="guess") == []
    assert not hub.is_connected


def test_a_proof_of_the_listener_is_none_of_a_caller() -> None:
    proofs = [transport.proof("secret", side, b"a", b"b") for side in ("caller", "listener")]
    proofs += [transport.proof("secret", "caller", b"b", b"a"), transport.proof("other", "caller", b"a", b"b")]
    assert len(set(proofs)) == 4


def test_silent_connections_lock_no_rank_out(hub: transport.Wire) -> None:
    silent = [socket.create_connection(("127.0.0.1", hub.port), 5) for _ in range(280)]
    ranks = call(hub, 128)
    for number, rank in enumerate(ranks):
        rank.send_bytes(b'{"rank": %d}' % number)
    heard: list[dict] = []
    until(lambda: len(heard) >= len(ranks), lambda: heard.extend(hub.exchange({}, 0.5)))
    assert sorted(message["rank"] for message in heard) == list(range(128))
    for connection in (*silent, *ranks):
        connection.close()


def test_a_caller_does_not_take_another_program_for_rank_0() -> None:
    caller, answers = transport.Wire("secret"), []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        calling = threading.Thread(target=lambda: answers.append(caller.connect(["127.0.0.1"], port, {"first": 1})))
        calling.start()
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"\0\0\0\x05hello")
            calling.join(LIMIT_S)
            assert answers == [False]
            received = connection.recv(1000)
    assert b"first" not in received and b"secret" not in received
