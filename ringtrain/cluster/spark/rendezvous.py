"""Rendezvous of Gloo's ranks: an HTTP key-value store with the protocol of Horovod's rendezvous server."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections import defaultdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from ringtrain.protocol.limited_server import LimitedServer

MAX_VALUE_BYTES = 1 << 24  # for one rank's addresses, about 150 bytes per other rank


class Store(LimitedServer):  # HTTPServer would look up the host's full name, which can be slow
    """Server of GET, PUT and DELETE /token/scope/key, from construction until `close`; drops other requests unread."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of `host`; "": of all addresses of this machine."""
        super().__init__((host, 0), _Handler)
        self.token = secrets.token_hex(16)
        self.values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self.deleted: defaultdict[str, set[str]] = defaultdict(set)
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def environ(self, address: str) -> dict[str, str]:
        """Variables with which Horovod's ranks find this store; `address` is this host's, as ranks reach it."""
        # Horovod joins address, port and scope to a URL without a token: its "port" is the end of the token.
        where = f"{address}:{self.port}/{self.token}"
        return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": where, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port)}

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = 10
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Rejects a request whose first line does not contain the token, without reading further."""
        path = [*self.raw_requestline.split(), b"", b""][1]
        known = f"/{self.server.token}:{self.server.port}/".encode()
        self.close_connection = True
        if not (hmac.compare_digest(path[: len(known)], known) and super().parse_request()):
            return False
        self.server.trust(self.connection)
        _, self.scope, self.key = [*self.path.removeprefix("/").split("/", 2), ""][:3]
        return True

    def do_GET(self) -> None:
        with self.server.lock:
            value = self.server.values[self.scope].get(self.key)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND, b"")
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > MAX_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        value = self.rfile.read(int(length))
        with self.server.lock:
            self.server.values[self.scope][self.key] = value
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        with self.server.lock:
            self.server.deleted[self.scope].add(self.key)
            numbers = {key for key in self.server.values[self.scope] if key.isdecimal()}  # "rank_0" is never deleted
            # A rank that is connected deletes its key, which others may still need: a scope is removed as a whole.
            if self.server.deleted[self.scope] >= numbers:
                del self.server.deleted[self.scope], self.server.values[self.scope]
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
