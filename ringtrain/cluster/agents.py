"""Host agents of a job as the launcher has them: their processes, connections and messages."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringtrain.cluster import host_agent
from ringtrain.cluster.host_agent import SAYS
from ringtrain.cluster.job import Job
from ringtrain.errors import LaunchError

CONNECTING = 10
"""concurrent ssh connections that are not ready yet: by default, sshd, also of a bastion, takes as many that have not
authenticated yet, and closes further ones"""
CLOSED = re.compile(r"Connection (closed|reset) by ")
EXIT_S = 0.5
"""for an agent whose output has ended to exit"""
MAX_LINES = 20
MAX_NAMED = 10
"""lost hosts in a message"""


class HostsLost(LaunchError):
    """Hosts do not answer, or no longer, or their ranks do not start."""

    def __init__(self, hosts: Sequence[str], text: str) -> None:
        super().__init__(text)
        self.hosts = tuple(hosts)


@dataclass
class HostAgent:
    host: str
    """"": this one"""
    process: subprocess.Popen[bytes]
    ready: bool = False
    cleaned_up: bool = False
    closed: bool = False
    """has exited, and its output is read"""
    is_second: bool = False
    """only cleans up, where the first agent was killed or lost"""
    started_s: float = 0.0
    """time.monotonic() at the start of its process"""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    unfinished: bytes = b""
    hostname: str = ""
    """by which its host calls itself"""
    version: str = ""
    """of its host's ringtrain; "": not asked for"""
    networks: str = ""
    """of its host, see host_agent.local_networks"""
    num_signaled: int = -1
    """ranks that got a signal since they catch it; -1: not known, or none of its ranks is left"""
    reached: str = ""
    """IPv4 address by which ssh reaches its host; "": not known"""

    @property
    def name(self) -> str:
        return self.host or "this host"

    @property
    def has_exited(self) -> bool:
        return self.process.poll() is not None

    @property
    def messages(self) -> list[str]:
        """Output of ssh and of the login shell, since the agent was ready."""
        return [line for line in self.lines if line and not line.startswith(("@", SAYS))]

    @property
    def was_killed(self) -> bool:
        """Whether the agent was killed on its host; one that is cut off from the launcher cleans up by itself."""
        return self.ready and not self.cleaned_up and self.has_exited and not self.messages

    def send(self, order: str) -> None:
        """Sends a line. An agent that is gone has cleaned up already, or its host is lost."""
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), f"{order}\n".encode())  # type: ignore[union-attr]


