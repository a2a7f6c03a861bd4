"""Limits of a threaded TCP server: how many clients may be unauthenticated at a time, and for how long."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
import time
from typing import Any

MAX_UNAUTHENTICATED = 256
"""connections; with one more, the oldest is closed"""
REQUEST_S = 10.0
"""for a whole request, from the connection on"""


class LimitedServer(socketserver.ThreadingTCPServer):
    """Server whose clients can neither keep it from ending nor hold its threads."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    request_s = REQUEST_S

    def __init__(self, *args: Any) -> None:
        self._unauthenticated: dict[Any, float] = {}
        """time.monotonic() of each connection, the oldest first"""
        self._changing = threading.Lock()
        super().__init__(*args)

    def trust(self, connection: Any) -> None:
        """Ends the limits of a connection, as its client is authenticated."""
        with self._changing:
            self._unauthenticated.pop(connection, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            self._unauthenticated[request] = time.monotonic()
            too_many = list(self._unauthenticated)[:-MAX_UNAUTHENTICATED]
        self._hang_up(too_many)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Closes connections that are out of time; called after each request, and every half second."""
        super().service_actions()
        latest_s = time.monotonic() - self.request_s
        with self._changing:
            late = [connection for connection, since_s in self._unauthenticated.items() if since_s < latest_s]
        self._hang_up(late)

    def _hang_up(self, connections: list[Any]) -> None:
        """Ends the reads of these connections' threads, which close them."""
        for connection in connections:
            self.trust(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing if a client resets or closes a connection or leaves it open."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
