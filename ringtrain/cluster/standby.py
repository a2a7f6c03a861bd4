"""The next attempt of a job, started ahead: its ranks have loaded TensorFlow and wait, which shortens a restart."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ringtrain.cluster import restart
from ringtrain.cluster.job import Job, Plan
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.cluster.supervisor import Stopped, Supervisor
from ringtrain.errors import LaunchError
from ringtrain.protocol import as_main, gate

AFTER_S = 5.0
"""seconds after hvd.init() in which the job that runs gets the processors for its first steps"""


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
        self._waiting: Supervisor | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread()
        self._variables: dict[str, str] = {}

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def follow(self, supervised: Supervisor, job: Job) -> None:
        """Lets ranks stand by that could replace those of a job, once these have called hvd.init()."""
        supervised.when_initialized = partial(self._prepare, job, supervised.reports.variables)

    def _prepare(self, job: Job, variables: Mapping[str, str]) -> None:
        """Starts them, once, in another thread. variables: What the script has set before it loaded TensorFlow."""
        if self._waiting:
            return
        self._variables |= variables
        next_job = replace(
            job,
            id=uuid.uuid4().hex,
            command=standing_by(job.command),
            environment={**job.environment, **self._variables},
        )
        self._waiting, self._is_over = self.supervisor(next_job, self.options, restart.ANSWER_S), threading.Event()
        self._thread = threading.Thread(target=self._start, args=(self._waiting, self._is_over), daemon=True)
        self._thread.start()

    def _start(self, waiting: Supervisor, is_over: threading.Event) -> None:
        if is_over.wait(AFTER_S):
            return
        try:
            waiting.stand_by(self.planner)
        except (LaunchError, Stopped):  # the restart starts its own ranks, and reports what is wrong
            waiting.end()

    def begin(self, job: Job) -> Supervisor | None:
        """Lets the ranks that stand by begin as those of a job; None: there are none that could."""
        waiting = self._waiting
        fits = waiting and (waiting.job.hosts, waiting.job.num_ranks) == (job.hosts, job.num_ranks)
        if not (waiting and fits and waiting.stands_by()):
            self._end()
            return None
        self._waiting = None
        waiting.go(job.attempt)
        return waiting

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._is_over.set()
            waiting.give_up()
            self._thread.join()
            waiting.end()


def standing_by(command: tuple[str, ...]) -> tuple[str, ...]:
    """Command of ranks that stand by. Raises LaunchError unless it is that of a script of Python."""
    try:
        place = as_main.place_of_script(command)
    except ValueError as error:
        raise LaunchError(f"{error}, with --standby") from None
    return (*command[:place], "-m", gate.MODULE, *command[place:])
