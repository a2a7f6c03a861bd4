"""Heartbeats over real sockets: only a peer that knows the token is heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
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


def greet(hub: transport.Wire, *callers: socket.socket, token: str = "secret") -> None:
    """What a rank says first."""
    nonce = b"0" * transport.NONCE_LETTERS
    for caller in callers:
        caller.settimeout(LIMIT_S)
        caller.sendall(nonce + b"\n")
    hub.exchange({}, 0.2)
    for caller in callers:
        answer = b""
        while not answer.endswith(b"\n"):
            hub.exchange({}, 0.01)
            answer += caller.recv(1000)
        other = answer[: transport.NONCE_LETTERS]
        assert answer == other + transport.proof("secret", "listener", other, nonce) + b"\n"
        caller.sendall(transport.proof(token, "caller", nonce, other) + b"\n")


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
    b"GET / HTTP/1.1\r\n",
    b'{"token": "guess"}\n',
    b'{"token": "\xc3\xa9"}\n',
    b"[" * 60_000 + b"\n",
    b"[]\n",
    b"\xff\n",
    b"x" * (2 * transport.MAX_LINE_BYTES),
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:20]))
def test_who_does_not_know_the_token_is_not_heard_and_told_nothing(hub: transport.Wire, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as stranger:
        stranger.settimeout(5)
        hub.exchange({"secrets": 1}, 0.1)
        try:
            stranger.sendall(line)
            heard = hub.exchange({"secrets": 2}, 0.2)
            assert stranger.recv(1000) == b"", "it was hung up on"
        except ConnectionError:
            heard = []
        assert heard == []


@pytest.mark.parametrize("line", [b"[" * 60_000, b"[]", b"\xff", b"{", b""], ids=lambda line: repr(line[:20]))
def test_a_broken_message_ends_its_connection_and_not_the_watch(hub: transport.Wire, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as rank:
        greet(hub, rank)
        rank.sendall(line + b"\n")
        assert hub.exchange({}, 0.2) == []
        assert rank.recv(100) == b"{}\n"
        assert rank.recv(100) == b""


def test_who_proves_another_token_is_not_heard(hub: transport.Wire) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as stranger:
        greet(hub, stranger, token="guess")
        assert hub.exchange({"secrets": 1}, 0.2) == []
        assert stranger.recv(100) == b""


def test_a_proof_of_the_listener_is_none_of_a_caller() -> None:
    proofs = [transport.proof("secret", side, b"a", b"b") for side in ("caller", "listener")]
    proofs += [transport.proof("secret", "caller", b"b", b"a"), transport.proof("other", "caller", b"a", b"b")]
    assert len(set(proofs)) == 4


def test_a_part_of_a_line_gets_no_answer(hub: transport.Wire) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as right, socket.socket() as wrong:
        wrong.connect(("127.0.0.1", hub.port))
        right.sendall(b"0" * 5)
        wrong.sendall(b"ringx")
        hub.exchange({}, 0.2)
        for stranger in (right, wrong):
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)


def test_silent_connections_lock_no_rank_out(hub: transport.Wire) -> None:
    silent = [socket.create_connection(("127.0.0.1", hub.port), 5) for _ in range(transport.MAX_UNAUTHENTICATED + 20)]
    ranks = [socket.create_connection(("127.0.0.1", hub.port), 5) for _ in range(128)]
    greet(hub, *ranks)
    for number, rank in enumerate(ranks):
        rank.sendall(b'{"rank": %d}\n' % number)
    heard: list[dict] = []
    until(lambda: len(heard) >= len(ranks), lambda: heard.extend(hub.exchange({}, 0.5)))
    assert sorted(message["rank"] for message in heard) == list(range(128))
    for connection in (*silent, *ranks):
        connection.close()


def test_a_caller_does_not_take_another_program_for_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert not transport.Wire("secret").connect(["127.0.0.1"], other.getsockname()[1], {"first": 1})
        connection, _ = other.accept()
        with connection:
            received = connection.recv(1000)
    assert len(received) == transport.NONCE_LETTERS + 1 and b"secret" not in received


def test_an_exchange_is_woken(hub: transport.Wire) -> None:
    hub.wake()
    assert hub.exchange({}, 3600) == []
