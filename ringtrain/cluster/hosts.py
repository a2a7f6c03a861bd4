"""Hosts and their slots, from hostfiles of every format and from the command line.

Each line of a hostfile names one host; the formats may be mixed:

    host1 slots=4 max_slots=8     Open MPI, DeepSpeed
    host2:4                       MPICH, Intel MPI, horovodrun
    host3                         one slot for each line, as PBS and LSF write it
    [fe80::1]:4                   IPv6, with brackets wherever a number follows a colon

A # begins a comment. A host's number of slots is given once: a second number is an error. Its name alone adds one slot,
anywhere in the file. Open MPI 4.1 follows the same two rules.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringtrain.errors import HostsError

MAX_BYTES = 16 * 2**20
"""of a hostfile"""


@dataclass(frozen=True)
class Host:
    """A machine that ranks run on; its name is safe to pass to a shell, ssh or a launcher."""

    name: str
    """as ssh knows it; may be an IPv6 address, without brackets"""
    slots: int = 1
    max_slots: int = 0
    """maximum number of ranks with --oversubscribe; 0: no limit"""
    indices: tuple[int, ...] = ()
    """indices of these slots (GPUs) on the machine, if a filter removed some before them; empty: the first ones"""

    def __post_init__(self) -> None:
        """Raises HostsError for an invalid name."""
        if not is_name(self.name):
            raise HostsError(f"got {shown(self.name)}, expected {EXPECTED_NAME}")

    def __str__(self) -> str:
        if ":" in self.name:
            return f"[{self.name}]:{self.slots}"
        return f"{self.name}:{self.slots}"


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Reads a hostfile of any format; raises HostsError with the file and line. Hosts in order of first mention."""
    return parse_hostfile(read_text(path), _title(path))


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """Hosts of a hostfile's text, in order of first mention. Raises HostsError for an invalid line or no host."""
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.split("\n"), start=1))
    return collect((parse_line(line, f"{source}:{number}") for number, line in lines if line), source)


def parse_hosts(text: str, source: str = "-H") -> tuple[Host, ...]:
    """Hosts such as "host1:4,host2:4", "[fe80::1]:4" or "host1,host1" (two slots). Raises HostsError."""
    items = enumerate(text.split(","), start=1)
    return collect((parse_line(item.strip(), f"{source}, item {number}") for number, item in items), source)


def take(hosts: Sequence[Host], num_ranks: int, oversubscribe: bool = False) -> tuple[Host, ...]:
    """Assigns ranks to hosts in order, filling each host's slots; returns the hosts used, with a slot for each rank."""
    if num_ranks < 1:
        raise HostsError(f"got -np {num_ranks}, expected 1 rank or more")
    num_slots = sum(host.slots for host in hosts)
    if num_ranks > num_slots and not oversubscribe:
        raise HostsError(
            f"got -np {num_ranks}, but {count(len(hosts), 'host')} with {count(num_slots, 'slot')} in all"
            f" ({_listed(hosts)}): ask for fewer ranks, name more hosts, or allow more ranks than slots with"
            f" --oversubscribe"
        )
    limits = [host.max_slots or max(MAX_SLOTS, host.slots) for host in hosts]
    if num_ranks > sum(limits):
        raise HostsError(
            f"got -np {num_ranks}, but {count(len(hosts), 'host')} that take {count(sum(limits), 'rank')} at most"
            f" ({_listed(hosts)}): ask for fewer ranks, or raise max_slots (up to {MAX_SLOTS} for each host)"
        )
    used, left = [], num_ranks
    for host in hosts:
        used.append(min(host.slots, left))
        left -= used[-1]
    # Ranks beyond the slots are distributed evenly, the first hosts get one more, as in Open MPI.
    while left:
        not_full = [place for place, limit in enumerate(limits) if used[place] < limit]
        share, one_more = divmod(left, len(not_full))
        for order, place in enumerate(not_full):
            extra = min(share + (order < one_more), limits[place] - used[place])
            used[place] += extra
            left -= extra
    return tuple(Host(host.name, n, 0, host.indices[:n]) for host, n in zip(hosts, used, strict=True) if n)


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Keeps hosts, or slots of them, by items such as "host1,host2:0-1,host2:3", counted from 0; include "": all."""
    wanted = _named(hosts, include, "--include") if include else None
    unwanted = _named(hosts, exclude, "--exclude") if exclude else {}
    kept = []
    for host in hosts:
        slots = _indices(host)
        if wanted is not None:
            slots = [slot for slot in slots if slot in wanted.get(_key(host.name), ())]
        gone = unwanted.get(_key(host.name))
        if gone:
            slots = [slot for slot in slots if slot not in gone]
        if slots:
            indices = tuple(slots)
            if indices == tuple(range(len(slots))):
                indices = ()  # the first ones
            kept.append(replace(host, slots=len(slots), indices=indices))
    if not kept:
        num_slots = sum(host.slots for host in hosts)
        raise HostsError(
            f"got --include {shown(include)} --exclude {shown(exclude)}, which leave none of"
            f" {count(num_slots, 'slot')} ({_listed(hosts)}): expected at least one"
        )
    return tuple(kept)


def collect(mentions: Iterable[Mention], source: str) -> tuple[Host, ...]:
    """Merges mentions into hosts, in order of first mention. `source` is for messages."""
    merged: dict[str, tuple[Mention, int]] = {}
    for mention in mentions:
        key = _key(mention.name)
        first, before = merged.get(key, (mention, 0))
        if before and mention.slots is not None:
            raise HostsError(
                f"{mention.where}: got {mention.name} with {count(mention.slots, 'slot')}, expected each host's slots"
                f" once: it has {before} since {first.where}"
            )
        slots, limit = before + (mention.slots or 1), first.max_slots or MAX_SLOTS
        if slots > limit:
            raise HostsError(
                f"{mention.where}: got {count(slots, 'slot')} for {mention.name}, expected {limit} at most"
            )
        merged[key] = first, slots
    if not merged:
        raise HostsError(f"{source}: got no host, expected {EXPECTED_HOST} at least once")
    return tuple(Host(first.name, slots, first.max_slots) for first, slots in merged.values())


def read_text(path: Path) -> str:
    """Reads a small text file. Raises HostsError if it cannot be read, is too large or is binary."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HostsError(f"{_title(path)}: cannot be read: {reason}: expected a hostfile") from error
    if len(content) > MAX_BYTES:
        raise HostsError(f"{_title(path)}: got more than {MAX_BYTES:,} bytes, expected a hostfile")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise HostsError(f"{_title(path)}: got a binary file, expected a hostfile: text with a host per line")
    return text


