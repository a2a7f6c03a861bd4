"""Measurement and monitoring of a run's steps: phases, heartbeats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringtrain.monitor import heartbeat

if TYPE_CHECKING:
    from ringtrain.training.run import Run


def measure_phases(run: Run) -> None:
    """Begins to note when the phases of a step begin."""
    from ringtrain import hvd

    if run.strategy.trains_here and run.strategy.copies == 1:
        hvd.step_timing.PHASES.watch(run.job.model)


def add_monitor(run: Run) -> None:
    """Adds the measurement of this rank's steps, and the monitor that reports it to rank 0. Collective."""
    from ringtrain import hvd

    # The monitor sees the timer's progress, and a rank without any is named with the phase that the timer shows.
    health = run.config.health
    run.step_timer = hvd.step_timing.StepTimer(run.clock)
    run.monitor = heartbeat.Monitor(
        run.rank,
        run.size,
        run.step_timer,
        health.stall_timeout,
        lambda value: hvd.broadcast_object(value, name="ringtrain_heartbeat"),
        straggler_factor=health.straggler_factor,
        descriptor=run.status.descriptor,
        write_event=run.journal.write,
    )


@contextlib.contextmanager
def monitored(run: Run, monitor: heartbeat.Monitor) -> Iterator[None]:
    """Context in which the status line has each phase, and the journal the error that ends training."""
    from ringtrain import hvd

    # The status is in shared memory: others read it also where this rank hangs, and cannot say anything itself.
    tracker = hvd.step_timing.PHASES
    tracker.on_change = lambda: run.status.put(run.clock.global_step, tracker.phase)
    with monitor:
        try:
            yield
        except Exception as error:
            run.journal.write_failure(error, global_step=run.clock.global_step)
            raise
        finally:
            tracker.on_change = lambda: None
