"""Heartbeat transport: JSON lines over TCP between rank 0 and every other rank.

Both sides of a connection prove first that they know the token, without sending it: a digest of it and of a random
number of each side. Nothing else is parsed before. Needs psutil, as Horovod does.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.protocol.json_text import parse_json

MAX_LINE_BYTES = 1 << 20
RECEIVE_BYTES = 1 << 16
MAX_UNAUTHENTICATED = 256
"""unauthenticated connections; with one more, the oldest is closed"""
CONNECT_TIMEOUT_S = 2.0
TOKEN_TIMEOUT_S = 5.0
"""for a new connection to prove that it knows the token"""
NONCE_LETTERS, PROOF_LETTERS = 32, 64


@dataclass
class _Connection:
    socket: socket.socket
    since_s: float
    received: bytes = b""
    to_send: bytes = b""
    knows_token: bool = False
    nonce: bytes = b""
    """random letters of this side"""
    peer_nonce: bytes = b""


class Wire:
    """Connections of one process. `listens`: Accepts connections, on all interfaces and a free port.

    The process that connects sends its nonce, the other one its nonce and proof, then the first its proof: a line each.
    """

    def __init__(self, token: str, listens: bool = False) -> None:
        self.token = token  # the ranks receive rank 0's before they connect
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._bell, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._line = b""
        self._listener: socket.socket | None = None
        if listens:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Port that it listens on; 0 if it does not."""
        return self._listener.getsockname()[1] if self._listener else 0

    @property
    def is_connected(self) -> bool:
        """Whether a peer knows the token."""
        return any(connection.knows_token for connection in self._connections.values())

    def connect(self, addresses: Sequence[str], port: int, message: dict[str, Any]) -> bool:
        """Connects to the first address that knows the token; returns whether one did."""
        for address in addresses:
            with contextlib.suppress(OSError):
                connection = self._add(socket.create_connection((address, port), CONNECT_TIMEOUT_S))
                connection.to_send = connection.nonce + b"\n"
                self._send(connection)
                self.exchange(message, CONNECT_TIMEOUT_S, lambda: self.is_connected)
                if self.is_connected:
                    return True
            self._close_all()
        return False

    def exchange(
        self, message: dict[str, Any], seconds: float, is_enough: Callable[[], bool] = lambda: False
    ) -> list[dict[str, Any]]:
        """Sends a message to all peers and returns those received in `seconds`, or until `wake` or `is_enough`."""
        self._line = _line_of(message)
        for connection in list(self._connections.values()):
            # A peer that has not taken the previous message yet is skipped.
            if not connection.to_send and connection.knows_token:
                connection.to_send = self._line
                self._send(connection)
        messages: list[dict[str, Any]] = []
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0 and not is_enough():
            for key, events in self._selector.select(left_s):
                if key.fileobj is self._woken:
                    self._woken.recv(64)
                    return messages
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._connections:
                    connection = self._connections[key.fd]
                    if events & selectors.EVENT_WRITE:
                        self._send(connection)
                    if events & selectors.EVENT_READ:
                        messages += self._receive(connection)
        for connection in self._unauthenticated():
            if time.monotonic() - connection.since_s > TOKEN_TIMEOUT_S:
                self._close(connection)
        return messages

    def wake(self) -> None:
        """Ends an exchange of another thread."""
        with contextlib.suppress(OSError):
            self._bell.send(b".")

    def close(self) -> None:
        self._close_all()
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _unauthenticated(self) -> list[_Connection]:
        """Unauthenticated connections, the oldest first."""
        return [connection for connection in self._connections.values() if not connection.knows_token]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            if self._listener:
                self._add(self._listener.accept()[0])
        for connection in self._unauthenticated()[:-MAX_UNAUTHENTICATED]:
            self._close(connection)

    def _add(self, new: socket.socket) -> _Connection:
        new.setblocking(False)
        new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_hex(NONCE_LETTERS // 2).encode()
        connection = self._connections[new.fileno()] = _Connection(new, time.monotonic(), nonce=nonce)
        self._selector.register(new, selectors.EVENT_READ)
        return connection

    def _send(self, connection: _Connection) -> None:
        try:
            sent = 0
            if connection.to_send:
                sent = connection.socket.send(connection.to_send)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        connection.to_send = connection.to_send[sent:]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.to_send else 0)
        self._selector.modify(connection.socket, wanted)

    def _receive(self, connection: _Connection) -> list[dict[str, Any]]:
        length = self._next_letters(connection) + 1
        if connection.knows_token:
            missing = RECEIVE_BYTES
        else:
            missing = length - len(connection.received)
        try:
            data = connection.socket.recv(missing)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        connection.received += data
        if not connection.knows_token:
            # An incomplete line gets no answer: a proof could be guessed character by character.
            if not data or b"\n" in data[:-1] or (len(connection.received) == length and data[-1:] != b"\n"):
                self._close(connection)
            elif data[-1:] == b"\n":
                line, connection.received = connection.received[:-1], b""
                self._take_greeting(connection, line)
            return []
        *lines, connection.received = connection.received.split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines:
            message = None
            with contextlib.suppress(ValueError):
                message = parse_json(line)
            if not isinstance(message, dict):
                self._close(connection)
                return messages
            messages.append(message)
        if not data or len(connection.received) > MAX_LINE_BYTES:
            self._close(connection)
        return messages

    def _next_letters(self, connection: _Connection) -> int:
        """Length of the next line of a peer that has not proven yet that it knows the token."""
        if not self._listener:
            return NONCE_LETTERS + PROOF_LETTERS
        return PROOF_LETTERS if connection.peer_nonce else NONCE_LETTERS

    def _take_greeting(self, connection: _Connection, line: bytes) -> None:
        """Answers a line of the greeting, and closes the connection if it is wrong."""
        if len(line) != self._next_letters(connection):
            self._close(connection)
            return
        if not connection.peer_nonce:
            connection.peer_nonce, line = line[:NONCE_LETTERS], line[NONCE_LETTERS:]
            if self._listener:
                own = proof(self.token, "listener", connection.nonce, connection.peer_nonce)
                connection.to_send = connection.nonce + own + b"\n"
                self._send(connection)
                return
        peer = "caller" if self._listener else "listener"
        if not hmac.compare_digest(line, proof(self.token, peer, connection.peer_nonce, connection.nonce)):
            self._close(connection)
            return
        connection.knows_token = True
        connection.to_send = self._line
        if not self._listener:
            own = proof(self.token, "caller", connection.nonce, connection.peer_nonce)
            connection.to_send = own + b"\n" + self._line
        self._send(connection)

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None):
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)


def proof(token: str, side: str, nonce: bytes, peer_nonce: bytes) -> bytes:
    """Digest by which a side, "caller" or "listener", proves that it knows the token, of its nonce and the peer's."""
    return hmac.digest(token.encode(), b" ".join((side.encode(), nonce, peer_nonce)), "sha256").hex().encode()


def _line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def own_addresses() -> list[str]:
    """Addresses by which other hosts may reach this one, IPv4 first."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for each in psutil.net_if_addrs().values() for entry in each if entry.family in families]
    entries.sort(key=lambda entry: families.index(entry.family))
    addresses = [entry.address for entry in entries]
    return [one for one in addresses if not one.startswith(("127.", "fe80")) and one != "::1"]
