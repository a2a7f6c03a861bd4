"""Network services of Horovod, restricted: they listen on one address, and strangers cannot keep them from ending."""

from __future__ import annotations

import pickle
import socket
import socketserver
import struct
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MAX_MESSAGE_BYTES = 1 << 14
"""per message to a service, which reads it before it can check the digest"""
READ_S = 10
"""for each read of a request"""


class Server(socketserver.ThreadingTCPServer):
    """Server that does not wait for its clients when it ends, and prints nothing of those that hang up."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(socketserver.StreamRequestHandler):
    timeout = READ_S


def restrict(network: Any, address: str) -> None:
    """Restricts Horovod's services and clients of this process. address: Where services listen; "": all interfaces."""

    class Wire(network.Wire):
        def read(self, file: Any) -> Any:
            """Reads a message of limited length with a valid digest; any other counts as a closed connection."""
            digest, header = file.read(network.secret.DIGEST_LENGTH), file.read(4)
            length = struct.unpack("i", header)[0] if len(header) == 4 else -1
            message = file.read(length) if 0 <= length <= MAX_MESSAGE_BYTES else b""
            if not message or not network.secret.check_digest(self._key, message, digest):
                raise EOFError
            return pickle.loads(message)

    def find_port(make_server: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
        server = make_server((address, 0))
        return server, int(server.socket.getsockname()[1])

    network.socketserver = SimpleNamespace(ThreadingTCPServer=Server, StreamRequestHandler=Handler)
    network.Wire = Wire
    network.find_port = find_port


def address_of(interface: str) -> str:
    """IPv4 address of an interface; "" if it does not exist or has none."""
    import psutil

    entries = psutil.net_if_addrs().get(interface, [])
    return next((str(entry.address) for entry in entries if entry.family == socket.AF_INET), "")


def interface_of(address: str) -> str:
    """Name of the interface with an IPv4 address; "" if there is none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return str(name)
    return ""
