"""The next attempt of a job, started ahead: its ranks have loaded TensorFlow and wait, which shortens a restart."""

from __future__ import annotations

import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ringtrain.cluster import restart
from ringtrain.cluster.host_agent import LEASE_S
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.processes import say
from ringtrain.cluster.supervisor import Stopped, Supervisor
from ringtrain.errors import LaunchError
from ringtrain.protocol import as_main, gate
from ringtrain.protocol.env import GATE

AFTER_S = 5.0
"""seconds after hvd.init() in which the job that runs gets the processors for its first steps"""
OPEN_S = 5.0
"""seconds for hosts to let ranks begin"""
READ_S = 0.2
"""seconds between two looks at what waiting ranks have printed"""


class WaitingRanks(Supervisor):
    """Supervisor of a job whose ranks are started by one thread, and begin and are supervised in another.

    was_told: Hosts were told to let ranks begin, and some may have done so.
    """

    was_told = False

    def stand_by(self, planner: Callable[[Job], Plan]) -> None:
        """Starts the ranks, silently."""
        self.output.is_silent = True
        plan = self.ready(planner)
        self._start(plan)
        self.plan = plan  # last: it tells the other thread that there are ranks

    def catch_up(self) -> None:
        """Reads what has been printed."""
        while self._selector.select(0):
            self._poll()

    def begin(self, attempt: str) -> bool:
        """Lets the ranks begin with an attempt, as JSON; returns whether all of them could."""
        if not self._process or not self.plan:
            return False
        self.catch_up()
        is_lost = self._process.poll() is not None or any(agent.has_exited for agent in self.agents.members)
        if is_lost or len(self.reports.ranks) < self.planned_placement.size:
            return False
        self.output.is_silent = False
        self.agents.send(gate.order(self.job.environment[GATE], attempt))
        self.was_told = True
        deadline = time.monotonic() + OPEN_S
        while time.monotonic() < deadline and any(agent.has_opened is None for agent in self.agents.members):
            self._poll()
        return all(agent.has_opened for agent in self.agents.members)

    def give_up(self) -> None:
        """Ends a start that is under way; nothing more is printed."""
        self.output.is_silent = True
        self._receive(signal.SIGTERM, None)


class Standby:
    """Ranks that wait for a restart; a context manager, which ends them.

    planner: Makes the plan of a job.
    """

    def __init__(self, planner: Callable[[Job], Plan], options: LaunchOptions) -> None:
        self.planner, self.options = planner, options
        self._waiting: list[WaitingRanks] = []
        """one, once the thread has made it"""
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        """nothing more is started, nor read, by the thread"""
        self._ending: list[threading.Thread] = []
        self._variables: dict[str, str] = {}

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread:
            _end(self._thread, self._waiting)
        for thread in self._ending:
            thread.join()

    def follow(self, supervised: Supervisor, job: Job) -> None:
        """Lets ranks stand by that could replace those of a job, once these have called hvd.init()."""
        supervised.when_stopped = self.give_up
        supervised.when_initialized = partial(self._prepare, job, supervised.reports.variables)

    def _prepare(self, job: Job, variables: Mapping[str, str]) -> None:
        """Starts them, once, in another thread. variables: What the script has set before it loaded TensorFlow."""
        if self._thread is None:
            self._is_over, self._waiting = threading.Event(), []
            start = partial(self._start, job, variables, self._is_over, self._waiting)
            self._thread = threading.Thread(target=start, daemon=True)
            self._thread.start()

    def _start(
        self, job: Job, variables: Mapping[str, str], is_over: threading.Event, made: list[WaitingRanks]
    ) -> None:
        if is_over.wait(AFTER_S):
            return
        self._variables |= variables
        next_job = replace(
            job,
            id=uuid.uuid4().hex,
            command=standing_by(job.command),
            environment={**job.environment, **self._variables, GATE: f"ringtrain-{secrets.token_hex(16)}"},
            forward=(*job.forward, *self._variables),
        )
        waiting = WaitingRanks(next_job, self.options, restart.ANSWER_S)
        made.append(waiting)
        try:
            if not is_over.is_set():
                waiting.stand_by(self.planner)
            while not is_over.wait(READ_S):
                waiting.catch_up()
        except (LaunchError, OSError) as error:  # a restart starts its own ranks
            if not is_over.is_set():
                say(f"no ranks stand by: {error}")
        except Stopped:
            pass

    def begin(self, job: Job) -> Supervisor | None:
        """Lets the ranks that stand by begin as those of a job; None: there are none that could."""
        thread, made = self._thread, self._waiting
        if thread is None:
            return None
        self._is_over.set()
        for waiting in made:
            if waiting.plan and (waiting.job.hosts, waiting.job.num_ranks) == (job.hosts, job.num_ranks):
                thread.join()
                if waiting.begin(job.attempt):
                    self._thread, self._waiting = None, []
                    return waiting
        # Their end must not delay the restart, since a host that is lost does not answer; but for ranks that run.
        self.give_up()
        for waiting in made:
            if waiting.was_told:
                self._ending[-1].join()
                if waiting.lost_hosts:
                    time.sleep(LEASE_S)
        return None

    def give_up(self) -> None:
        """Begins to end the ranks that stand by, if there are any."""
        if self._thread is None:
            return
        self._is_over.set()
        ending = threading.Thread(target=_end, args=(self._thread, self._waiting), daemon=True)
        self._thread, self._waiting = None, []
        self._ending.append(ending)
        ending.start()


def _end(thread: threading.Thread, made: Sequence[WaitingRanks]) -> None:
    """Ends ranks that stand by, and the thread that starts them."""
    for waiting in made:
        waiting.give_up()
    thread.join()
    for waiting in made:
        waiting.give_up()
        waiting.end()


def standing_by(command: tuple[str, ...]) -> tuple[str, ...]:
    """Command of ranks that stand by, given that of a script of Python."""
    place = as_main.place_of_script(command)
    return (*command[:place], "-m", gate.MODULE, *command[place:])
