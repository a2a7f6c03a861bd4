"""Main path of a run whose ranks join and leave, under ringtrain launch --elastic; as in train.py.

Every step leaves the same state on all current ranks, or none of its own: `optim.step`. When a rank is lost, the
rank that is furthest gives its state to the others, and the step under way is made again; when hosts have joined or
left, all continue after the current step. Either way the rest of the epoch's order, from its position on, is
redistributed over the current ranks:

    elastic.keep global-batch     The global batch stays that of the run's start, and with it the steps and the
                                  learning rate. The ranks share it, also unevenly: a rank with n of its G samples
                                  has the weight n / G, so that the update is that of one process with all of them.
    elastic.keep per-rank-batch   Each rank keeps train.batch_size. Global batch and learning rate follow the number of
                                  ranks, by optimizer.learning_rate_scaling, and the schedule follows the completed
                                  fraction of the run's epochs. The last step of an epoch in which ranks have joined
                                  or left may be smaller.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringtrain import hvd
from ringtrain.config import Config, ScheduleConfig
from ringtrain.derived import Numbers, derive
from ringtrain.protocol import failures
from ringtrain.run import consistency, console, resume
from ringtrain.run.context import Job, Process, RunContext
from ringtrain.strategies.elastic import Place


def run(process: Process, fit_and_finish: Callable[[RunContext], Any]) -> Any:
    """Makes this rank's model alone, then agrees with the others and trains, again after every change of ranks.

    Returns the summary and the exit code, as `fit_and_finish` does.
    """
    strategy: Any = process.strategy  # Elastic
    source: Any = process.source  # ConfiguredSource
    job = source.read_samples(process)
    # The schedule's rates are set from outside: ranks that join later must build the same.
    flat = dataclasses.replace(process.config, schedule=ScheduleConfig())
    flat_job = dataclasses.replace(job, numbers=_numbers(flat, job, strategy.num_shards()))
    source.add_model(process, flat_job, flat)
    strategy.state = hvd.elastic.SharedKerasState(
        flat_job.model,
        strategy.settle,
        strategy.synced,
        folder="",
        place=Place(planned_ranks=strategy.num_shards()),
        start=resume.Start(),
        progress=-1,
    )

    def from_last_step(state: Any) -> tuple[Mapping[str, Any], int]:
        agreed = agree(process, flat_job, state)
        return fit_and_finish(agreed) if isinstance(agreed, RunContext) else (agreed, 0)

    with process.signals:
        return hvd.elastic.run(from_last_step)(strategy.state)


def _numbers(config: Config, job: Job, num_ranks: int) -> Numbers:
    return derive(config, num_ranks, len(job.data_set.train), len(job.data_set.test))


def agree(process: Process, job: Job, state: Any) -> RunContext | Mapping[str, Any]:
    """Agrees with the current ranks on the last complete step, or on the start of the run; see train.agree."""
    strategy: Any = process.strategy  # Elastic
    config, rank, size = process.config, hvd.rank(), hvd.size()
    terminal = console.console_for(rank)
    consistency.same_code(process)
    if not state.folder and (summary := _begin(process, job, state, terminal)):
        process.lock.release()
        return summary
    if rank:
        process.lock.release()  # the current rank 0 takes it
    num_shards = hvd.run_together(strategy.num_shards)
    planned = state.place.planned_ranks if config.elastic.keep == "global-batch" else num_shards
    job = dataclasses.replace(job, numbers=hvd.run_together(lambda: _numbers(config, job, planned)))
    consistency.same_job(process, job)
    folder = Path(state.folder)
    hvd.run_together(lambda: process.lock.take(folder, same_job=True) if rank == 0 else None)
    process.journal.open(folder, rank, size, process.attempt.number)
    _resized(state, process, terminal)

    # All ranks reduce together, from the same weights.
    hvd.elastic.set_share(job.model.optimizer, 1.0)
    gradients = strategy.check_averaging(job.model)
    hvd.check_in_sync(job.model)
    hosts = strategy.hosts()
    if not strategy.has_log:
        later = f"-from-step-{state.start.global_step}" if state.place.resizes else ""
        consistency.open_log(process, folder / "logs" / f"rank-{rank}{later}.log")
        strategy.has_log = True
    return RunContext(
        **vars(process),
        **vars(job),
        hosts=hosts,
        start=state.start,
        folder=folder,
        gradients=gradients,
        terminal=terminal,
    )


def _begin(process: Process, job: Job, state: Any, terminal: Any) -> Mapping[str, Any]:
    """Finds start and run folder, once, on the first ranks. Returns summary.json if the run is complete, else {}."""
    config, planned = process.config, hvd.run_together(process.strategy.num_shards)
    folder, _ = resume.source_of(config)
    saved = hvd.run_together(lambda: resume.manifest_of(folder) if hvd.rank() == 0 else {})
    saved = hvd.broadcast_object(saved, root_rank=0, name="ringtrain_manifest")
    if saved and saved["numbers"]["batch_size"] == config.train.batch_size and config.elastic.keep == "global-batch":
        planned = saved["numbers"]["num_ranks"]
    numbers = must_match = hvd.run_together(lambda: _numbers(config, job, planned))
    if saved and config.elastic.keep == "per-rank-batch":  # the global batch may then be different
        train = dataclasses.replace(config.train, batch_size=saved["numbers"]["batch_size"])
        then = dataclasses.replace(config, train=train)
        must_match = hvd.run_together(lambda: _numbers(then, job, saved["numbers"]["num_ranks"]))
    start, summary = consistency.restore(
        process, job, must_match, lambda start: _place_of(saved, start).get("epoch", 0) >= config.train.epochs
    )
    if summary:
        return summary
    state.folder = str(consistency.make_folder(process, numbers, start))
    # Without the callbacks' state, which would be set again after each change of ranks.
    state.start, state.progress = dataclasses.replace(start, callbacks=()), 2 * start.global_step + 1
    state.place = Place(planned, started=time.time(), **_place_of(saved, start))
    console.show_plan(terminal, process, numbers, process.strategy.hosts(), job.plan)
    console.show_start(terminal, process, start)
    return {}


def _place_of(saved: dict[str, Any], start: resume.Start) -> dict[str, Any]:
    """Returns the position of a checkpoint in its epoch."""
    if not start.source:
        return {}
    if "elastic" in saved:
        return {**saved["elastic"], "resizes": tuple(saved["elastic"]["resizes"])}
    steps, batch = saved["numbers"]["steps_per_epoch"], saved["numbers"]["global_batch_size"]
    epoch, step = divmod(start.global_step, steps)
    return {"epoch": epoch, "position": step * batch, "dealt_by": batch, "length": steps * batch}


def _resized(state: Any, process: Process, terminal: Any) -> None:
    """Records the current ranks in the state that a failure returns to."""
    strategy: Any = process.strategy  # Elastic
    place, size, global_step, resizes = state.place, hvd.size(), state.start.global_step, state.place.resizes
    of_ranks = hvd.allgather_object((strategy.reached, f"{time.time_ns():x}"), name="ringtrain_news")
    lost_steps = max(0, max(reached for reached, _ in of_ranks) - global_step) if place.num_ranks else 0
    change = {"from": place.num_ranks, "to": size, "lost_steps": lost_steps}
    if place.num_ranks:
        if hvd.rank() == 0:
            failures.report_recovery()
        resizes = (*resizes, {"global_step": global_step, **change})
        repeated = "; a step is repeated" if lost_steps else ""
        text = f"continues after step {global_step} with {size} ranks, before with {place.num_ranks}{repeated}"
        terminal.print(text, highlight=False)
    generation, event = of_ranks[0][1], "resize" if place.num_ranks else "start"
    state.place = dataclasses.replace(place, num_ranks=size, generation=generation, resizes=resizes)
    strategy.reached = global_step
    epoch, position = (place.epoch + 1, 0) if place.position == place.length > 0 else (place.epoch, place.position)
    where = {"global_step": global_step, "epoch": epoch, "position": position}
    process.journal.write(event, **where, generation=generation, after=place.generation, **change)
