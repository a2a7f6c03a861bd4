"""Slots of hosts, shared out over trials."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ringtrain.cluster.hosts import Host

Place = Mapping[str, tuple[int, ...]]
"""slots by host"""


def allot(free: Mapping[str, Collection[int]], num_ranks: int) -> Place:
    """Slots for a trial: of one host where it fits, the fullest of these; else of as few hosts as it takes.

    Args:
        free: slots that nobody has, by host.
        num_ranks: of the trial.

    Returns:
        Nothing, if there are too few.
    """
    fitting = [name for name, slots in free.items() if len(slots) >= num_ranks]
    if fitting:
        name = min(fitting, key=lambda name: len(free[name]))
        return {name: tuple(sorted(free[name])[:num_ranks])}
    place, left = {}, num_ranks
    for name, slots in sorted(free.items(), key=lambda one: -len(one[1])):
        if left and slots:
            place[name] = tuple(sorted(slots)[:left])
            left -= len(place[name])
    return {} if left else place


def words_of(place: Place, hosts: Sequence[Host]) -> list[str]:
    """A place as options of ringtrain launch.

    Args:
        place: of a trial.
        hosts: that its slots are of.
    """
    used = [Host(host.name, max(numbers(host)) + 1) for host in hosts if host.name in place]
    chosen = [f"{str(host).rpartition(':')[0]}:{slot}" for host in used for slot in place[host.name]]
    return ["-H", ",".join(map(str, used)), "--include", ",".join(chosen)]


def numbers(host: Host) -> Sequence[int]:
    """Numbers of a host's slots."""
    return host.indices or range(host.slots)


def in_words(place: Place) -> str:
    """E.g. "host1:0,1"."""
    return " ".join(f"{host}:{','.join(map(str, taken))}" for host, taken in place.items())
