"""Trains a model on one rank or many: the main path, to be read from top to bottom.

python -m ringtrain.train --config configs/digits.toml
horovodrun -np 2 -H localhost:2 python -m ringtrain.train --config configs/digits.toml
"""

from __future__ import annotations

import dataclasses
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringtrain import (
    chaos,
    checkpoint,
    data,
    devices,
    display,
    fingerprint,
    journal,
    lookup,
    models,
    reports,
    schedules,
    settings,
    stderr,
)
from ringtrain.config import Config, Numbers, derive, option_types, value_of
from ringtrain.errors import ConfigError, RingtrainError

if TYPE_CHECKING:
    import keras

SECONDS_FOR_RANK_0 = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one training job.

    Args:
        argv: the command line without the program's name; None: sys.argv.

    Returns:
        0; 128 + the number of the signal that ended training; or 2 after an error that a person can mend, which one
        rank says in one line.
    """
    try:
        return train(settings.read(sys.argv[1:] if argv is None else argv))
    except RingtrainError as error:
        journal.note_failure(error, exit_code=2)
        # What one rank met, every rank raises (hvd.run_together): rank 0 speaks for all, and launchers end the job with
        # the first rank that ends. A rank that is still there after this pause is alone with its error.
        if display.launched_rank():
            time.sleep(SECONDS_FOR_RANK_0)
        reports.report_failure(error, display.launched_rank() or 0, exit_code=2, with_traceback=False)
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        journal.note_failure(error, exit_code=1)
        raise


def train(config: Config) -> int:
    """Trains, evaluates, proves that the ranks agree, and fills the run's folder.

    Every rank makes this walk and takes part in every collective; what rank 0 does alone contains none.

    Args:
        config: the resolved configuration.

    Returns:
        The exit code: 0, or 128 + the number of the signal that ended training.

    Raises:
        RingtrainError: on every rank, whichever rank met it. Until training begins, nothing is written.
    """
    # Names first: a misspelt one is told at once. TensorFlow is loaded with hvd, and talks.
    stderr.watch()
    attempt = reports.Attempt.from_environment()
    faults = chaos.parse(config.chaos)
    read_data, build_model = data.source(config.data), models.builder(config.model)
    make_metrics, make_callbacks = models.metrics(config.model.metrics), own_callbacks(config)
    import ringtrain.hvd as hvd  # the first: it says what is not installed
    from ringtrain import evaluation, health, heartbeat, plateau, resume, tracking

    hvd.configure(config.hvd)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    hvd.check_op(config.hvd)
    # Before TensorFlow touches a device: it would take memory on the host's first GPU for every rank.
    pinning = hvd.run_together(lambda: devices.pin(hvd.local_rank(), hvd.local_size(), config.device))
    box = reports.Box(rank)
    hvd.check_placement("" if config.device.share_gpus else devices.identity(pinning))
    host = socket.gethostname()
    code = hvd.run_together(lambda: fingerprint.of_code(config, tracking.versions()))
    fingerprint.refuse(hvd.allgather_object((host, code), name="ringtrain_code"))

    # Data: each rank trains its own part of every global batch, and evaluates its own test samples.
    hvd.run_together(tracking.check_packages)
    config = resume.started_again(resume.same_global_batch(config, attempt, size), attempt)
    data_set = hvd.run_together(read_data)
    numbers = hvd.run_together(lambda: derive(config, size, len(data_set.train), len(data_set.test)))
    refuse_differences(hvd.allgather_object((config, numbers), name="ringtrain_numbers"))
    checksums = hvd.run_together(lambda: data.checksums(data_set))
    fingerprint.refuse(hvd.allgather_object((host, checksums), name="ringtrain_data"))
    own_tests = data.evaluation_shard(numbers.num_test, rank, size)
    test_batches = data.evaluation_batches(data_set.test, own_tests, numbers.batch_size)

    # Model and optimizer: rank 0's on every rank, out of the run's newest checkpoint if there is one, and kept equal by
    # averaged gradients.
    model = compiled_model(build_model, make_metrics, data_set, config, numbers)
    gradient_norm = hvd.track_gradient_norm(model.optimizer) if config.tracking.every_steps else None
    users_callbacks = hvd.run_together(make_callbacks)
    start = resume.restore(model, *resume.source_of(config), config, numbers)
    if config.run.init_from and not start.source:
        hvd.run_together(lambda: resume.load_weights(model, Path(config.run.init_from)) if rank == 0 else None)
        hvd.broadcast_model(model, root_rank=0)
    hvd.check_in_sync(model)
    gradients = hvd.check_averaging(model.optimizer)

    # The run's folder: only now, when all that can be wrong with the configuration would have been found.
    folder = agree_on_folder(config, numbers, attempt)
    if rank == 0:
        reports.report_run(folder.name)
    if rank == 0 and start.source:
        checkpoint.remove_after(folder / "checkpoints", start.global_step)
    log = folder / "logs" / f"rank-{rank}.log"
    hvd.run_together(lambda: stderr.log_to(log, f"rank {rank} of {size} on {host}: {pinning}"))
    hosts = hvd.allgather_object(host, name="ringtrain_hosts")
    start_s = hvd.broadcast_object(time.time(), root_rank=0, name="ringtrain_start_s")
    own_journal = journal.Journal(folder, rank, size, attempt.number, start_s)
    facts = {"numbers": dataclasses.asdict(numbers), "versions": tracking.versions()}
    began = {"global_step": start.global_step, "resumed_from": start.source, "hosts": hosts}
    journal.begin(own_journal, **began, versions=facts["versions"])
    console = display.console_for(rank)
    display.show_plan(console, config, numbers, pinning, hosts)
    display.show_start(console, config, start, attempt.causes)

    # Training: every rank makes the same number of steps and ends after the same one, so that none waits for another.
    clock = resume.Clock(start, numbers.steps_per_epoch, box, own_journal)
    pulse = heartbeat.Pulse(hvd.marks.PLACE, clock)
    hvd.marks.PLACE.watch(model)
    check = hvd.callbacks.CheckInSyncCallback(config.train.check_every_steps)
    evaluate = evaluation.Evaluation(test_batches, own_tests, data_set, clock)
    started = time.time()
    with (
        display.Progress(console, numbers.num_steps, config.train.epochs) as progress,
        health.Signals() as signals,
        heartbeat.Monitor(pulse, config.health) as monitor,
    ):
        stop = health.StopTogether(
            signals, config, start.global_step, numbers.steps_per_epoch, data_set.raise_unreadable
        )
        watch = plateau.Plateau(config, numbers, clock, stop, start.monitored)
        saboteur = chaos.Saboteur(faults, rank, numbers.num_steps, numbers.steps_per_epoch, folder, own_journal)
        saver = resume.Saver(
            model,
            folder / "checkpoints",
            config,
            facts,
            clock,
            start.metrics,
            own_journal,
            watch.values,
            lambda: stop.save_is_due,
            saboteur.while_saving,
        )
        recorder = (
            tracking.Recorder(folder, progress, numbers, start.global_step, config.tracking, gradient_norm)
            if rank == 0
            else None
        )
        callbacks = [
            clock,
            pulse,
            evaluate,
            *users_callbacks,
            *([recorder] if recorder else []),
            watch,
            stop,
            check,
            saver,
            *([chaos.callback(saboteur, clock)] if faults else []),
        ]
        for part in resume.segments(start.global_step, numbers.steps_per_epoch, config.train.epochs):
            if stop.stopped_by:
                break
            # The batches that are accumulated into one update are cut from one, the share of its global batch.
            updates, steps = divmod(part.first_step, numbers.accumulation_steps)
            batches = data.training_batches(
                data_set.train,
                numbers.batch_size * numbers.accumulation_steps,
                rank,
                size,
                config.seed,
                part.end_epoch,
                updates,
            )
            if numbers.accumulation_steps > 1:
                batches = batches.rebatch(numbers.batch_size).skip(steps)
            model.fit(
                batches,
                initial_epoch=part.first_epoch,
                epochs=part.end_epoch,
                steps_per_epoch=part.num_steps,
                callbacks=callbacks,
                shuffle=False,  # the shards are shuffled already, in the same way on every rank
                verbose=0,
            )
        saver.finish()
        hvd.average_moving_statistics(model)  # not before: a run that was stopped goes on with each rank's own

    # What came of it; and the proof once more, on what was saved.
    ranks = hvd.allgather_object(monitor.own_times(), name="ringtrain_times")
    skipped = set().union(*hvd.allgather_object(data_set.skipped, name="ringtrain_skipped"))
    summary = {
        "test_accuracy": saver.metrics.get("test_accuracy"),
        "test_loss": saver.metrics.get("test_loss"),
        "metrics": saver.metrics,
        "images_per_s": recorder.images_per_s if recorder else math.nan,
        "num_ranks": size,
        "global_step": clock.global_step,
        "stopped_by": stop.stopped_by,
        "resumed_from": start.source,
        "restarts": attempt.number,
        "restart_causes": attempt.causes,
        "skipped_samples": len(skipped),
        "in_sync": True,
        "checksum": hvd.check_in_sync(model),
        "check_s": check.seconds,
        "evaluate_s": evaluate.seconds,
        "saves": saver.saves,
        "fit_s": time.time() - started,
        "started": started,
        "hosts": hosts,
        "ranks": ranks,
        "git_revision": tracking.git_revision(Path.cwd()),
        **facts,
        "config": dataclasses.asdict(config),
    }

    def finish() -> None:
        if recorder:
            checkpoint.export(model, folder, saved_model=config.checkpoint.saved_model)
            schedule = schedules.schedule_of(config, numbers)
            tracking.write_summary(folder, summary)
            tracking.draw_curves(folder, recorder.epochs, schedule, numbers.steps_per_epoch)

    hvd.run_together(finish)
    display.show_ranks(console, ranks, heartbeat.slow_ranks(ranks, config.health))
    display.show_result(console, folder, summary, gradients)
    own_journal.write("end", global_step=clock.global_step, stopped_by=stop.stopped_by, exit_code=stop.exit_code)
    return stop.exit_code


def refuse_differences(plans: Sequence[tuple[Config, Numbers]]) -> None:
    """Makes sure that all ranks are about to do the same: after other numbers of steps they would wait forever.

    Args:
        plans: every rank's configuration and numbers.

    Raises:
        ConfigError: they differ; names the first rank that does and in what.
    """
    flat = [
        {option: value_of(config, option) for option in option_types()} | dataclasses.asdict(numbers)
        for config, numbers in plans
    ]
    for rank, values in enumerate(flat):
        for name, value in values.items():
            if value != flat[0][name]:
                raise ConfigError(
                    f"rank {rank} has {name} {value}, rank 0 has {flat[0][name]}: start all ranks with the same"
                    f" configuration, and give them the same data"
                )


def own_callbacks(config: Config) -> Callable[[], list[keras.callbacks.Callback]]:
    """Finds the user's callbacks, without making them.

    Args:
        config: train.callbacks names functions or classes that need no arguments.

    Returns:
        A function that makes new ones; it raises ConfigError for what is no callback.
    """
    names = config.train.callbacks
    found = [lookup.find("train.callbacks", name, {}) for name in names]

    def make() -> list[keras.callbacks.Callback]:
        import keras

        made = [function() for function in found]
        for name, callback in zip(names, made, strict=True):
            if not isinstance(callback, keras.callbacks.Callback):
                kind = type(callback).__name__
                raise ConfigError(f"train.callbacks: {name} returned {kind}, expected a Keras callback")
        return made

    return make


def compiled_model(
    build_model: models.Build,
    make_metrics: Callable[[], list[keras.metrics.Metric]],
    data_set: data.DataSet,
    config: Config,
    numbers: Numbers,
) -> keras.Model:
    """Makes the model and its distributed optimizer.

    Args:
        build_model: from models.builder.
        make_metrics: from models.metrics.
        data_set: gives the shape of a sample and the number of classes.
        config: the resolved configuration.
        numbers: derived from it.

    Returns:
        The model, with the same weights on every rank, and dropout of its own.
    """
    import keras

    from ringtrain import hvd, optimizers, plateau

    keras.config.set_dtype_policy(config.train.precision)
    keras.utils.set_random_seed(config.seed)
    model = build_model(data_set.input_shape, data_set.num_classes)
    if config.model.sync_batch_norm and not hvd.synchronize_batch_norm(model):
        raise ConfigError(f"model.sync_batch_norm: {config.model.name} has no BatchNormalization layers: leave it out")
    models.seed_by_rank(model, config.seed, hvd.rank())
    optimizer = optimizers.build(config, numbers, model)
    if config.train.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        op={"average": hvd.Average, "adasum": hvd.Adasum}[config.hvd.op],
        compression={"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[config.hvd.compression],
        deterministic=config.hvd.deterministic,
    )
    loss, metrics = models.cross_entropy(config.model.label_smoothing), make_metrics()
    plateau.check_monitor(config.train.monitor, metrics)
    # XLA has no kernel for Horovod's allreduce; "auto" would turn it on where there is a GPU.
    model.compile(optimizer, loss, metrics=["accuracy", *metrics], jit_compile=False)
    if config.train.jit:
        hvd.jit_gradients(model)
    return model


def agree_on_folder(config: Config, numbers: Numbers, attempt: reports.Attempt) -> Path:
    """Lets rank 0 make the run's folder, and tells it to every rank.

    Args:
        config: the resolved configuration, to be kept there.
        numbers: the same.
        attempt: a start that is not the first goes on in the folder of the first.

    Returns:
        The folder.

    Raises:
        RunDirectoryError: on every rank, if rank 0 could not make it.
    """
    from ringtrain import hvd, tracking

    def make() -> Path:
        name = config.run.name or tracking.default_name(config.data.name)
        folder = tracking.create_folder(
            Path(config.run.directory),
            name,
            number_if_taken=not config.run.name,
            go_on=bool(config.run.name) and (config.run.resume != "never" or attempt.run_name == config.run.name),
        )
        derived = "".join(f"# {name} = {value}\n" for name, value in dataclasses.asdict(numbers).items())
        (folder / "config.toml").write_text(f"# derived:\n{derived}\n{settings.to_toml(config)}", encoding="utf-8")
        return folder

    made = hvd.run_together(make if hvd.rank() == 0 else lambda: None)
    return hvd.broadcast_object(made, root_rank=0, name="ringtrain_folder")


if __name__ == "__main__":
    raise SystemExit(main())
