"""Hosts and their slots, from hostfiles of every format and from the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A machine that ranks run on."""

    name: str
    """as ssh knows it; may be an IPv6 address, without brackets"""
    slots: int = 1
    """ranks that it takes"""
