"""Socket filter for TensorFlow's gRPC servers, which listen on all interfaces without authentication.

The kernel filter (classic BPF, needs no privileges) drops packets from addresses outside the job, on each socket of
this process that has the port of a server. This module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

SO_ATTACH_FILTER = 26
LOOK_S = 0.01
MAX_ADDRESSES = 1500  # two instructions each, of which the kernel allows 4096
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_LOAD_BYTE, _LOAD_WORD, _AND, _EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_ACCEPT = 0xFFFFFFFF


@contextlib.contextmanager
def only_for(addresses: Sequence[str], ports: Sequence[int]) -> Iterator[None]:
    """Restricts servers on these ports, started in this context, to clients at the addresses of the job's hosts.

    Loopback is allowed, IPv6 packets are dropped. Later servers on the same sockets are restricted, too.
    """
    over, seen = threading.Event(), set[str]()

    def look() -> None:
        for descriptor, name in _sockets(ports):
            if name not in seen:
                _attach(descriptor, addresses)
                seen.add(name)

    def keep_looking() -> None:
        with contextlib.suppress(OSError):  # the last call, below, reports the error
            while not over.wait(LOOK_S):
                look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    try:
        look()
    except OSError as error:
        wanted, allowed = ",".join(map(str, ports)), ",".join(addresses) or "127.0.0.1"
        accept = f"iptables -I INPUT -p tcp -m multiport --dports {wanted}"
        print(
            f"ringtrain: TensorFlow's server on port {wanted} obeys everyone who reaches this host"
            f" ({error.strerror or error}): use a private network, or as root on this host:"
            f" {accept} -j DROP; {accept} -s {allowed} -j ACCEPT; {accept} -i lo -j ACCEPT",
            file=sys.stderr,
            flush=True,
        )


def _sockets(ports: Sequence[int]) -> list[tuple[int, str]]:
    """Sockets of this process with one of these local ports: descriptor and the kernel's name."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) in ports:
                    inodes.add(f"socket:[{fields[9]}]")
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target in inodes:
                sockets.append((int(name), target))
    return sockets


def _attach(descriptor: int, addresses: Sequence[str]) -> None:
    """Attaches the filter to a socket; raises OSError if the kernel rejects it or all addresses are IPv6."""
    version_4 = [one for one in addresses if ":" not in one]  # ranks connect over the first IP version that answers
    if addresses and not version_4:
        raise OSError(f"the hosts have addresses of IPv6 alone: {', '.join(addresses)}")
    code = program(version_4)
    held = ctypes.create_string_buffer(code)
    with socket.socket(fileno=os.dup(descriptor)) as own:
        own.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(held))
        )


def program(addresses: Sequence[str]) -> bytes:
    """Filter that accepts IPv4 packets from these addresses, or their /24s if over MAX_ADDRESSES, and from loopback."""
    numbers = sorted({int(ipaddress.IPv4Address(one)) for one in addresses})
    mask = 0xFFFFFFFF if len(numbers) <= MAX_ADDRESSES else 0xFFFFFF00
    steps = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_EQUAL, 1, 0, 0x40),  # IP version 4
        (_RETURN, 0, 0, 0),
    ]
    for kept, wanted in ((mask, sorted({number & mask for number in numbers})), (0xFF000000, [0x7F000000])):
        steps += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12), (_AND, 0, 0, kept)]
        for number in wanted:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ACCEPT)]
    steps.append((_RETURN, 0, 0, 0))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
