"""Steps that train.py and elastic.py share: resolve names, build model and callbacks, agree on the run folder."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain import config_io, data, models
from ringtrain.config import Config, option_types, value_of
from ringtrain.derived import Numbers
from ringtrain.errors import CheckpointError, ConfigError
from ringtrain.monitor import fault_injection
from ringtrain.optim import schedules
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import checkpoint, consistency

if TYPE_CHECKING:
    import keras

    from ringtrain import hvd
    from ringtrain.monitor import journal
    from ringtrain.run import console, resume, run_folder, stopping
    from ringtrain.strategies.ring import Ring


@dataclass(frozen=True)
class Named:
    """Objects that the configuration names, resolved but not yet created."""

    faults: tuple[fault_injection.Fault, ...]
    read_data: Callable[[], data.DataSet]
    build_model: models.Build
    make_metrics: Callable[[], list[keras.metrics.Metric]]
    make_callbacks: Callable[[], list[keras.callbacks.Callback]]


def find(config: Config) -> Named:
    """Resolves the names in a configuration without TensorFlow, so that a misspelled one raises ConfigError at once."""
    return Named(
        fault_injection.parse(config.chaos),
        data.source(config.data),
        models.builder(config.model),
        models.metrics(config.model.metrics),
        own_callbacks(config),
    )


class Course:
    """Callbacks of one rank, and their results at the end. `pulse`: step timer of this rank, if it is monitored."""

    def __init__(
        self,
        config: Config,
        numbers: Numbers,
        model: keras.Model,
        data_set: data.DataSet,
        folder: Path,
        start: resume.Start,
        clock: resume.Clock,
        own_journal: journal.Journal,
        progress: console.Progress,
        signals: stopping.Signals,
        faults: tuple[fault_injection.Fault, ...],
        users_callbacks: Sequence[keras.callbacks.Callback],
        gradient_norm: hvd.GradientNorm | None,
        pulse: keras.callbacks.Callback | None = None,
    ) -> None:
        from ringtrain import hvd
        from ringtrain.run import early_stopping, evaluation, saver, stopping, tracking

        rank = hvd.rank()
        self.config, self.numbers, self.model, self.data_set = config, numbers, model, data_set
        self.folder, self.start, self.clock = folder, start, clock
        self.started = time.time()
        self.facts = {"numbers": dataclasses.asdict(numbers), "versions": tracking.versions()}
        # Each rank evaluates its own test samples.
        own_tests = data.evaluation_shard(numbers.num_test, rank, hvd.size())
        test_batches = data.evaluation_batches(data_set.test, own_tests, numbers.batch_size)
        self.evaluate = evaluation.Evaluation(test_batches, own_tests, data_set, clock, config.model.not_averaged)
        self.check = hvd.callbacks.CheckInSyncCallback(config.train.check_every_steps)
        self.stop = stopping.StopTogether(
            signals, config, start.global_step, numbers.steps_per_epoch, data_set.raise_unreadable
        )
        self.watch = early_stopping.Plateau(config, numbers, clock, self.stop, start)
        saboteur = fault_injection.FaultInjector(
            faults, rank, numbers.num_steps, numbers.steps_per_epoch, folder, own_journal
        )
        self.saver = saver.Saver(
            model,
            folder / "checkpoints",
            config,
            self.facts,
            clock,
            start.metrics,
            own_journal,
            self.watch.values,
            lambda: self.stop.save_is_due,
            saboteur.while_saving,
        )
        self.recorder = (
            tracking.Recorder(folder, progress, numbers, clock, config.tracking, gradient_norm) if rank == 0 else None
        )
        self.callbacks = [
            clock,
            *([pulse] if pulse else []),
            self.evaluate,
            *users_callbacks,
            *([self.recorder] if self.recorder else []),
            self.watch,
            self.stop,
            self.check,
            self.saver,
            *([fault_injection.callback(saboteur, clock)] if faults else []),
        ]

    def finish(self, hosts: Sequence[str], attempt: Attempt, **more: Any) -> dict[str, Any]:
        """Compares the ranks once more, lets rank 0 fill the run folder, and returns summary.json. Collective."""
        from ringtrain import hvd
        from ringtrain.run import run_folder, tracking

        skipped = set().union(*hvd.allgather_object(self.data_set.skipped, name="ringtrain_skipped"))
        metrics, recorder = self.saver.metrics, self.recorder
        summary = {
            "test_accuracy": metrics.get("test_accuracy"),
            "test_loss": metrics.get("test_loss"),
            "metrics": metrics,
            "images_per_s": recorder.images_per_s if recorder else math.nan,
            "num_ranks": self.numbers.num_ranks,
            "num_parameters": sum(math.prod(variable.shape) for variable in self.model.trainable_variables),
            "global_step": self.clock.global_step,
            "stopped_by": self.stop.stopped_by,
            "resumed_from": self.start.source,
            "restarts": attempt.number,
            "restart_causes": attempt.causes,
            "skipped_samples": len(skipped),
            "in_sync": True,
            "checksum": hvd.check_in_sync(self.model),
            "check_s": self.check.seconds,
            "evaluate_s": self.evaluate.seconds,
            "saves": self.saver.saves,
            "fit_s": time.time() - self.started,
            "started": self.started,
            "hosts": hosts,
            "git_revision": consistency.git_revision(Path.cwd()),
            **more,
            **self.facts,
            "config": dataclasses.asdict(self.config),
        }

        def write() -> None:
            if not recorder:
                return
            try:
                checkpoint.export(self.model, self.folder, saved_model=self.config.checkpoint.saved_model)
            except (CheckpointError, OSError) as error:  # the other files are written nevertheless
                summary["not_exported"] = str(error)
                raise
            finally:
                schedule = schedules.schedule_of(self.config, self.numbers)
                run_folder.write_summary(self.folder, summary)
                tracking.draw_curves(self.folder, recorder.epochs, schedule, self.numbers.steps_per_epoch)

        hvd.run_together(write)
        return summary


def refuse_differences(plans: Sequence[tuple[Config, Numbers | None]]) -> None:
    """Raises ConfigError with the first rank and value that differ from rank 0: unequal step counts would hang."""
    flat = [
        {option: value_of(config, option) for option in option_types()}
        | (dataclasses.asdict(numbers) if numbers else {})
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
    """Resolves the user's callbacks without creating them.

    Args:
        config: `train.callbacks` names functions or classes that are called without arguments.

    Returns:
        A function that creates new callbacks. It raises ConfigError if one is not a Keras callback.
    """
    names = config.train.callbacks
    found = [config_io.find("train.callbacks", name, {}) for name in names]

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
    named: Named,
    data_set: data.DataSet,
    config: Config,
    numbers: Numbers,
    strategy: Ring,
    distributed: bool = True,
) -> keras.Model:
    """Builds the compiled model: same weights, different dropout on all ranks; `distributed` False: local optimizer."""
    import keras

    from ringtrain import hvd
    from ringtrain.optim import optimizers
    from ringtrain.run import early_stopping

    keras.config.set_dtype_policy(config.train.precision)
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = named.build_model(data_set.input_shape, data_set.num_classes)
        optimizer = optimizers.build(config, numbers, model)
    if config.model.sync_batch_norm and not hvd.synchronize_batch_norm(model, strategy.device_of_sums):
        raise ConfigError(f"model.sync_batch_norm: {config.model.name} has no BatchNormalization layers: leave it out")
    _check_not_averaged(model, config.model.not_averaged)
    models.seed_by_rank(model, config.seed, hvd.rank())
    if config.train.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if distributed:
        optimizer = strategy.distribute(optimizer)
    loss, metrics = models.cross_entropy(config.model.label_smoothing), named.make_metrics()
    early_stopping.check_monitor(config.train.monitor, metrics)
    # XLA has no kernel for Horovod's allreduce; "auto" would enable XLA on GPUs.
    model.compile(optimizer, loss, metrics=["accuracy", *metrics], jit_compile=False)
    if config.train.jit:
        hvd.jit_gradients(model)
    strategy.make_ready(model, data_set.input_shape, data_set.num_classes)
    return model


def _check_not_averaged(model: keras.Model, patterns: Sequence[str]) -> None:
    from ringtrain import hvd

    paths = [weight.path for weight in hvd.weights_of_one_rank(model)]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"model.not_averaged: got {pattern}, expected the path of a weight that a layer makes as non-trainable,"
                f" with * for any characters; {model.name} has {', '.join(paths[:8]) or 'none'}"
            )


def lock_folder(lock: run_folder.RunLock, config: Config, attempt: Attempt) -> None:
    """Lets rank 0 lock an existing run folder before anything is read from it. Collective; raises RunDirectoryError."""
    from ringtrain import hvd
    from ringtrain.run import run_folder

    folder = Path(config.run.directory) / config.run.name

    def take() -> None:
        if hvd.rank() == 0 and config.run.name and run_folder.is_run(folder):
            lock.take(folder, same_job=attempt.number > 0)

    hvd.run_together(take)


def is_complete(lock: run_folder.RunLock, config: Config, start: resume.Start, trained: bool) -> bool:
    """Returns whether nothing is left to train or export, which rank 0 then prints. Collective, after `lock_folder`."""
    from ringtrain import hvd
    from ringtrain.run import console, early_stopping, run_folder

    accuracy = start.metrics.get("test_accuracy", 0.0)
    ended_by = "" if trained else early_stopping.reason_to_stop(config, start.monitored, accuracy)

    def ended() -> Mapping[str, Any]:
        if hvd.rank() or lock.folder is None or Path(start.source).parent != lock.folder / "checkpoints":
            return {}
        summary = run_folder.read_summary(lock.folder)
        exported = ["model.keras", *(["saved_model"] if config.checkpoint.saved_model else [])]
        has_all = summary.get("global_step") == start.global_step and "not_exported" not in summary
        has_all = has_all and all((lock.folder / name).exists() for name in exported)
        return summary if has_all and (trained or ended_by) else {}

    summary = hvd.broadcast_object(hvd.run_together(ended), root_rank=0, name="ringtrain_complete")
    if summary and lock.folder is not None:
        console.show_complete(console.console_for(hvd.rank()), lock.folder, summary, ended_by)
    return bool(summary)


def agree_on_folder(config: Config, numbers: Numbers, attempt: Attempt, lock: run_folder.RunLock) -> Path:
    """Lets rank 0 create and lock the run folder, and broadcasts its path. Collective, after `lock_folder`.

    A restart reuses the folder of the first attempt. Raises RunDirectoryError on every rank if rank 0 cannot create it.
    """
    from ringtrain import hvd
    from ringtrain.run import run_folder

    def make() -> Path:
        name = config.run.name or run_folder.default_name(config.data.name)
        folder = run_folder.create_folder(
            Path(config.run.directory),
            name,
            number_if_taken=not config.run.name,
            # Without the lock, the folder did not exist when checkpoints were searched.
            go_on=lock.folder is not None and (config.run.resume != "never" or attempt.run_name == config.run.name),
        )
        lock.take(folder)
        derived = "".join(f"# {name} = {value}\n" for name, value in dataclasses.asdict(numbers).items())
        (folder / "config.toml").write_text(f"# derived:\n{derived}\n{config_io.to_toml(config)}", encoding="utf-8")
        return folder

    made = hvd.run_together(make if hvd.rank() == 0 else lambda: None)
    return hvd.broadcast_object(made, root_rank=0, name="ringtrain_folder")