class HostAgents:
    """The agents of one job's hosts, with what they have reported."""

    def __init__(self, job: Job, selector: selectors.BaseSelector, answer_timeout_s: float) -> None:
        self.job = job
        self.selector = selector
        self.answer_timeout_s = answer_timeout_s
        self.members: list[HostAgent] = []
        self.status: dict[int, tuple[int, str]] = {}
        """step and phase of ranks that have exited"""
        self.out_of_memory: set[str] = set()
        self.not_cleaned_up: list[str] = []
        """hosts whose agent was killed"""
        self._end_order = "end"

    def send(self, order: str) -> None:
        for agent in list(self.members):
            agent.send(order)

    # ---- start ----------------------------------------------------------------------------------------------------

    def connect(self, hosts: Sequence[str], is_used: bool, poll: Callable[[], None]) -> None:
        """Starts agents here and on other hosts; raises HostsLost for those that fail, after all others are ready."""
        raise_limits()
        waiting = deque(["", *hosts])
        lost: dict[str, str] = {}
        connecting: list[HostAgent] = []
        while waiting or connecting:
            while waiting and len(connecting) < CONNECTING:
                host = waiting.popleft()
                connecting.append(self.start(host, is_checked=bool(host) or is_used))  # is_used: this host has ranks
            poll()
            connecting = [agent for agent in connecting if not agent.ready]
            failed = [agent for agent in connecting if agent.has_exited]
            if failed:
                poll()
            lacking = [agent for agent in failed if any(f"{SAYS}lacks" in line for line in agent.lines)]
            if lacking:
                raise LaunchError(listed([self.why_lost(agent) for agent in lacking]))
            late_s = time.monotonic() - self.answer_timeout_s
            late = [agent for agent in connecting if agent.started_s < late_s]
            silent = [agent for agent in late if not agent.ready and agent not in failed]
            # The others go on connecting: a restart continues with all that answer.
            for agent in [*failed, *silent]:
                lost[agent.host] = self.why_lost(agent)
                connecting.remove(agent)
                self.drop(agent)
        if lost:
            raise HostsLost([*lost], listed([*lost.values()]))
        self._refuse_other_versions()

    def start(self, host: str, is_checked: bool) -> HostAgent:
        """Starts the agent of a host. is_checked: It must have the ranks' program."""
        environ, job = self.job.environment, self.job
        command = job.command if is_checked else ()
        argv = host_agent.argv(
            host,
            job.id,
            command,
            Path(job.working_directory or Path.cwd()),
            environ.get("PATH", os.defpath),
            environ.get("PYTHONPATH", ""),
            timeout_s=self.answer_timeout_s,
            port=job.ssh_port,
        )
        pipe = subprocess.PIPE
        try:
            # In its own session: signals of the terminal reach this process only, which forwards them.
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{host or 'this host'}: {argv[0]} cannot be started here: {error.strerror}") from error
        self.members.append(HostAgent(host, process, started_s=time.monotonic()))
        self.selector.register(process.stdout, selectors.EVENT_READ, self.members[-1])  # type: ignore[arg-type]
        return self.members[-1]

    def drop(self, agent: HostAgent) -> None:
        """Ends an agent's process, which then cleans up on its host."""
        self.members.remove(agent)
        if agent.was_killed:
            self.not_cleaned_up.append(agent.host)
        # A second agent that is still connecting exits by itself: nothing else would clean up.
        if not agent.is_second:
            agent.process.kill()
            agent.process.wait()
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.selector.unregister(agent.process.stdout)  # type: ignore[arg-type]
        for pipe in filter(None, (agent.process.stdin, agent.process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()

    def end(self, is_starting: bool = False) -> None:
        """Makes all agents clean up, and starts another one where one was killed; does nothing without agents."""
        if not self.members:
            return
        for agent in [agent for agent in self.members if agent.was_killed]:
            self.drop(agent)
        present = {agent.host for agent in self.members}
        for host in dict.fromkeys(self.not_cleaned_up):
            if host not in present:
                self.start_second(host)
        self.not_cleaned_up.clear()
        # The launcher may start more ranks until it is killed on this host: agents kill these as well.
        self._end_order = "end starting" if is_starting else "end"
        self.send(self._end_order)

    def replace_killed(self) -> None:
        """Starts another agent where one was killed since the order to clean up."""
        for agent in [agent for agent in self.members if agent.closed and not agent.cleaned_up]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(EXIT_S)  # its output ends a moment before
            if agent.was_killed and not agent.is_second:
                self.drop(agent)
                self.start_second(agent.host).send(self._end_order)
                self.not_cleaned_up.remove(agent.host)

    def start_second(self, host: str) -> HostAgent:
        """Starts an agent that waits for an order to clean up; where the first was killed, its host counts as ready."""
        second = self.start(host, is_checked=False)
        second.is_second, second.ready = True, host in self.not_cleaned_up
        return second

    def why_lost(self, agent: HostAgent) -> str:
        """Message about a host that is not ready, or no longer."""
        host = agent.name
        if any(line.startswith(f"{SAYS}lacks-folder") for line in agent.lines):
            folder = self.job.working_directory
            return f"{host} has no directory {folder}, where ranks start: create it there, or use --sync"
        if any(line.startswith(f"{SAYS}lacks") for line in agent.lines):
            name, path = self.job.command[0], self.job.environment.get("PATH", "")
            fix = f"start it by python {name}" if name.endswith(".py") else "install it, or use --sync-environment"
            return f"{host} has no {name!r} on PATH={path}: {fix}"
        lines = agent.messages
        if not lines and agent.has_exited:
            code = agent.process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            return f"{host}: its host agent {how}, without a message"
        telling = [line for line in lines if not CLOSED.match(line)] or lines
        why = telling[-1] if telling else f"no answer in {self.answer_timeout_s:g} s"
        return f"{host} does not answer: {why}"

    def _refuse_other_versions(self) -> None:
        versions = {agent.name: agent.version for agent in self.members if agent.version}
        for host, version in versions.items():
            if version == "none":
                raise LaunchError(
                    f"{host}: its {self.job.command[0]} has no ringtrain: set it up there, or start from a directory"
                    f" and with a PATH that all hosts share"
                )
            first, other = next(iter(versions.items()))
            if version != other:
                raise LaunchError(f"{host} has ringtrain {version}, {first} has {other}: install the same everywhere")

    # ---- messages -------------------------------------------------------------------------------------------------

    def read(self, agent: HostAgent, data: bytes) -> None:
        """Parses output of an agent; b"": its end."""
        complete, _, agent.unfinished = (agent.unfinished + (data or b"\n")).rpartition(b"\n")
        for line in complete.decode(errors="replace").splitlines():
            agent.lines.append(line.strip())
            if line.startswith(SAYS):
                self._take(agent, *line.removeprefix(SAYS).split())
        agent.closed = not data

    def _take(self, agent: HostAgent, kind: str = "", *rest: str) -> None:
        if kind == "ready":
            agent.ready = True
            while len(agent.lines) > 1:  # a login's greeting is no reason for a later loss
                agent.lines.popleft()
            agent.hostname = rest[0] if rest else ""
            agent.version = rest[1] if len(rest) > 1 else ""
        elif kind == "taken" and "".join(rest).isdecimal():
            agent.num_signaled = int("".join(rest)[:9])
        elif kind == "swept":
            agent.cleaned_up = True
        elif kind == "box":
            rank, step, *phase = [*rest, "", ""]
            if rank.isdecimal():
                with contextlib.suppress(ValueError):
                    self.status[int(rank)] = int(step), " ".join(phase).strip()
        elif kind == "networks":
            agent.networks = " ".join(rest)
        elif kind == "reached" and agent.host:
            agent.reached = "".join(rest)
        elif kind == "memory":
            self.out_of_memory.add(agent.host)

    # ---- networks -------------------------------------------------------------------------------------------------

    def of_hosts(self) -> list[HostAgent]:
        """Agents of the job's hosts, which need not include this one."""
        elsewhere = {agent.host for agent in self.members}
        is_used = any(host.name not in elsewhere for host in self.job.hosts)
        return [agent for agent in self.members if agent.host or is_used]

    def local_networks(self) -> tuple[str, ...]:
        agents = self.of_hosts()
        reached = {agent.reached for agent in agents if agent.reached}
        if not all(agent.host for agent in agents):
            for address in [*reached]:  # the others reach this host by the addresses that it sends from
                with contextlib.suppress(OSError):
                    reached.add(host_agent.source_address(address))
        return host_agent.local_networks([agent.networks for agent in agents], reached)


def listed(texts: Sequence[str]) -> str:
    """Texts in one line, the first MAX_NAMED of them."""
    more = len(texts) - MAX_NAMED
    return "; ".join([*texts[:MAX_NAMED], *([f"and {more} more hosts"] if more > 0 else [])])


def raise_limits() -> None:
    """Raises the limit of open files: an agent takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
