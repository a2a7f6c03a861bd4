"""Defects planted in the launcher: the negative controls of its simulation."""

from __future__ import annotations

from functools import partial
from typing import Any

from simulation.launched import disturb, simulate
from simulation.planted import Defect, seeds_to_find, text

from ringtrain.cluster import agents, exit_cause, restart, supervisor
from ringtrain.protocol import failures, reader


def nothing(*_: Any) -> None: ...


Supervisor, HostAgents = supervisor.Supervisor, agents.HostAgents
GRACE = "self._received_s + self.options.grace if is_final else"
WAITS = "max(delay_s, LEASE_S) if first_host in self.results[-1].not_cleaned_up else delay_s"
ENDS_MPIRUN = 'is_starting and self.options.launcher == "mpirun"'
DEFECTS = {
    "heartbeats are not sent": Defect(Supervisor, "_keep_alive", nothing),
    "--grace is ignored": text(Supervisor, "_forward", (GRACE, "time.monotonic() if is_final else")),
    "the order to clean up is not sent": text(HostAgents, "end", ("self.send(self._end_order)", "pass")),
    "the clean-up is not awaited": Defect(Supervisor, "_wait_for_clean_up", nothing),
    "a lost host is not noticed": Defect(Supervisor, "_check_agents", nothing),
    "the last failure is reported": text(
        reader.Reader, "first_failure", ("min(on", "max(on"), ("failures[0]", "failures[-1]")
    ),
    "a follow-up error is reported": Defect(failures.Failure, "is_consequence", False),
    "a restart does not wait for a lost rank 0": text(restart.Restarts, "delay_s", (WAITS, "delay_s")),
    "exit code 0 after a lost host": text(exit_cause, "decide", ("code == 0 and not silent and not lost", "code == 0")),
    "exit code 0 after a lost daemon": text(exit_cause, "decide", (" and not lost:", ":")),
    "exit code 0 after a missing rank": Defect(Supervisor, "_check_end", nothing),
    "a signal before ranks start is forgotten": text(
        Supervisor, "_poll_unless_stopped", ("if self._received:", "if self._received.clear():")
    ),
    "a second signal is ignored": text(Supervisor, "_forward", ("not known or not may_save", "not known")),
    "signals are not forwarded": Defect(Supervisor, "_signal", nothing),
    "a signal during the clean-up is forgotten": Defect(Supervisor, "was_signaled", False),
    "--start-timeout is ignored": text(Supervisor, "_check_start", ("now > began_s + self", "now > 9e9 + self")),
    "mpirun starts ranks where agents have cleaned up": text(
        Supervisor, "end", (ENDS_MPIRUN, "False"), ("self.agents.end(is_starting)", "self.agents.end()")
    ),
    "a killed agent is not replaced": text(HostAgents, "end", ("self.start_second(host)", "pass")),
    "an agent killed in the clean-up is not replaced": Defect(HostAgents, "replace_killed", nothing),
    "a second agent that connects slowly is ended": text(HostAgents, "drop", ("if not agent.is_second:", "if True:")),
    "the exit code of a follow-up error": text(
        exit_cause, "decide", ("code or failure.exit_code", "failure.exit_code")
    ),
}


KINDS: dict[str, tuple[str, ...]] = {
    "heartbeats are not sent": (),
    "--grace is ignored": ("SIGTERM", "SIGHUP"),
    "a lost host is not noticed": ("die", "cut"),
    "the last failure is reported": ("exception",),
    "a restart does not wait for a lost rank 0": ("cut",),
    "exit code 0 after a lost host": ("die", "freeze"),
    "exit code 0 after a lost daemon": ("freeze", "daemon"),
    "exit code 0 after a missing rank": ("starting exit 0",),
    "a second signal is ignored": ("SIGTERM twice", "SIGINT twice"),
    "signals are not forwarded": ("SIGTERM", "SIGINT"),
    "a signal during the clean-up is forgotten": ("then SIGTERM", "die", "cut"),
    "a killed agent is not replaced": ("agent",),
    "an agent killed in the clean-up is not replaced": ("then agent", "ssh", "agent"),
    "the exit code of a follow-up error": ("killed", "exit"),
}
"""faults among which a few schedules find a defect; the others are found among all"""


def schedules_to_find(name: str, first: int, count: int) -> int:
    """Number of schedules until the defect is found; 0: not within `count`."""
    return seeds_to_find(
        DEFECTS[name], partial(simulate, directed=partial(disturb, kinds=KINDS.get(name))), first, count
    )
