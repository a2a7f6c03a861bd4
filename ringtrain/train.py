"""Main path of training on one rank or many: setup -> agree -> fit -> finish.

python -m ringtrain.train --config configs/digits.toml
horovodrun -np 2 -H localhost:2 python -m ringtrain.train --config configs/digits.toml
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until training handles signals itself, Ctrl-C ends the process at once, without a traceback from an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import dataclasses
import functools
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain import strategies
from ringtrain.config import files
from ringtrain.config.sections import Config
from ringtrain.errors import ConfigError, RingtrainError
from ringtrain.monitor import journal
from ringtrain.protocol import failures, status
from ringtrain.protocol.attempt import Attempt
from ringtrain.protocol.launchers import launched_rank
from ringtrain.strategies.parameter_server import cluster, worker
from ringtrain.strategies.parameter_server.cluster import RankGroup
from ringtrain.training import agreement, console, devices, log_capture, run_files, step_monitor
from ringtrain.training.configured import ConfiguredSource
from ringtrain.training.run import Job, Opening, Run, Source

SECONDS_FOR_RANK_0 = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one training job.

    Args:
        argv: command line without the program's name; None: sys.argv.

    Returns:
        0; 128 + the number of the signal that ended training; or 2 after an error that the user can fix, which one rank
        prints in one line.
    """
    stages = journal.Stages()
    try:
        return _walk(files.of_command(files.read(sys.argv[1:] if argv is None else argv)), stages)[1]
    except RingtrainError as error:
        # An error on one rank is raised on every rank (hvd.run_together). Rank 0 prints it, and launchers end the job
        # when the first rank exits. A rank that still runs after this pause has an error of its own.
        rank = launched_rank() or 0
        if rank:
            time.sleep(SECONDS_FOR_RANK_0)
        failures.report_failure(error, rank, exit_code=2, with_traceback=False)
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2


def train(config: Config) -> dict[str, Any]:
    """Trains and evaluates the configured model, verifies that the ranks agree, and fills the run folder.

    Every rank calls it, with the same configuration. It can be called many times in one process, with one exception:
    what a process fixes when it starts. These are its devices, the strategy's transport (ring; mpi-ring, towers and the
    others) and hvd.deterministic; another value raises. Layer names are counted from one again for each call.

    Args:
        config: for example `ringtrain.config.read(["--config", "configs/digits.toml"])`.

    Returns:
        Content of summary.json: metrics, checksum and timings. {} on parameter servers and their workers.

    Raises:
        RingtrainError: on every rank, whichever rank caused it. Until training begins, nothing is written.

    Example:
        >>> from ringtrain import config, train
        >>> summary = train.train(config.Config(run=config.RunConfig(name="first")))
        >>> summary["test_accuracy"], summary["checksum"]
    """
    return dict(_walk(config, journal.Stages())[0])


def _walk(config: Config, stages: journal.Stages) -> tuple[Mapping[str, Any], int]:
    """Summary, and exit code: 0, or 128 + the number of the signal that ended training."""
    # Names first, so that a misspelled one is reported at once. Importing hvd loads TensorFlow, which prints messages.
    log_capture.watch()
    source = ConfiguredSource(config)
    strategies.prepare(config)
    # Servers and workers run no training loop: rank 0 alone goes on, and tells them what to do.
    group = None
    if strategies.STRATEGIES[config.strategy.name].has_servers:
        servers = strategies.num_servers(config)
        group = cluster.meet(config, servers)
        if group.rank:
            return {}, worker.supervise(config, group)  # a server or a worker, controlled by rank 0
    run = setup(config, source, group, stages)
    with journaled(run):
        return to_the_end(run)


@contextlib.contextmanager
def journaled(run: Run) -> Iterator[None]:
    """Writes an error to the run's journal, and unlocks the run's folder."""
    # Reports on failures read the journal. A lock that stays would keep the process's next run out of the folder.
    try:
        yield
    except Exception as error:
        run.journal.write_failure(error)
        run.lock.release()
        raise


