"""What to run where, and the command that does: plain values, of which everything before run.py is a function."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ringtrain.cluster.hosts import Host


@dataclass(frozen=True)
class Job:
    """What to run where."""

    command: tuple[str, ...]
    """program and arguments that every rank runs"""
    num_ranks: int
    hosts: tuple[Host, ...]
    """with exactly as many slots used as there are ranks: see hosts.take"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """of the launching process; what of it reaches the ranks is decided by forwarded"""
    forward: tuple[str, ...] = ()
    """names handed on besides the usual ones"""
    working_directory: str = ""
    """folder that ranks start in; empty: where the launcher stands"""
    bind: Literal["none", "core"] = "none"
    """none: ranks may use all cores of their host; core: each has cores of its own"""
    network: Literal["tcp", "ucx"] = "tcp"
    """TCP, or InfiniBand and RoCE through UCX"""
    subnet: str = ""
    """CIDR of the network that ranks talk over, e.g. 10.1.0.0/16; empty: any"""
    ssh_port: int = 0
    """0: as ssh itself has it configured"""
    threads_per_rank: int = 0
    """CPU threads; 0: left to the ranks"""
    oversubscribe: bool = False
    """more ranks than slots are allowed"""
    output: str = ""
    """folder that keeps a log per rank; empty: none"""
    yield_when_idle: bool = False
    """MPI gives the processor away while it waits: for hosts whose ranks fill their cores"""


@dataclass(frozen=True)
class Flag:
    """Some words of a command line, and why they are there."""

    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """A command, as one launcher wants it."""

    flags: tuple[Flag, ...]
    """the launcher's words in their order, without the ranks' command"""
    command: tuple[str, ...]
    """program and arguments that every rank runs"""
    env: Mapping[str, str] = field(default_factory=dict)
    """what the launcher's own environment gets besides what it has"""
    env_reasons: Mapping[str, str] = field(default_factory=dict)
    """why, by name"""
    files: Mapping[str, str] = field(default_factory=dict)
    """files to be written before it starts: path and text"""

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line."""
        return (*(word for flag in self.flags for word in flag.words), *self.command)

    def shell(self) -> str:
        """The command as a line that can be pasted into a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*settings, shlex.join(self.argv)])
