"""Defects planted in the code of elastic jobs: the negative controls of their simulation."""

from __future__ import annotations

from functools import partial
from typing import Any

from simulation.elastic import simulate
from simulation.elastic_faults import disturb
from simulation.planted import Defect, seeds_to_find, text

from ringtrain import hvd, train
from ringtrain.cluster import elastic as of_launcher
from ringtrain.strategies import elastic
from ringtrain.training.clock import Ending


def nothing(*_: Any) -> None: ...


def none_empty(*_: Any) -> Any:
    """The driver of slots, which does not know whose process has exited."""
    driver = MAKE_DRIVER()
    driver._update_host_assignments = driver.__mro__[1]._update_host_assignments
    return driver


def terse(*_: Any) -> Any:
    """The driver of slots, which announces a change once, even if no rank listens."""
    driver = MAKE_DRIVER()
    driver.register_worker_server = driver.__mro__[1].register_worker_server
    return driver


def hasty(*_: Any) -> Any:
    """The driver of slots, which notes an exit while it assigns ranks."""
    driver = MAKE_DRIVER()

    class Hasty(driver):  # type: ignore[misc, valid-type]
        def _handle_worker_exit(self, slot_info: Any, exit_code: int, timestamp: float) -> None:
            self._empty.add((slot_info.hostname, slot_info.local_rank))
            super(driver, self)._handle_worker_exit(slot_info, exit_code, timestamp)

    return Hasty


MAKE_DRIVER = of_launcher.make_driver
State, Launcher = hvd.elastic.SharedKerasState, of_launcher.ElasticSupervisor
FURTHEST = "root = progress.index(max(progress))"
BEHIND = "variable.assign(value)"
CLOSED = "self.is_open, self._before_end, self.metrics_state = False, None, ()"
HOSTS = '    run.hosts = [*hvd.allgather_object(socket.gethostname(), name="ringtrain_hosts"), *strategy.other_hosts]'
LOG = '        run_files.open_log(run, opening.folder / "logs" / opening.log)'
DEFECTS = {
    "rank 0 gives its state, not the one that is furthest": text(State, "sync", (FURTHEST, "root = 0")),
    "a failed sync leaves half of a state": text(State, "sync", (BEHIND, "pass")),
    "a step that failed is not undone": text(elastic.Elastic, "settle", ("self.step.undo()", "pass")),
    "an agreed stop is forgotten": Defect(elastic, "_common", lambda endings: Ending()),
    "an epoch that has ended stays open": text(elastic.ElasticClock, "close_epoch", (CLOSED, "pass")),
    "journals are not written before a change": text(elastic.Elastic, "settle", ("clock.write_commit()", "pass")),
    "a generation is noted before its journal is open": text(
        train, "agree", (f"{HOSTS}\n\n    # Run", "\n    # Run"), (LOG, f"{LOG}\n{HOSTS}")
    ),
    "commits do not ask for hosts": Defect(State, "check_host_updates", nothing),
    "local ranks have gaps": text(
        of_launcher, "placement", ("local_rank=local_rank,", "local_rank=number_of(slot.hostname),")
    ),
    "a slot whose process has exited stays empty": Defect(of_launcher, "make_driver", none_empty),
    "a change is announced only once": Defect(of_launcher, "make_driver", terse),
    "an exit is noted while ranks are assigned": Defect(of_launcher, "make_driver", hasty),
    "a lost host stays listed": text(
        Launcher,
        "_check_agents",
        ("host.agent, host.is_published, host.ask_again_s = None, False,", "_, _, host.ask_again_s = 0, 0,"),
    ),
    "a host is used again where ranks are left": Defect(
        Launcher, "_clean_up", lambda self, name: self.agents.start(name, is_checked=True)
    ),
    "a host that has booted again is not cleaned up": text(
        Launcher, "_check_agents", ("host.agent = self._clean_up(agent.host)", "pass")
    ),
}
KINDS: dict[str, tuple[str, ...]] = {
    "rank 0 gives its state, not the one that is furthest": ("in sums of metrics",),
    "a failed sync leaves half of a state": ("in sums of metrics", "in variable 1", "in object"),
    "a step that failed is not undone": ("in sums of metrics", "at sums of metrics"),
    "an agreed stop is forgotten": ("stop", "killed", "at evaluation", "at ringtrain_results"),
    "an epoch that has ended stays open": ("killed", "late", "flaps"),
    "journals are not written before a change": ("killed", "at gradients"),
    "a generation is noted before its journal is open": ("at ringtrain_hosts", "in ringtrain_generation"),
    "commits do not ask for hosts": ("late",),
    "local ranks have gaps": ("at gradients",),
    "a slot whose process has exited stays empty": ("killed twice", "agent", "ssh"),
    "an exit is noted while ranks are assigned": ("die", "ssh"),
    "a lost host stays listed": ("die", "agent"),
    "a host is used again where ranks are left": ("agent", "die"),
}
"""faults among which a few schedules find a defect"""


def schedules_to_find(name: str, first: int, count: int) -> int:
    """Number of schedules until the defect is found; 0: not within `count`."""
    directed = partial(disturb, kinds=KINDS[name])
    return seeds_to_find(DEFECTS[name], partial(simulate, directed=directed), first, count)
