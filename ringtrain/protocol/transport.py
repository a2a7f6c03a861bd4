"""Heartbeat transport: JSON messages over TCP between rank 0 and every other rank.

Both sides of a connection prove first that they know the token, without sending it: a digest of it and of random bytes
of each side. Nothing else is parsed before. Needs psutil, as Horovod does.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ringtrain.protocol.json_text import parse_json

MAX_MESSAGE_BYTES = 1 << 20
NONCE_BYTES = 32
CONNECT_TIMEOUT_S = 2.0
GREETING_S = 5.0
"""for each read of a new connection, until both sides know that the other has the token"""
IO_S = 1.0
"""for a message whose beginning has arrived to be complete, and for a peer to take one"""


class Wire:
    """Connections of one process. `listens`: Accepts connections, on all interfaces and a free port."""

    def __init__(self, token: str, listens: bool = False) -> None:
        self.token = token  # the ranks receive rank 0's before they connect
        self._connections: list[Connection] = []
        self._bell, self._woken = socket.socketpair()
        self._listener: socket.socket | None = None
        if listens:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)

    @property
    def port(self) -> int:
        """Port that it listens on; 0 if it does not."""
        return self._listener.getsockname()[1] if self._listener else 0

    @property
    def is_connected(self) -> bool:
        return len(self._connections) > 0

    def connect(self, addresses: Sequence[str], port: int, message: dict[str, Any]) -> bool:
        """Connects to the first address that knows the token; returns whether one did."""
        for address in addresses:
            with contextlib.suppress(OSError):
                self._greet(socket.create_connection((address, port), CONNECT_TIMEOUT_S), is_caller=True)
            if self.is_connected:
                self.exchange(message, 0.0)
                return True
        return False

    def exchange(self, message: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Sends a message to all peers and returns those received in `seconds`, or until `wake`."""
        data = json.dumps(message).encode()
        for connection in list(self._connections):
            try:
                connection.send_bytes(data)
            except OSError:  # the peer has gone, or takes nothing
                self._close(connection)
        messages: list[dict[str, Any]] = []
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            listeners = [self._listener] if self._listener else []
            for ready in wait([self._woken, *listeners, *self._connections], left_s):
                if ready is self._woken:
                    if b"." in self._woken.recv(64):
                        return messages
                elif isinstance(ready, Connection):
                    messages += self._receive(ready)
                else:
                    self._accept()
        return messages

    def wake(self) -> None:
        """Ends an exchange of another thread."""
        with contextlib.suppress(OSError):
            self._bell.send(b".")

    def close(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
        if self._listener:
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            caller = self._listener.accept()[0]  # type: ignore[union-attr]
            # In a thread of its own: a caller that does not answer keeps no other waiting.
            threading.Thread(target=self._greet, args=(caller, False), daemon=True).start()

    def _greet(self, peer: socket.socket, is_caller: bool) -> None:
        """Adds a connection if its other side knows the token."""
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(peer.detach())
        limit(connection, GREETING_S)
        sides, own = ("caller", "listener"), secrets.token_bytes(NONCE_BYTES)
        side, other = sides if is_caller else sides[::-1]
        try:
            connection.send_bytes(own)
            theirs = connection.recv_bytes(NONCE_BYTES)
            connection.send_bytes(proof(self.token, side, own, theirs))
            if not hmac.compare_digest(connection.recv_bytes(NONCE_BYTES), proof(self.token, other, theirs, own)):
                raise EOFError
        except (OSError, EOFError):
            connection.close()
            return
        limit(connection, IO_S)
        self._connections.append(connection)
        self._bell.send(b"+")  # the exchange goes on with it

    def _receive(self, connection: Connection) -> list[dict[str, Any]]:
        try:
            message = parse_json(connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (OSError, EOFError, ValueError):
            message = None
        if not isinstance(message, dict):
            self._close(connection)
            return []
        return [message]

    def _close(self, connection: Connection) -> None:
        self._connections.remove(connection)
        connection.close()


def proof(token: str, side: str, own: bytes, theirs: bytes) -> bytes:
    """Digest by which a side, "caller" or "listener", proves that it knows the token, of random bytes of both."""
    return hmac.digest(token.encode(), b" ".join((side.encode(), own, theirs)), "sha256")


def limit(connection: Connection, seconds: float) -> None:
    """Limits the duration of each read and write of a connection; 0: no limit."""
    duration = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=connection.fileno()) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, duration)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, duration)
        same.detach()


def own_addresses() -> list[str]:
    """Addresses by which other hosts may reach this one, IPv4 first."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for each in psutil.net_if_addrs().values() for entry in each if entry.family in families]
    entries.sort(key=lambda entry: families.index(entry.family))
    addresses = [entry.address for entry in entries]
    return [one for one in addresses if not one.startswith(("127.", "fe80")) and one != "::1"]
