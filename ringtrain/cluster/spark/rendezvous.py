"""Where Gloo's ranks find each other: values by scope and key over HTTP, as Horovod's ranks ask for them."""

from __future__ import annotations

import threading
from collections import defaultdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer


class Store(ThreadingTCPServer):  # HTTPServer would ask for its host's full name, which can take a while
    """GET, PUT and DELETE of /scope/key, from the moment it is made until close.

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
        self.values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self.deleted: defaultdict[str, set[str]] = defaultdict(set)
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server_address[1]

    def close(self) -> None:
        """Ends it."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = 60

    def do_GET(self) -> None:
        scope, key = self._scope_and_key()
        with self.server.lock:
            value = self.server.values[scope].get(key)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        scope, key = self._scope_and_key()
        value = self.rfile.read(int(self.headers["Content-Length"]))
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
        scope, _, key = self.path.removeprefix("/").partition("/")
        return scope, key

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
