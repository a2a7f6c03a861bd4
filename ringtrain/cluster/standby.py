"""The next attempt of a job, started ahead: its ranks have loaded TensorFlow and wait, which shortens a restart."""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ringtrain.cluster import restart
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.processes import say
from ringtrain.cluster.supervisor import Stopped, Supervisor
from ringtrain.errors import LaunchError
from ringtrain.protocol import as_main, gate
from ringtrain.protocol.env import GATE

AFTER_S = 5.0
"""seconds after hvd.init() in which the job that runs gets the processors for its first steps"""
READ_S = 0.2
"""seconds between two looks at what waiting ranks have printed"""


class Standby:
    """Ranks that wait for a restart; a context manager, which ends them.

    Args:
        supervisor: Makes the supervisor of a job.
        planner: Makes its plan.
    """

    def __init__(
        self, supervisor: Callable[..., Supervisor], planner: Callable[[Job], Plan], options: LaunchOptions
    ) -> None:
        self.supervisor, self.planner, self.options = supervisor, planner, options
        self._waiting: list[Supervisor] = []
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
        supervised.when_initialized = partial(self._prepare, job, supervised.reports.variables)

    def _prepare(self, job: Job, variables: Mapping[str, str]) -> None:
        """Starts them, once, in another thread. variables: What the script has set before it loaded TensorFlow."""
        if self._thread is None:
            self._is_over, self._waiting = threading.Event(), []
            about = job, variables, self._is_over, self._waiting
            self._thread = threading.Thread(target=self._start, args=about, daemon=True)
            self._thread.start()

    def _start(self, job: Job, variables: Mapping[str, str], is_over: threading.Event, made: list[Supervisor]) -> None:
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
        waiting = self.supervisor(next_job, self.options, restart.ANSWER_S)
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
        self._thread, self._waiting = None, []
        self._is_over.set()
        for waiting in made:
            if waiting.plan and (waiting.job.hosts, waiting.job.num_ranks) == (job.hosts, job.num_ranks):
                thread.join()
                if waiting.begin(job.attempt):
                    return waiting
        # Their end must not delay the restart: a host that is lost does not answer.
        ending = threading.Thread(target=_end, args=(thread, made), daemon=True)
        self._ending.append(ending)
        ending.start()
        return None


def _end(thread: threading.Thread, made: Sequence[Supervisor]) -> None:
    """Ends ranks that stand by, and the thread that starts them."""
    for waiting in made:
        waiting.give_up()
    thread.join()
    for waiting in made:
        waiting.give_up()
        waiting.end()


def standing_by(command: tuple[str, ...]) -> tuple[str, ...]:
    """Command of ranks that stand by. Raises LaunchError unless it is that of a script of Python."""
    try:
        place = as_main.place_of_script(command)
    except ValueError as error:
        raise LaunchError(f"{error}, with --standby") from None
    return (*command[:place], "-m", gate.MODULE, *command[place:])