def _named(hosts: Sequence[Host], text: str, option: str) -> dict[str, set[int]]:
    """Slots that a filter names, by host."""
    known = {_key(host.name): host for host in hosts}
    named: dict[str, set[int]] = {}
    for number, item in enumerate(text.split(","), start=1):
        where = f"{option}, item {number}"
        name, slots = divide(item.strip(), where)
        host = known.get(_key(name))
        if not host:
            raise HostsError(f"{where}: got {name}, expected one of {count(len(hosts), 'host')}: {_listed(hosts)}")
        there = _indices(host)
        if slots is None:
            named[_key(name)] = set(there)
            continue
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", slots)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or first not in there or last not in there:
            raise HostsError(
                f"{where}: got slot {shown(slots)} of {name}, expected {there[0]} to {there[-1]}, or two that rise"
            )
        named.setdefault(_key(name), set()).update(slot for slot in there if first <= slot <= last)
    return named


def _indices(host: Host) -> Sequence[int]:
    return host.indices or range(host.slots)


def _key(name: str) -> str:
    """Name for comparisons: neither ssh nor DNS distinguishes case."""
    return name.lower()


def _title(path: Path) -> str:
    return str(path) if str(path).isprintable() else repr(str(path))


def _listed(hosts: Sequence[Host]) -> str:
    text = ", ".join(map(str, hosts[:4]))
    if len(hosts) > 4:
        text += ", ..."
    return text


def count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number:,} {noun}s"


MAX_SLOTS = 4096
"""of one host; more is taken for a typing error"""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
IPV4 = re.compile(r"[0-9]+(\.[0-9]+){3}")
IPV6 = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")
EXPECTED_NAME = (
    "a host's name of letters, digits, '.', '-' and '_', or an IPv6 address (a user's name goes to ~/.ssh/config)"
)
EXPECTED_HOST = "'host', 'host:4' or 'host slots=4'"


@dataclass(frozen=True)
class Mention:
    where: str
    """for messages: "cluster.txt:3" """
    name: str
    slots: int | None = None
    """None: the name alone, which adds one slot"""
    max_slots: int = 0


def parse_number(text: str, where: str) -> int:
    """Number of slots, 1 to MAX_SLOTS. Raises HostsError for anything else."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise HostsError(f"{where}: got {shown(text)} slots, expected a number from 1 to {MAX_SLOTS}")
    return int(text)


def checked_name(text: str, where: str) -> str:
    """Valid host name, with an address in its shortest form. Raises HostsError for an invalid or unsafe one."""
    if not is_name(text):
        raise HostsError(f"{where}: got {shown(text)}, expected {EXPECTED_NAME}")
    if IPV4.fullmatch(text):
        with contextlib.suppress(OSError):  # not an address, but a name of numbers
            return socket.inet_ntoa(socket.inet_aton(text))  # as ssh reads it: 010 is 8
    if ":" not in text:
        return text
    return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, text))


def parse_line(line: str, where: str) -> Mention:
    """Parses one line of a hostfile, without its comment. Raises HostsError if it has none of the formats."""
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
    """Splits 'host:4' into host and '4', 'host' into host and None. Raises HostsError for an invalid host name."""
    match = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", word)
    if match:
        return checked_name(match[1], where), match[2]
    if word.count(":") != 1:
        return checked_name(word, where), None
    name, _, number = word.partition(":")
    return checked_name(name, where), number


def is_name(text: str) -> bool:
    """Returns whether a text is a host name or address that is safe to pass to a shell, ssh or a launcher."""
    if ":" not in text:
        return NAME.fullmatch(text) is not None
    try:
        # An address with a zone, fe80::1%eth0, is not: the zone is an interface of this host alone.
        return IPV6.fullmatch(text) is not None and len(socket.inet_pton(socket.AF_INET6, text)) == 16
    except OSError:
        return False


def has_domain(name: str) -> bool:
    """Returns whether a host's name has more parts than one, such as node1.cluster.example, and is no address."""
    return "." in name and ":" not in name and not IPV4.fullmatch(name)


def shown(text: str) -> str:
    """Received text, quoted and shortened for a message."""
    if len(text) > 60:
        text = text[:57] + "..."
    return repr(text)
