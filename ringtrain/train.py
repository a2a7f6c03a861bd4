"""Main path of training on one rank or many, in the order of the run.

python -m ringtrain.train --config configs/digits.toml
horovodrun -np 2 -H localhost:2 python -m ringtrain.train --config configs/digits.toml
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until training handles signals itself, Ctrl-C ends the process at once, without a traceback from an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import functools
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ringtrain import config_io, data, strategies
from ringtrain.config import Config
from ringtrain.derived import derive
from ringtrain.errors import RingtrainError
from ringtrain.monitor import journal
from ringtrain.protocol import failures, status
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import checkpoint, consistency, console, devices, lazy_keras, log_capture, setup
from ringtrain.strategies.parameter_server import worker

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
        return train(config_io.read(sys.argv[1:] if argv is None else argv), stages)
    except RingtrainError as error:
        journal.note_failure(error, exit_code=2)
        # An error on one rank is raised on every rank (hvd.run_together). Rank 0 prints it, and launchers end the job
        # when the first rank exits. A rank that still runs after this pause has an error of its own.
        if console.launched_rank():
            time.sleep(SECONDS_FOR_RANK_0)
        failures.report_failure(error, console.launched_rank() or 0, exit_code=2, with_traceback=False)
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        journal.note_failure(error, exit_code=1)
        raise


def train(config: Config, stages: journal.Stages | None = None) -> int:
    """Trains and evaluates a model, verifies that the ranks agree, and fills the run folder.

    Every rank runs this function and takes part in every collective; code for rank 0 alone contains none.

    Args:
        stages: timestamps of the start-up stages, to be recorded.

    Returns:
        0, or 128 + the number of the signal that ended training.

    Raises:
        RingtrainError: on every rank, whichever rank caused it. Until training begins, nothing is written.
    """
    # Names first, so that a misspelled one is reported at once. Importing hvd loads TensorFlow, which prints messages.
    log_capture.watch()
    lazy_keras.start()
    stages = stages or journal.Stages()
    attempt = Attempt.from_environment()
    named = setup.find(config)
    strategies.prepare(config)
    crew = strategies.meet(config)
    if crew is not None and crew.rank:
        return worker.keep(config, crew)  # a server or a worker, controlled by rank 0
    import ringtrain.hvd as hvd  # first: it reports missing packages
    from ringtrain import elastic
    from ringtrain.monitor import heartbeat, timeline
    from ringtrain.run import resume, run_folder, stopping, tracking

    stages.done("libraries")
    hvd.configure(config.hvd)
    hvd.elastic.listen()
    config, timeline_file = (config, "") if hvd.elastic.is_on() else timeline.wanted(config)
    hvd.init()
    stages.done("init")
    if hvd.elastic.is_on():  # ranks join and leave: another main path, with the same building blocks
        return elastic.train(config, named, attempt)
    rank, size = hvd.rank(), hvd.size()
    hvd.check_op(config.hvd)
    # Before TensorFlow uses a device: it would allocate memory on the host's first GPU for every rank.
    strategy = strategies.make(config, crew)
    pinning = strategy.begin()
    box = status.StatusLine(rank)
    hvd.check_placement("" if config.device.share_gpus else devices.identity(pinning))
    host = socket.gethostname()
    code = hvd.run_together(lambda: consistency.of_code(config, tracking.versions()))
    consistency.refuse(hvd.allgather_object((host, code), name="ringtrain_code"))
    stages.done("checks")

    # Data: each rank trains its shard of every global batch, and evaluates its shard of the test samples.
    hvd.run_together(tracking.check_packages)
    config = config if crew else resume.same_global_batch(config, attempt, size)
    config = hvd.run_together(functools.partial(resume.started_again, config, attempt))
    for is_first in (rank == 0, rank > 0 and hvd.local_rank() == 0):  # hosts may have the data on local disks
        hvd.run_together(functools.partial(data.prepare, config.data, is_first))
    data_set = hvd.run_together(named.read_data)
    numbers = hvd.run_together(lambda: derive(config, size * strategy.copies, len(data_set.train), len(data_set.test)))
    setup.refuse_differences(hvd.allgather_object((config, numbers), name="ringtrain_numbers"))
    checksums = hvd.run_together(lambda: data.checksums(data_set))
    consistency.refuse(hvd.allgather_object((host, checksums), name="ringtrain_data"))
    strategy.check(code | checksums)
    stages.done("data")

    # Model and optimizer: rank 0's on every rank, from the newest checkpoint if there is one, kept equal by averaged
    # gradients.
    model = setup.compiled_model(named, data_set, config, numbers, strategy)
    hvd.run_together(lambda: checkpoint.check_exportable(model))
    stages.done("model")
    gradient_norm = strategy.gradient_norm(model.optimizer) if config.tracking.every_steps else None
    users_callbacks = hvd.run_together(named.make_callbacks)
    lock = run_folder.RunLock()  # held until the end
    setup.lock_folder(lock, config, attempt)
    start = resume.restore(model, *resume.source_of(config), config, numbers)
    if setup.is_complete(lock, config, start, start.global_step >= numbers.num_steps):
        lock.release()
        strategy.end(0)
        return 0
    if config.run.init_from and not start.source:
        hvd.run_together(lambda: resume.load_weights(model, Path(config.run.init_from)) if rank == 0 else None)
        hvd.broadcast_model(model, root_rank=0)
    hvd.check_in_sync(model)
    gradients = hvd.check_averaging(model.optimizer)
    stages.done("agreement")

    # Run folder: only now, after all checks of the configuration.
    folder = setup.agree_on_folder(config, numbers, attempt, lock)
    strategy.folder, strategy.numbers = folder, numbers
    if rank == 0:
        failures.report_run(folder.name)
    if start.source:
        saved = folder / "checkpoints"
        hvd.run_together(lambda: checkpoint.remove_after(saved, start.global_step) if rank == 0 else None)
    log = folder / "logs" / f"rank-{rank}.log"
    hvd.run_together(lambda: log_capture.log_to(log, f"rank {rank} of {size} on {host}: {pinning}"))
    hosts = list(crew.roles.hosts) if crew else hvd.allgather_object(host, name="ringtrain_hosts")
    start_s = hvd.broadcast_object(time.time(), root_rank=0, name="ringtrain_start_s")
    own_journal = journal.Journal(folder, rank, size, attempt.number, start_s)
    journal.begin(
        own_journal,
        global_step=start.global_step,
        resumed_from=start.source,
        hosts=hosts,
        stages=stages.moments,
        versions=tracking.versions(),
    )
    terminal = console.console_for(rank)
    console.show_plan(terminal, config, numbers, pinning, hosts, strategy.about)
    console.show_start(terminal, config, start, attempt.causes)

    # Training: every rank makes the same number of steps and ends after the same one, so that none waits for another.
    clock = resume.Clock(start, numbers.steps_per_epoch, box, own_journal)
    pulse = heartbeat.StepTimer(hvd.step_timing.PLACE, clock)
    strategy.watch(model)
    drawn = timeline.Timeline(folder, config.tracking, timeline_file) if config.tracking.timeline_steps else None
    pulse.trace = drawn.step if drawn else pulse.trace
    with (
        console.Progress(terminal, numbers.num_steps, config.train.epochs, log_capture.to_log) as progress,
        stopping.Signals() as signals,
        heartbeat.Monitor(pulse, config.health) as monitor,
    ):
        course = setup.Course(
            config,
            numbers,
            model,
            data_set,
            folder,
            start,
            clock,
            own_journal,
            progress,
            signals,
            named.faults,
            users_callbacks,
            gradient_norm,
            pulse,
        )
        for part in resume.segments(start.global_step, numbers.steps_per_epoch, config.train.epochs):
            if course.stop.stopped_by:
                break
            # Batches that are accumulated into one update, or trained by several copies of the model, are cut from one:
            # this rank's shard of the global batch.
            updates, steps = divmod(part.first_step, numbers.accumulation_steps)
            batches_per_update = numbers.accumulation_steps * strategy.copies
            batches = data.training_batches(
                data_set.train,
                numbers.batch_size * batches_per_update,
                rank,
                size,
                config.seed,
                part.end_epoch,
                updates,
            )
            if batches_per_update > 1:
                batches = batches.rebatch(numbers.batch_size, drop_remainder=True).skip(steps * strategy.copies)
            strategy.fit(model, batches, part, course.callbacks)
        course.saver.finish()
        # Only now: a run that was stopped resumes with each rank's own.
        hvd.average_moving_statistics(model, config.model.not_averaged)

    # Result, and the verification once more, of what was saved.
    ranks = hvd.allgather_object(monitor.own_times(), name="ringtrain_times")
    more = {"skipped_samples": len(data_set.skipped | crew.skipped)} if crew else {}
    summary = course.finish(hosts, attempt, ranks=ranks, strategy=strategy.about, **more)
    console.show_ranks(terminal, ranks, heartbeat.slow_ranks(ranks, config.health))
    console.show_result(terminal, folder, summary, gradients)
    stopped_by, exit_code = course.stop.stopped_by, course.stop.exit_code
    own_journal.write("end", global_step=clock.global_step, stopped_by=stopped_by, exit_code=exit_code)
    if drawn:
        drawn.close()  # last: with many ranks and steps it takes a while
    lock.release()
    strategy.end(exit_code)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
