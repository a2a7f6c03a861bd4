"""Metrics of runs over HTTP for Prometheus, or OpenTelemetry's collector, on this machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from ringtrain.errors import ConfigError
from ringtrain.protocol.limited_server import LimitedServer

ADDRESS, PATH = "127.0.0.1", "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""of Prometheus' text format"""


class MetricsServer(LimitedServer):
    """Server of GET /metrics on the loopback address. Raises ConfigError if the port is not free.

    Args:
        port: 0: any free one.
        text: Called at each request, one at a time.
    """

    allow_reuse_address = True

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        self._text, self._reading = text, threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(f"port {port}: {error.strerror}: give another one") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}{PATH}"

    def text(self) -> str:
        with self._reading:
            return self._text()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = 10

    def do_GET(self) -> None:
        self.server.trust(self.connection)
        code, text = HTTPStatus.OK, ""
        if self.path.partition("?")[0] != PATH:
            code, text = HTTPStatus.NOT_FOUND, f"see {PATH}\n"
        else:
            try:
                text = self.server.text()
            except Exception as error:  # such as a bucket that does not answer: the next request may succeed
                code, text = HTTPStatus.INTERNAL_SERVER_ERROR, "the runs cannot be read\n"
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed of a request that succeeds."""
