"""Where Gloo's ranks find each other: values by scope and key over HTTP, as Horovod's ranks ask for them."""

from __future__ import annotations

import hmac
import re
import secrets
import sys
import threading
from collections import defaultdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

MAX_VALUE_BYTES = 1 << 24
"""of one rank's addresses, some 150 bytes for each other rank"""


class Store(ThreadingTCPServer):  # HTTPServer would ask for its host's full name, which can take a while
    """GET, PUT and DELETE of /token/scope/key, from the moment it is made until close. Other requests are not read.

    A rank deletes its key when it is connected to all others of the scope. They may not be: a scope goes when every key
    in it has been deleted.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str) -> None:
        """Listens on a free port.

        Args:
            host: whose address to listen on; empty: all of this machine's.
        """
        super().__init__((host, 0), _Handler)
        self.token = secrets.token_hex(16)
        self.values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self.deleted: defaultdict[str, set[str]] = defaultdict(set)
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server_address[1]

    def environ(self, address: str) -> dict[str, str]:
        """Variables by which Horovod's ranks find it.

        Horovod knows an address and a port, and no token: it writes both and the scope one after the other, as a URL.
        So the token is part of the address, and what Horovod takes for the port is the end of the token.

        Args:
            address: of this host, as ranks reach it.
        """
        where = f"{address}:{self.port}/{self.token}"
        return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": where, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port)}

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing about connections that clients reset, close or leave open."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends it."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = 10
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Reads no further than the first line of a client that does not know the token."""
        path = [*self.raw_requestline.split(), b"", b""][1]
        known = f"/{self.server.token}:{self.server.port}/".encode()
        self.close_connection = True
        return hmac.compare_digest(path[: len(known)], known) and super().parse_request()

    def do_GET(self) -> None:
        scope, key = self._scope_and_key()
        with self.server.lock:
            value = self.server.values[scope].get(key)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        scope, key = self._scope_and_key()
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > MAX_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        value = self.rfile.read(int(length))
        with self.server.lock:
            self.server.values[scope][key] = value
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        scope, key = self._scope_and_key()
        with self.server.lock:
            self.server.deleted[scope].add(key)
            if self.server.deleted[scope] >= self.server.values[scope].keys():
                del self.server.deleted[scope], self.server.values[scope]
        self._answer(HTTPStatus.OK)

    def _scope_and_key(self) -> tuple[str, str]:
        _, scope, key = [*self.path.removeprefix("/").split("/", 2), ""][:3]
        return scope, key

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
