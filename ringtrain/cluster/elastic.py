"""Supervises a job whose hosts join and leave.

The user's program lists the hosts. Horovod's driver ends the job if one host cannot start its rank, so it is shown only
hosts with a host agent: those that answer and have the program and the same ringtrain. Every host that the job has ever
used therefore has an agent that cleans up.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.cluster import host_agent
from ringtrain.cluster.exit_cause import Ending
from ringtrain.cluster.host_agent import LEASE_S
from ringtrain.cluster.hosts import Host, parse_hosts
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.processes import call, say
from ringtrain.cluster.supervisor import HostAgent, HostsLost, Stopped, Supervisor, SupervisorOptions
from ringtrain.errors import LaunchError
from ringtrain.protocol.env import JOB
from ringtrain.protocol.placement import PlannedPlacement, RankPlacement

ASK_S = 1.0
SCRIPT_S = 30.0  # timeout of the user's program
AGAIN_S = 15.0  # before a host that does not answer is tried again
UNHEARD_S = 20.0  # after which an idle host is announced again
PUBLISHED = "ringtrain-discovery-"


def discovery(script: str, fixed: Sequence[Host]) -> Callable[[], tuple[Host, ...]]:
    """Function that returns the current hosts: those a program prints as lines host:slots, or `fixed` if it is ""."""
    if not script:
        return lambda: tuple(fixed)
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise LaunchError(f"got --host-discovery {script}, expected a program and its arguments: {error}") from error

    def ask() -> tuple[Host, ...]:
        lines = [line.strip() for line in call(words, SCRIPT_S, only_good=True).splitlines()]
        listed = ",".join(line for line in lines if line and not line.startswith("#"))
        return parse_hosts(listed, script) if listed else ()

    return ask


@dataclass
class ElasticHost:
    """A host of an elastic job, from its first listing on."""

    host: Host
    keeper: HostAgent | None = None
    published_s: float = 0.0
    """time.monotonic() since which Horovod is shown it; 0: it is not"""
    ask_again_s: float = 0.0


class ElasticSupervisor(Supervisor):
    """Supervisor of a job under elastic horovodrun, which starts once `job.num_ranks` slots are there."""

    says_last = False

    def __init__(self, name: str, job: Job, terms: SupervisorOptions, discover: Callable[[], tuple[Host, ...]]) -> None:
        super().__init__(name, job, terms)
        self.discover = discover
        self.guests: dict[str, ElasticHost] = {}
        self.complaint = ""
        self._listed: tuple[Host, ...] | None = None
        self._looked_up: set[str] = set()
        self._published: Path | None = None
        self._text = ""
        self._asking = threading.Thread(target=self._ask, daemon=True)

    def planned(self, plan: Plan) -> None:
        """Finds the file that Horovod's driver reads."""
        self._published = next((Path(path) for path in plan.files if Path(path).name.startswith(PUBLISHED)), None)

    def _ask(self) -> None:
        while not self._over.wait(ASK_S if self._listed is not None else 0):
            try:
                listed = self.discover()
                new = {host.name for host in listed} - self._looked_up
                self.here |= host_agent.here(new)
                self._looked_up |= new
                self._listed, self.complaint = listed, ""
            except LaunchError as error:
                if not self.complaint:
                    say(f"{error}; the hosts stay as they are")
                self.complaint = str(error)

    # ---- hosts ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Starts agents until enough hosts are ready and none is pending. Raises LaunchError if there are too few."""
        self._raise_limits()
        self._start_keeper("", look=True)
        self._asking.start()
        deadline = time.monotonic() + self.terms.start_timeout_s
        while True:
            self._poll()
            if self._received:
                self.stopped_by = self._received[0]
                raise Stopped(self.stopped_by)
            self._look_for_lost_hosts()
            self._welcome()
            pending = self._listed is None or any(guest.keeper and not guest.keeper.ready for guest in self._present())
            enough = sum(guest.host.slots for guest in self._present() if guest.published_s) >= self.job.num_ranks
            if enough and not pending:
                return
            if time.monotonic() > deadline:
                if enough:
                    return
                said = self.complaint or ", ".join(str(guest.host) for guest in self._present()) or "no host"
                raise LaunchError(
                    f"{self.job.num_ranks} ranks are to begin with, but in {self.terms.start_timeout_s:g} s there were"
                    f" too few hosts that answer ({said}): look at the hosts, or give --min-np"
                )

    def _present(self) -> list[ElasticHost]:
        """Hosts listed now."""
        listed = {host.name for host in self._listed or ()}
        return [guest for name, guest in self.guests.items() if name in listed]

    def _welcome(self) -> None:
        """Starts agents on new hosts, and shows Horovod those that are ready."""
        now = time.monotonic()
        for host in self._listed or ():
            guest = self.guests.setdefault(host.name, ElasticHost(host))
            guest.host = host
            if guest.keeper is None and now >= guest.ask_again_s:
                here = self._keepers[0] if host.name in self.here else None
                guest.keeper = here or self._start_keeper(host.name, look=True)
        for guest in self._present():
            if guest.keeper and guest.keeper.ready and not guest.published_s and self._is_alike(guest):
                guest.published_s = now
        self._publish(now)

    def _is_alike(self, guest: ElasticHost) -> bool:
        """Whether a host has the same ringtrain as this one; if not, says so once and excludes it."""
        own, other = (self._version(each) for each in (self._keepers[0], guest.keeper))
        if own == other:
            return True
        if guest.ask_again_s < float("inf"):
            say(f"{guest.host.name} has ringtrain {other}, this host {own}: left out; install the same everywhere")
            guest.ask_again_s = float("inf")
        return False

    def _version(self, each: HostAgent | None) -> str:
        lines = [line.split() for line in (each.lines if each else ()) if line.startswith(f"{host_agent.SAYS}ready")]
        return lines[0][2] if lines and len(lines[0]) > 2 else ""

    def _publish(self, now: float) -> None:
        """Writes the file that Horovod's driver reads each second.

        Horovod announces a change once, even if the ranks are restarting. An idle host is therefore removed for 3 s and
        listed again.
        """
        shown = []
        used = {seat.host for seat in self.reports.seats}
        for guest in self._present():
            if not guest.published_s:
                continue
            for_s = now - guest.published_s
            if self._process and for_s > UNHEARD_S and guest.keeper and self._name_of(guest.keeper) not in used:
                if for_s > UNHEARD_S + 3 * ASK_S:
                    guest.published_s = now
                else:
                    continue
            shown.append(guest.host)
        text = "".join(f"{host.name}:{host.slots}\n" for host in shown)
        if self._published and text != self._text:
            part = self._published.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, self._published)
            self._text = text

    def _look_for_lost_hosts(self) -> None:
        """Drops hosts whose agents were lost; an agent cut off from the launcher cleans up when its lease expires."""
        for each in list(self._keepers):
            if each.process.poll() is None:
                continue
            self._poll()
            if not each.host:
                raise HostsLost([""], f"lost the keeper of this host while it ran: {self._why(each)}")
            self._keepers.remove(each)
            self._let_go(each)
            guest = self.guests[each.host]
            if not each.ready and not guest.ask_again_s:
                say(f"{self._why(each)}; left out until it does")
            wait_s = LEASE_S + AGAIN_S if each.ready else AGAIN_S  # the lost agent may still be cleaning up
            guest.keeper, guest.published_s, guest.ask_again_s = None, 0.0, time.monotonic() + wait_s
            if each.ready and self._process:
                say(f"lost {each.host}: {self._why(each)}; goes on without")
                self._publish(time.monotonic())
                self._end_ssh_to(each.host)

    def _end_ssh_to(self, host: str) -> None:
        """Kills horovodrun's own ssh to a lost host, which would wait for it for a long time."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                ours = f"{JOB}={self.name}".encode() in (folder / "environ").read_bytes()
                if ours and os.path.basename(words[0]) == "ssh" and host in words:
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue  # the process has exited, or is another user's

    # ---- while it runs --------------------------------------------------------------------------------------------

    def _look_at(self, expected: PlannedPlacement, began_s: float) -> None:
        """Starts agents on new hosts; there is no planned placement to compare with."""
        self._welcome()
        if not self.reports.seats and time.monotonic() > began_s + self.terms.start_timeout_s and not self.stopped_by:
            raise LaunchError(
                f"no rank has begun after {self.terms.start_timeout_s:g} s: look at what horovodrun says above; on"
                f" hosts whose interfaces differ in name it finds none: give --network-interface, or more time:"
                f" --start-timeout"
            )

    def _look_back_at(self, expected: PlannedPlacement, returncode: int) -> None:
        """Accepts any number of ranks at the end."""

    def _keeper_of(self, seat: RankPlacement) -> str:
        """Host whose agent can reach a rank's process."""
        return next((each.host for each in self._keepers if self._name_of(each) == seat.host), "")

    def _name_of(self, each: HostAgent) -> str:
        """Name by which an agent's host calls itself."""
        lines = [line.split() for line in each.lines if line.startswith(f"{host_agent.SAYS}ready")]
        return lines[0][1] if lines else ""

    def conclude(
        self, returncode: int, launcher: str, expected: PlannedPlacement, lost: HostsLost | None = None
    ) -> Ending:
        """Result without a planned placement: the host of each rank is no longer known."""
        return super().conclude(returncode, launcher, PlannedPlacement(expected.size), lost)
