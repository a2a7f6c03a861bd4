"""Measurement and monitoring of a run's steps: phases, timeline, heartbeats."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringtrain.config import Config, with_values
from ringtrain.errors import ConfigError
from ringtrain.monitor import diagnosis, heartbeat

if TYPE_CHECKING:
    from ringtrain.run.context import RunContext

HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
"""environment variable that horovodrun --timeline-filename and ringtrain launch --timeline set"""
TIMELINE_STEPS = 1000
"""number of recorded steps if only the variable is set; viewers do not open much larger files"""


def with_timeline(config: Config) -> tuple[Config, str]:
    """Configuration with the number of steps that a timeline records; its file, "" for timeline.json in the folder.

    HOROVOD_TIMELINE=DYNAMIC is set, since Horovod would otherwise write rank 0's timeline to the file named there.
    """
    from ringtrain import hvd

    file = os.environ.get(HOROVOD_TIMELINE, "")
    if file == "DYNAMIC":  # from here, for an earlier run of this process
        file = ""
    if file and not config.tracking.timeline_steps:
        config = with_values(config, {"tracking.timeline_steps": TIMELINE_STEPS})
    if config.tracking.timeline_steps:
        if hvd.is_initialized() and os.environ.get(HOROVOD_TIMELINE) != "DYNAMIC":
            raise ConfigError(
                "tracking.timeline_steps: Horovod was started in this process before, without a timeline: leave out"
                " ringtrain.start() and hvd.init(), and start a process of its own for this run"
            )
        os.environ[HOROVOD_TIMELINE] = "DYNAMIC"
    if file:
        file = os.path.abspath(file)
    return config, file


def measure_phases(run: RunContext) -> None:
    """Begins to note when the phases of a step begin, and to record the timeline that the options ask for."""
    from ringtrain import hvd
    from ringtrain.hvd import timeline

    timeline_steps = run.config.tracking.timeline_steps
    if run.strategy.trains_here:
        hvd.step_timing.PLACE.watch(run.model, each_gradient=timeline_steps > 0)
    if timeline_steps:
        run.timeline = timeline.Timeline(run)


def add_monitor(run: RunContext) -> None:
    """Adds the measurement of this rank's steps, and the monitor that reports it to rank 0. Collective."""
    from ringtrain import hvd

    # The monitor sees the timer's progress, and a rank without any is named with the phase that the timer shows.
    health = run.config.health
    run.step_timer = hvd.step_timing.StepTimer(run.clock, run.timeline)
    run.monitor = heartbeat.Monitor(
        run.rank,
        run.size,
        run.step_timer,
        health.stall_timeout,
        diagnosis.RunStalls,
        hvd.monitoring.broadcast,
        straggler_factor=health.straggler_factor,
        descriptor=run.status.descriptor,
        write_event=run.journal.write,
    )


@contextlib.contextmanager
def monitored(run: RunContext, monitor: heartbeat.Monitor) -> Iterator[None]:
    """Context in which the status line has each phase, and the journal the error that ends training."""
    from ringtrain import hvd

    # The status is in shared memory: others read it also where this rank hangs, and cannot say anything itself.
    tracker = hvd.step_timing.PLACE
    tracker.on_change = lambda: run.status.put(run.clock.global_step, tracker.phase)
    with hvd.monitoring.replaced_by(monitor):
        try:
            yield
        except Exception as error:
            run.journal.write_failure(error, global_step=run.clock.global_step)
            raise
        finally:
            tracker.on_change = lambda: None
