"""Trains a model on one rank or many: the main path, to be read from top to bottom.

python -m ringtrain.train --config configs/digits.toml
horovodrun -np 2 -H localhost:2 python -m ringtrain.train --config configs/digits.toml
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain import checkpoint, data, devices, display, models, settings, stderr
from ringtrain.config import Config, Numbers, derive, option_types, value_of
from ringtrain.errors import ConfigError, RingtrainError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

SECONDS_FOR_RANK_0 = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one training job.

    Args:
        argv: the command line without the program's name; None: sys.argv.

    Returns:
        0; or 2 after an error that a person can mend, which one rank says in one line.
    """
    try:
        train(settings.read(sys.argv[1:] if argv is None else argv))
    except RingtrainError as error:
        # What one rank met, every rank raises (hvd.run_together): rank 0 speaks for all, and launchers end the job with
        # the first rank that ends. A rank that is still there after this pause is alone with its error.
        if display.launched_rank():
            time.sleep(SECONDS_FOR_RANK_0)
        print(f"ringtrain: {error}", file=sys.stderr)
        return 2
    return 0


def train(config: Config) -> None:
    """Trains, evaluates, proves that the ranks agree, and fills the run's folder.

    Every rank makes this walk and takes part in every collective; what rank 0 does alone contains none.

    Args:
        config: the resolved configuration.

    Raises:
        RingtrainError: on every rank, whichever rank met it. Until training begins, nothing is written.
    """
    # Names first: a misspelt one is told at once. TensorFlow is loaded with hvd, and talks.
    stderr.watch()
    read_data, build_model = data.source(config.data), models.builder(config.model)
    from ringtrain import hvd, tracking

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # Before TensorFlow touches a device: it would take memory on the host's first GPU for every rank.
    pinning = hvd.run_together(lambda: devices.pin(hvd.local_rank(), hvd.local_size(), config.device))

    # Data: each rank trains its own part of every global batch, and evaluates its own test samples.
    data_set = hvd.run_together(read_data)
    numbers = hvd.run_together(lambda: derive(config, size, len(data_set.train), len(data_set.test)))
    refuse_differences(hvd.allgather_object((config, numbers), name="ringtrain_numbers"))
    batches = data.training_batches(data_set.train, numbers.batch_size, rank, size, config.seed, config.train.epochs)
    own_tests = data.evaluation_shard(numbers.num_test, rank, size)
    test_batches = data.evaluation_batches(data_set.test, own_tests, numbers.batch_size)

    # Model and optimizer: rank 0's on every rank, and kept equal by averaged gradients.
    model = compiled_model(build_model, data_set, config, numbers.learning_rate)
    hvd.broadcast_model(model, root_rank=0)
    gradients = hvd.check_averaging(model.optimizer)

    # The run's folder: only now, when all that can be wrong with the configuration would have been found.
    folder = agree_on_folder(config, numbers)
    log = folder / "logs" / f"rank-{rank}.log"
    hvd.run_together(lambda: stderr.log_to(log, f"rank {rank} of {size} on {socket.gethostname()}: {pinning}"))
    hosts = hvd.allgather_object(socket.gethostname(), name="ringtrain_hosts")
    console = display.console_for(rank)
    display.show_plan(console, config, numbers, pinning, hosts)

    # Training: every rank makes the same number of steps, so that no rank waits for one that has ended.
    check = hvd.callbacks.CheckInSyncCallback(config.train.check_every_steps)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(numbers.learning_rate, config.train.warmup_epochs)
    with display.Progress(console, numbers.num_steps, config.train.epochs) as progress:
        recorder = tracking.Recorder(folder, progress, numbers.global_batch_size)
        started = time.time()
        history = model.fit(
            batches,
            epochs=config.train.epochs,
            steps_per_epoch=numbers.steps_per_epoch,
            callbacks=[
                *([warm_up] if config.train.warmup_epochs else []),
                hvd.callbacks.MetricAverageCallback(),
                evaluation(model, test_batches, len(own_tests)),
                check,
                *([recorder] if rank == 0 else []),
            ],
            shuffle=False,  # the shards are shuffled already, in the same way on every rank
            verbose=0,
        ).history

    # What came of it. The proof is the last check in fit: had ranks differed, none would have come this far.
    summary = {
        "test_accuracy": history["test_accuracy"][-1],
        "test_loss": history["test_loss"][-1],
        "images_per_s": recorder.images_per_s,
        "num_ranks": size,
        "global_step": recorder.global_step,
        "in_sync": True,
        "checksum": check.checksum,
        "check_s": check.seconds,
        "fit_s": time.time() - started,
        "started": started,
        "versions": tracking.versions(),
        "hosts": hosts,
        "git_revision": tracking.git_revision(Path.cwd()),
        "numbers": dataclasses.asdict(numbers),
        "config": dataclasses.asdict(config),
    }

    def finish() -> None:
        checkpoint.save(model, folder / "checkpoints", recorder.global_step)
        tracking.draw_curves(folder, recorder.epochs)
        tracking.write_summary(folder, summary)

    hvd.run_together(finish if rank == 0 else lambda: None)
    display.show_result(console, folder, summary, gradients)


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


