"""Socket filter for TensorFlow's gRPC servers, which listen on all interfaces without authentication.

The kernel filter (classic BPF, needs no privileges) drops packets from addresses outside the job, on each socket of
this process that has the port of a server. Connections from there that are older than the filter are closed, also if
the server has not accepted them yet. This module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SO_ATTACH_FILTER = 26
FIRST_LOOKS_S, LOOK_S = 0.001, 0.01
"""until the server listens, and after that"""
MAX_ADDRESSES = 1500  # two instructions each, of which the kernel allows 4096
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_LOAD_BYTE, _LOAD_WORD, _AND, _EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_ACCEPT = 0xFFFFFFFF
_LISTENS, _IS_OPEN, _NOT_ACCEPTED = "0A", ("01", "08"), "0"  # states and an inode in /proc/net/tcp
_VERSION_4 = "0000000000000000FFFF0000"  # begin of an IPv4 address in /proc/net/tcp6


@dataclass(frozen=True)
class _Socket:
    """Line of /proc/net/tcp."""

    inode: str
    state: str
    peer: int
    """IPv4 address; 0: none, or one of version 6"""


@contextlib.contextmanager
def only_for(addresses: Sequence[str], ports: Sequence[int]) -> Iterator[None]:
    """Restricts servers on these ports, started in this context, to clients at the addresses of the job's hosts.

    Loopback is allowed, IPv6 packets are dropped. Later servers on the same sockets are restricted, too.
    """
    over, seen = threading.Event(), set[str]()

    def look() -> bool:
        """Attaches the filter to new sockets; returns whether connections of strangers waited to be accepted."""
        sockets = _sockets(ports)
        strangers = {one.inode for one in sockets if one.state in _IS_OPEN and not _is_allowed(one.peer, addresses)}
        listeners = []
        for descriptor, one in _descriptors(sockets):
            if one.state == _LISTENS:
                listeners.append(descriptor)
            if one.inode not in seen:
                _attach(descriptor, addresses)
                if one.inode in strangers:
                    _hang_up(descriptor)
                seen.add(one.inode)
        if _NOT_ACCEPTED in strangers:
            for descriptor in listeners:
                _refuse_waiting(descriptor)
        return _NOT_ACCEPTED in strangers

    def keep_looking() -> None:
        with contextlib.suppress(OSError):  # the last call, below, reports the error
            while not over.wait(LOOK_S if seen else FIRST_LOOKS_S):
                look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    try:
        while look():  # the filter lets no more of them in
            pass
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


def _sockets(ports: Sequence[int]) -> list[_Socket]:
    """Sockets of this host with one of these local ports."""
    sockets = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, *_, inode = line.split()[:10]
                if int(local.rpartition(":")[2], 16) not in ports:
                    continue
                digits = remote.partition(":")[0]
                is_version_4 = len(digits) == 8 or digits.startswith(_VERSION_4)
                peer = 0
                if is_version_4:
                    peer = int.from_bytes(bytes.fromhex(digits[-8:]), sys.byteorder)
                sockets.append(_Socket(inode, state, peer))
    return sockets


def _descriptors(sockets: Sequence[_Socket]) -> list[tuple[int, _Socket]]:
    """Sockets of this process, with their descriptors."""
    by_target = {f"socket:[{one.inode}]": one for one in sockets}
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target in by_target:
                descriptors.append((int(name), by_target[target]))
    return descriptors


def _hang_up(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _refuse_waiting(descriptor: int) -> None:
    """Accepts and closes all connections that wait at a listening socket; those of other ranks connect again."""
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while poll.poll(0):
            with contextlib.suppress(BlockingIOError):  # the server was faster
                listener.accept()[0].close()


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
    mask, numbers = _allowed(addresses)
    steps = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_EQUAL, 1, 0, 0x40),  # IP version 4
        (_RETURN, 0, 0, 0),
    ]
    for kept, wanted in ((mask, numbers), (0xFF000000, [0x7F000000])):
        steps += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12), (_AND, 0, 0, kept)]
        for number in wanted:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ACCEPT)]
    steps.append((_RETURN, 0, 0, 0))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _allowed(addresses: Sequence[str]) -> tuple[int, list[int]]:
    """Mask of the IPv4 addresses of the job's hosts, and these addresses or their networks."""
    numbers = {int(ipaddress.IPv4Address(one)) for one in addresses if ":" not in one}
    mask = 0xFFFFFFFF if len(numbers) <= MAX_ADDRESSES else 0xFFFFFF00
    return mask, sorted({number & mask for number in numbers})


def _is_allowed(peer: int, addresses: Sequence[str]) -> bool:
    """Whether the filter accepts packets of an IPv4 address."""
    mask, numbers = _allowed(addresses)
    return peer >> 24 == 0x7F or peer & mask in numbers