def to_the_end(run: Run) -> tuple[Mapping[str, Any], int]:
    """Trains a run to its end; returns its summary and the exit code."""
    # After each change of ranks, they agree again: on the state of the one that is furthest.
    if run.strategy.ranks_change:
        from ringtrain.strategies import elastic

        return elastic.through_changes(run, functools.partial(_from_agreement, run))
    return _from_agreement(run)


def _from_agreement(run: Run) -> tuple[Mapping[str, Any], int]:
    summary = agree(run)
    if summary:  # the command of a complete run was given again
        return summary, 0
    with run.signals:
        fit(run)
        return finish(run)


def setup(config: Config, source: Source, group: RankGroup | None, stages: journal.Stages) -> Run:
    """Loads the libraries, starts Horovod and pins this rank's devices."""
    import ringtrain.hvd as hvd  # first: it reports missing packages
    from ringtrain.training import resume, stopping, tracking

    stages.done("libraries")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "a run was started in another thread than the main one, which gets the signals that save and end a run:"
            " start it there"
        )
    # Horovod reads its settings once, when it starts.
    hvd.configure(config.hvd)
    hvd.elastic.listen()
    hvd.init()
    stages.done("init")
    hvd.step_timing.PHASES.reset()  # counts of an earlier run of this process end here
    # Before TensorFlow uses a device: it would allocate memory on the host's first GPU for every rank.
    strategy = strategies.make(config, group)
    pinning = source.pin(strategy)
    # A restart continues the first run of the earlier attempt's process, whose name it gets from the launcher.
    attempt, events = Attempt.from_environment(), journal.Journal()
    hvd.process.PROCESS.num_runs += 1
    is_first = hvd.process.PROCESS.num_runs == 1
    if not is_first:
        attempt = dataclasses.replace(attempt, run_name="")
    config = strategy.together(lambda: resume.started_again(config, attempt))
    # The code as loaded, as the files may change during the run. Its records: a missing package is reported now.
    code = strategy.together(lambda: {**agreement.of_code(config, tracking.versions()), **source.code()})
    return Run(
        config=config,
        source=source,
        attempt=attempt,
        is_first=is_first,
        strategy=strategy,
        pinning=pinning,
        code=code,
        status=status.StatusLine(hvd.rank()),
        signals=stopping.Signals(events),
        journal=events,
        stages=stages,
    )


def agree(run: Run) -> Mapping[str, Any]:
    """Verifies that the ranks train the same, restores and opens the run; returns a complete one's summary, else {}."""
    from ringtrain import hvd

    # Every rank takes part in every collective; code for rank 0 alone contains none.
    # Each rank has a device of its own, and the code of rank 0.
    strategy, stages, source = run.strategy, run.stages, run.source
    run.rank, run.size = hvd.rank(), hvd.size()
    hvd.step_timing.PHASES.enter("start")
    if run.config.device.share_gpus:
        device = ""
    else:
        device = devices.identity(run.pinning)
    hvd.check_placement(device)
    agreement.same_code(run)
    stages.done("checks")

    # Data and model: each rank trains its rows of every global batch, and evaluates its part of the test rows.
    run.job = job = source.read_job(run)
    agreement.same_job(run)
    stages.done("model")

    # Every rank begins with rank 0's weights, from the newest checkpoint if there is one. Averaged gradients keep them
    # equal.
    run.start, summary = source.restore(run)
    stages.done("restored")
    # A complete run stays as it is, but its mirror may lack the last files.
    if summary:
        run.is_complete, run.folder = True, Path(run.config.run.directory) / run.config.run.name
        console.show_complete(console.terminal_of(run), run.folder, summary)
        with run.signals:
            _end(run)
        return summary
    # A wrong state or a reduction that does not average must be seen now, not after hours of training.
    hvd.check_in_sync(job.model)
    run.gradients = _check_averaging(job)
    stages.done("agreement")

    # Of all processes, also of those that run no training loop, such as parameter servers.
    run.hosts = [*hvd.allgather_object(socket.gethostname(), name="ringtrain_hosts"), *strategy.other_hosts]

    # Run folder: only now, after all checks of the configuration. From here on, each rank has a log in it. Ranks that
    # change note their generation in it last: no collective may fail between that and its line in the journal.
    opening = source.open_folder(run)
    run.folder, run.clock = opening.folder, strategy.clock(run)
    if opening.log:
        run_files.open_log(run, opening.folder / "logs" / opening.log)
    # The plan, with every number that follows from the options; with other ranks the run goes on without it.
    run.terminal = console.terminal_of(run)
    if opening.is_first:
        console.show_plan(run)
        console.show_start(run)
    _open_journal(run, opening)

    # Measurement and monitoring of the steps. Where ranks change, Horovod finds those that are lost.
    step_monitor.measure_phases(run)
    if not strategy.ranks_change:
        step_monitor.add_monitor(run)
    return {}