def compiled_model(
    build_model: models.Build, data_set: data.DataSet, config: Config, learning_rate: float
) -> keras.Model:
    """Makes the model and its distributed optimizer.

    Args:
        build_model: from models.builder.
        data_set: gives the shape of a sample and the number of classes.
        config: the resolved configuration.
        learning_rate: already scaled.

    Returns:
        The model, with the same weights on every rank, and dropout of its own.
    """
    import keras

    from ringtrain import hvd

    keras.utils.set_random_seed(config.seed)
    model = build_model(data_set.input_shape, data_set.num_classes)
    models.seed_by_rank(model, config.seed, hvd.rank())
    options = config.optimizer
    if options.name == "sgd":
        optimizer = keras.optimizers.SGD(learning_rate, momentum=options.momentum)
    else:
        optimizer = {"adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW}[options.name](learning_rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        op={"average": hvd.Average, "adasum": hvd.Adasum}[config.hvd.op],
        compression={"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[config.hvd.compression],
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA has no kernel for Horovod's allreduce; "auto" would turn it on where there is a GPU.
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def agree_on_folder(config: Config, numbers: Numbers) -> Path:
    """Lets rank 0 make the run's folder, and tells it to every rank.

    Args:
        config: the resolved configuration, to be kept there.
        numbers: the same.

    Returns:
        The folder.

    Raises:
        RunDirectoryError: on every rank, if rank 0 could not make it.
    """
    from ringtrain import hvd, tracking

    def make() -> Path:
        name = config.run.name or tracking.default_name(config.data.name)
        folder = tracking.create_folder(Path(config.run.directory), name, number_if_taken=not config.run.name)
        derived = "".join(f"# {name} = {value}\n" for name, value in dataclasses.asdict(numbers).items())
        (folder / "config.toml").write_text(f"# derived:\n{derived}\n{settings.to_toml(config)}", encoding="utf-8")
        return folder

    made = hvd.run_together(make if hvd.rank() == 0 else lambda: None)
    return hvd.broadcast_object(made, root_rank=0, name="ringtrain_folder")


def evaluation(model: keras.Model, batches: tf.data.Dataset, num_samples: int) -> keras.callbacks.Callback:
    """A callback that adds test_loss and test_accuracy to each epoch's metrics, those of one process to rounding.

    Args:
        model: compiled.
        batches: this rank's share of the test samples.
        num_samples: how many these are; may be 0.

    Returns:
        The callback, to be used on every rank; the ranks' means are weighted by their samples.
    """
    import keras
    import numpy as np

    from ringtrain import hvd

    def evaluate(epoch: int, logs: dict[str, Any]) -> None:
        means = {"loss": 0.0, "accuracy": 0.0}
        if num_samples:
            means = model.evaluate(batches, return_dict=True, verbose=0)
        sums = np.array([means["loss"] * num_samples, means["accuracy"] * num_samples, num_samples], np.float64)
        loss, accuracy, total = hvd.allreduce(sums, op=hvd.Sum, name="ringtrain_evaluation").numpy()
        logs |= {"test_loss": loss / total, "test_accuracy": accuracy / total}

    return keras.callbacks.LambdaCallback(on_epoch_end=evaluate)


if __name__ == "__main__":
    raise SystemExit(main())
