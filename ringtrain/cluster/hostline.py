"""One host as a line of a hostfile, or an item of -H, writes it; and what may be a host's name at all."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from ringtrain.errors import HostsError

MAX_SLOTS = 4096
"""of one host; more is taken for a slip of the keyboard"""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
IPV6 = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")
EXPECTED_NAME = (
    "a host's name of letters, digits, '.', '-' and '_', or an IPv6 address (a user's name goes to ~/.ssh/config)"
)
EXPECTED_HOST = "'host', 'host:4' or 'host slots=4'"


@dataclass(frozen=True)
class Mention:
    """A host as one place names it."""

    where: str
    """for messages: "cluster.txt:3" """
    name: str
    slots: int | None = None
    """None: the name alone, for one slot more"""
    max_slots: int = 0


def parse_number(text: str, where: str) -> int:
    """Reads a number of slots.

    Raises:
        HostsError: no number, zero, or too large.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise HostsError(f"{where}: got {shown(text)} slots, expected a number from 1 to {MAX_SLOTS}")
    return int(text)


def checked_name(text: str, where: str) -> str:
    """Reads a host's name; an IPv6 address comes back in its shortest form.

    Raises:
        HostsError: it is none, or not safe to hand to a shell.
    """
    if not is_name(text):
        raise HostsError(f"{where}: got {shown(text)}, expected {EXPECTED_NAME}")
    return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, text)) if ":" in text else text


def parse_line(line: str, where: str) -> Mention:
    """Reads one line of a hostfile.

    Args:
        line: without its comment, e.g. "host1 slots = 4".
        where: it stands, for messages.

    Raises:
        HostsError: it is in none of the formats.
    """
    spaced = " ".join([*line.replace("=", " = ").split(), ""])
    word, *settings = spaced.replace(" = ", "=").split() or [""]
    name, number = divide(word, where)
    given = {"slots": number} if number is not None else {}
    for setting in settings:
        key, _, value = setting.replace("max-slots", "max_slots").partition("=")
        if key not in ("slots", "max_slots") or key in given:
            problem = f"{key} twice" if key in given else shown(setting)
            raise HostsError(f"{where}: got {problem}, expected {EXPECTED_HOST}, then max_slots=8 or nothing")
        given[key] = value
    address, _, last = word.rpartition(":")
    if number is None and not settings and ":" in address and last.isdecimal() and is_name(address):
        raise HostsError(
            f"{where}: got {word}, which may mean {last} slots of {address} or an address in full:"
            f" expected [{address}]:{last} or [{word}]"
        )
    numbers = {key: parse_number(value, where) for key, value in given.items()}
    max_slots = numbers.get("max_slots", 0)
    return Mention(where, name, numbers.get("slots", max_slots or None), max_slots)


def divide(word: str, where: str) -> tuple[str, str | None]:
    """Divides 'host:4' into host and 4, and 'host' into host and None.

    Raises:
        HostsError: what stands before the colon is no host's name.
    """
    if match := re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", word):
        return checked_name(match[1], where), match[2]
    if word.count(":") != 1:
        return checked_name(word, where), None
    name, _, number = word.partition(":")
    return checked_name(name, where), number


def is_name(text: str) -> bool:
    """Whether this is a name or an address that neither a shell, ssh nor a launcher can take for anything else.

    An address with a zone, fe80::1%eth0, is none: the zone names an interface of this host and says nothing on another.
    """
    if ":" not in text:
        return NAME.fullmatch(text) is not None
    try:
        return IPV6.fullmatch(text) is not None and len(socket.inet_pton(socket.AF_INET6, text)) == 16
    except OSError:
        return False


def shown(text: str) -> str:
    """What was received, as one short line in quotes."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