def _check_averaging(job: Job) -> str:
    """Raises an error if an optimizer of the model does not average; returns how gradients are averaged. Collective."""
    from ringtrain import hvd

    results = [hvd.check_averaging(optimizer) for optimizer in hvd.optimizers_of(job.model)]
    return results[0]  # the model's own


def _open_journal(run: Run, opening: Opening) -> None:
    """Opens this rank's journal with the facts of the attempt."""
    from ringtrain import hvd

    run.journal.open(run.folder, run.rank, run.size, run.attempt.number, opening.start_s)
    run.journal.spent = hvd.step_timing.PHASES.spent if run.rank == 0 else dict
    facts = dict(opening.facts)
    if opening.is_first:
        moments = run.stages.moments
        begun_s = moments["process" if run.is_first else "python"]
        facts |= {"hosts": run.hosts, "begun_s": begun_s}
        if run.is_first:
            facts["launched_s"] = run.attempt.launched_s
    run.journal.write(opening.event, **facts)


def fit(run: Run) -> None:
    """Trains to the end of the run, or until all ranks stop after the same step. Every rank makes the same steps."""
    from ringtrain import hvd
    from ringtrain.training import loop
    from ringtrain.training.callbacks import Callbacks

    run.started = time.time()
    with contextlib.ExitStack() as stack:
        if run.monitor:
            stack.enter_context(step_monitor.monitored(run, run.monitor))
        run.callbacks = Callbacks(run)
        # Also after a failure: before this process or another rank saves the same step.
        stack.callback(run.callbacks.saver.wait)
        loop.train(run)
        # Only now, as all is saved: a run that was stopped resumes with each rank's own statistics.
        hvd.average_moving_statistics(run.job.model)


def finish(run: Run) -> tuple[Mapping[str, Any], int]:
    """Compares the ranks once more, and writes the run's results. Returns the summary and the exit code."""
    from ringtrain.training import tracking

    stop, strategy = run.callbacks.stop, run.strategy
    if run.rank == 0 and not stop.exit_code:
        run.signals.note = f"ringtrain: {run.folder}: training is over: results and mirror are completed first"
    # Results: the ranks are compared a last time, and rank 0 exports the model.
    mirror = run.lock.mirror
    mirrored = {"mirror": {"url": mirror.url, "failed": mirror.failures}} if mirror else {}
    summary = tracking.write_results(run, {**strategy.summary(run), **run.job.facts, **mirrored})
    # A person sees the metrics, and last what was verified.
    total_s = time.time() - run.stages.moments["python"]
    console.show_result(run.terminal, run.folder, summary, strategy.proof(summary, run.gradients), total_s)
    run.journal.write(
        "end",
        **run.clock.where,
        stopped_by=stop.stopped_by,
        exit_code=stop.exit_code,
    )
    # After a signal all ranks wait for rank 0: mpirun kills the others soon after one has exited.
    if stop.exit_code:
        run.strategy.together(lambda: None)
    _end(run, stop.exit_code, stop.grace_ends_s)
    return summary, stop.exit_code


def _end(run: Run, exit_code: int = 0, ends_s: float = math.inf) -> None:
    """Completes the run's mirror, and gives back what this job holds: folder, other processes."""
    # Whatever becomes of the mirror, the folder is free for the next run, and servers and workers end.
    try:
        run_files.finish_mirror(run, exit_code, ends_s)
    finally:
        run.lock.release()
        run.strategy.end(exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
