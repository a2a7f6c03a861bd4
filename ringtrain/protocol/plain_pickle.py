"""Restricted unpickling: plain values and the messages of Horovod's elastic services, nothing else.

Horovod unpickles data that arrives over the network, and a pickle can call any function.
"""

from __future__ import annotations

import enum
import io
import pickle
import pickletools
import socket
import socketserver
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ringtrain.protocol.limited_server import LimitedServer

MAX_BYTES = 1 << 20
"""per message to the rendezvous"""
MAX_SERVICE_BYTES = 1 << 14
"""per message to a service, which reads it before it can check the digest"""
_SERVICES = "horovod.runner.common.util.network"
_ELASTIC = "horovod.runner.elastic.worker"
ALLOWED = {
    (_SERVICES, "PingRequest"),
    (_SERVICES, "PingResponse"),
    (_SERVICES, "AckResponse"),
    (_ELASTIC, "HostsUpdatedRequest"),
    (_ELASTIC, "HostUpdateResult"),
}
"""modules and names of the classes that a message may contain: they only store their arguments"""


class NotPlain(pickle.UnpicklingError):
    """The pickle contains more than plain values."""


def _member(kind: Any, name: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Flag) and name in kind.__members__):
        raise NotPlain(f"got a pickle with the attribute {name} of {kind}, expected plain values")
    return kind[name]


def _either(one: Any, other: Any) -> Any:
    if not (isinstance(one, enum.Flag) and type(one) is type(other)):
        raise NotPlain("got a pickle that combines values, expected plain values")
    return one | other


OF_FLAGS = {("builtins", "getattr"): _member, ("_operator", "or_"): _either}
"""what stands for functions by which Python before 3.11.4 pickles an `enum.Flag`"""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OF_FLAGS:
            return OF_FLAGS[module, name]
        if (module, name) not in ALLOWED:
            raise NotPlain(f"got a pickle with {module}.{name}, expected plain values")
        return super().find_class(module, name)


def loads(data: bytes) -> Any:
    """Unpickles plain values. Raises NotPlain for anything else."""
    try:
        _check_sizes(data)
        return _Reader(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # an invalid pickle can raise anything
        raise NotPlain(f"got {len(data)} bytes that are no pickle of plain values ({error!r})") from error


def _check_sizes(data: bytes) -> None:
    """Raises ValueError for lengths and memo indices beyond the data's, for which Python would allocate memory."""
    for operation, argument, _ in pickletools.genops(data):  # checks the lengths
        if operation.name.endswith("PUT") and int(argument or 0) > len(data):
            raise ValueError(f"{operation.name} {argument}")


def restrict(network: Any, address: str) -> None:
    """Restricts Horovod's services and clients of this process. address: Where services listen; "": all interfaces."""

    class Wire(network.Wire):
        def read(self, file: Any) -> Any:
            """Reads a message of limited length with a valid digest; any other counts as a closed connection."""
            digest, header = file.read(network.secret.DIGEST_LENGTH), file.read(4)
            length = struct.unpack("i", header)[0] if len(header) == 4 else -1
            message = file.read(length) if 0 <= length <= MAX_SERVICE_BYTES else b""
            if not message or not network.secret.check_digest(self._key, message, digest):
                raise EOFError
            return loads(message)

    def find_port(make_server: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
        server = make_server((address, 0))
        return server, int(server.socket.getsockname()[1])

    handler = socketserver.StreamRequestHandler
    network.socketserver = SimpleNamespace(ThreadingTCPServer=LimitedServer, StreamRequestHandler=handler)
    network.Wire = Wire
    network.find_port = find_port
    network.cloudpickle = SimpleNamespace(dumps=network.cloudpickle.dumps, loads=loads)


def address_of(interface: str) -> str:
    """IPv4 address of an interface; "" if it does not exist or has none."""
    import psutil

    entries = psutil.net_if_addrs().get(interface, [])
    return next((str(entry.address) for entry in entries if entry.family == socket.AF_INET), "")
