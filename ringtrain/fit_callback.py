"""`hvd.callbacks.Run`: checks, folder, checkpoints and common stops for a script that keeps Keras' own `fit`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from ringtrain import hvd, keras_fit, strategies, train
from ringtrain.config import Config, changed_options, with_values
from ringtrain.errors import ConfigError
from ringtrain.hvd.callbacks import refuse_other_batches
from ringtrain.hvd.keras_patches import distributed
from ringtrain.monitor import journal
from ringtrain.protocol.for_script import ForScript
from ringtrain.protocol.json_text import parse_json
from ringtrain.run import console, evaluation, resume
from ringtrain.run.context import Job, Process, RunContext
from ringtrain.run.loop import end_stopped_epoch
from ringtrain.run.run_folder import METRICS, NO_METRICS
from ringtrain.sources import OF_FIT, OPTIONS, loop, script_model
from ringtrain.strategies.ring import OF_OPTIMIZER

WITHIN_EPOCHS = ("checkpoint.every_steps", "checkpoint.every_minutes")
ONLY_IN_FIT = (*WITHIN_EPOCHS, *OF_OPTIMIZER, *OF_FIT)
"""beginnings of options that need a resume within an epoch, or an optimizer that ringtrain makes distributed"""


class Run(keras.callbacks.Callback):
    """Makes a run of Keras' own `model.fit` in a script that shards its data itself.

    Before training, the ranks' code, optimizer and weights are compared, and rank 0's weights are broadcast. The run
    has a folder with metrics, checkpoints, `model.keras` and summary.json. SIGTERM, SIGINT, SIGUSR1, or a loss of NaN
    on one rank end all ranks after the same step. Metrics in `logs`, those of validation included, are those of all
    ranks' rows. A script that is started again under the same name resumes after the last complete epoch.

    It must be on every rank, as the first callback; leave out BroadcastGlobalVariablesCallback, MetricAverageCallback
    and BackupAndRestore. All ranks make the same number of steps, and validate on all ranks or on none. States of other
    callbacks are not saved. `ringtrain.fit` gives more: docs/fit.md.

    Args:
        name: Folder of the run in `runs`. "": its time, so that nothing is resumed.
        batch_size: Rows of a step on one rank.
        resume: "auto", "must" (fail without a checkpoint), "never", or the path of a run or checkpoint.
        options: Further options, as for `ringtrain.fit`.

    Attributes:
        folder: Path of the run's folder, after training.
        checksum: Checksum of weights and optimizer, after training.

    Raises:
        RingtrainError: On every rank, before training: an optimizer that is not distributed, ranks that differ.
        SystemExit, KeyboardInterrupt: At the end of training: a signal has ended it.

    Example:
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        >>> model.fit(x, y, batch_size=32, epochs=9, callbacks=[hvd.callbacks.Run("first", batch_size=32)])
    """

    def __init__(
        self,
        name: str = "",
        *,
        batch_size: int,
        resume: str = "auto",
        options: Config | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.batch_size, self.resume = name, batch_size, resume
        self.options = keras_fit.options_of("hvd.callbacks.Run", options)
        self.folder: Path | None = None
        self.checksum = ""
        self._run: RunContext | None = None
        self._result: list[Any] = []
        """weights of a complete run, until Keras' fit ends"""
        self._training = contextlib.ExitStack()
        self._evaluating = contextlib.ExitStack()

    # ---- before and after --------------------------------------------------------------------------------------------

    @keras_fit.in_words_of_a_script()
    def on_train_begin(self, logs: Any = None) -> None:
        model, epochs = self.model, self.params["epochs"]
        batches = (0, socket.gethostname(), self.params["steps"], epochs)
        refuse_other_batches(hvd.allgather_object(batches, name="ringtrain_batches"))
        self._end_failed()
        config = self._config()
        strategies.prepare(config)
        if hvd.elastic.is_on():
            raise ConfigError("hvd.callbacks.Run: ranks cannot join and leave here: start the job without --elastic")
        source = hvd.run_together(lambda: self._source(config))
        process = train.setup(config, source, None, journal.Stages())
        with contextlib.ExitStack() as stack:
            stack.enter_context(script_model.unchanged_afterwards(model, seeds_ranks=False))
            with train.journaled(process):
                run = train.agree(process)
            if not isinstance(run, RunContext):
                self.folder, self.checksum = Path(config.run.directory) / self.name, run["checksum"]
                resume.restore_result(model, self.folder, run, config.checkpoint.saved_model)
                self._result = model.get_weights()
                model._initial_epoch = epochs
                self._restore_history()
                keras_fit.end_by_signal(process.signals.exit_code)
                return
            self._run, self.folder = run, run.folder
            self._shown, run.terminal = run.terminal, console.console_for(1)  # Keras shows the progress
            model._initial_epoch = run.clock.global_step // run.numbers.steps_per_epoch  # as BackupAndRestore does it
            model.make_train_function(force=True)  # an earlier one does not have what watches this run's steps
            stack.enter_context(run.signals)
            stack.enter_context(train.training(run))
            stack.callback(self._end_after_others())
            self._training = stack.pop_all()
        for callback in run.callbacks.ordered:
            callback.set_params(self.params)
            callback.set_model(model)
        self._restore_history()
        self._call("on_train_begin")

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None
        if self._result:  # Keras has replaced them by the optimizer's averages, though no epoch was left
            self.model.set_weights(self._result)
            self._result = []

    def _end_after_others(self) -> Callable[[], None]:
        """Lets History, which Keras puts after the script's callbacks, call what must see all that these have done.

        Returns a function that undoes it.
        """
        history = self.model.history
        for hook in ("on_train_batch_end", "on_epoch_end"):
            setattr(history, hook, self._followed(getattr(history, hook), hook))
        history.on_train_end = self._end

        def undo() -> None:
            for hook in ("on_train_batch_end", "on_epoch_end", "on_train_end"):
                del vars(history)[hook]

        return undo

    def _followed(self, of_history: Callable[..., None], hook: str) -> Callable[..., None]:
        def call(number: int, logs: Any = None) -> None:
            of_history(number, logs)
            self._call(hook, number, logs, after_others=True)

        return call

    def _end(self, logs: Any = None) -> None:
        """Writes the run's results, after other callbacks have set the model's last weights."""
        run = self._run
        if run is None:
            return
        stop = run.callbacks.stop
        if not stop.stopped_by and run.clock.global_step < run.numbers.num_steps:
            stop.stopped_by = console.A_CALLBACK
        self._call("on_train_end", logs, after_others=True)
        self._run = None
        with train.journaled(run), run.signals:
            if run.clock.epoch_complete:
                run.callbacks.saver.finish()
            else:  # it would not resume within an epoch
                hvd.run_together(run.callbacks.saver.wait)
            self._training.close()
            run.terminal = self._shown
            summary, exit_code = train.finish(run)
        self.checksum = summary["checksum"]
        keras_fit.end_by_signal(exit_code or run.signals.exit_code)

    def _end_failed(self) -> None:
        """Ends a run whose `fit` has failed outside this callback, before the next one begins."""
        run, self._run = self._run, None
        if run is not None:
            self._training.close()
            run.lock.release()

    def _restore_history(self) -> None:
        """Gives Keras' History the metrics of the epochs that earlier starts have trained."""

        def read() -> list[Any]:
            path = self.folder and self.folder / METRICS
            if not path or not path.exists():
                return []
            return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]

        for record in hvd.on_rank_0(read)[: self.model._initial_epoch]:
            for name in record.keys() - set(NO_METRICS):
                self.model.history.history.setdefault(name, []).append(record[name])

    def _config(self) -> Config:
        if self.batch_size < 1:
            raise ConfigError(f"hvd.callbacks.Run: got batch_size {self.batch_size}, expected at least 1")
        command = ForScript.from_environment().by
        if command:
            raise ConfigError(
                f"hvd.callbacks.Run: {command} chooses options and folders of ringtrain.fit: call that in place of"
                " model.fit"
            )
        for option in changed_options(self.options):
            if not option.startswith(OPTIONS) or option.startswith(ONLY_IN_FIT):
                raise ConfigError(
                    f"hvd.callbacks.Run: options set {option}: leave it out, pass it to hvd.DistributedOptimizer, or"
                    " call ringtrain.fit"
                )
        values = {"run.name": self.name, "run.resume": self.resume, "model.name": type(self.model).__name__}
        values |= {"optimizer.learning_rate_scaling": "none", "train.epochs": self.params["epochs"]}
        return with_values(self.options, values)

    def _source(self, config: Config) -> KeptFit:
        model, steps = self.model, self.params["steps"]
        if hvd.size() > 1 and not all(map(distributed, hvd.optimizers_of(model))):
            raise ConfigError(
                "hvd.callbacks.Run: the optimizer is not distributed: compile the model with"
                " hvd.DistributedOptimizer(optimizer)"
            )
        if not steps:
            raise ConfigError("hvd.callbacks.Run: the batches of an epoch are not known: pass steps_per_epoch to fit")
        for optimizer in hvd.optimizers_of(model):
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
        return KeptFit(config, model, steps, self.batch_size * hvd.size())

    # ---- what Keras calls in between ---------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._call("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._call("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._call("on_train_batch_end", batch, logs, after_others=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._run:
            end_stopped_epoch(self._run)
        self._call("on_epoch_end", epoch, logs, after_others=False)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._run:
            self._evaluating.enter_context(hvd.during("evaluate"))
            self._run.callbacks.evaluation.on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        hvd.step_timing.PLACE.advance()  # progress, for the detection of stalls

    def on_test_end(self, logs: Any = None) -> None:
        if self._run:
            self._run.callbacks.evaluation.on_test_end(logs)
            self._evaluating.close()

    def _call(self, hook: str, *arguments: Any, after_others: bool | None = None) -> None:
        """Calls the run's own callbacks; an error ends the run.

        Args:
            after_others: Only those that belong after (True) or before (False) the script's own callbacks.
        """
        if self._run is None:
            return
        callbacks = self._run.callbacks.ordered
        num_before = callbacks.index(self._run.callbacks.evaluation) + 1
        if after_others is not None:
            if after_others:
                callbacks = callbacks[num_before:]
            else:
                callbacks = callbacks[:num_before]
        try:
            for callback in callbacks:
                getattr(callback, hook)(*arguments)
        except BaseException as error:
            run, self._run = self._run, None
            with train.journaled(run), self._training:
                raise error


class KeptFit(loop.StepsOfScript):
    """A model that a script trains by Keras' own `fit`, which can begin with any epoch only."""

    def job(self, process: Process) -> Job:
        shard = f"{self.rows // hvd.size()} rows of a step on each rank, as the script divides them"
        job = self.job_of(
            process,
            "the epoch that was not complete",
            shard,
            resumes_within_epochs=False,
            evaluation=MetricsOfAllRanks,
        )
        job.plan["seed"] = "the script's own"
        return job


class MetricsOfAllRanks(evaluation.Evaluation):
    """Metrics of all ranks where Keras' `fit` validates: its metrics then hold what they have seen of either data."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self.trained: tuple[dict[str, Any], dict[str, Any]] | None = None
        """metrics of all ranks, and of this one"""
        self.validated: dict[str, Any] = {}

    def on_test_begin(self, logs: Any = None) -> None:
        hvd.end_round(self.model)
        self.trained = self.summed(1), self.results
        self.take_own()

    def on_test_end(self, logs: Any = None) -> None:
        metrics = self.summed(1)
        names = evaluation.metrics_behind(logs or {}, self.results)
        metric_of = evaluation.first_of_all(hvd.allgather_object(names, name="ringtrain_metrics_of_validation"))
        prefix = self.run.validation.prefix
        self.validated = {f"{prefix}{name}": metrics[metric] for name, metric in metric_of.items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.run.clock.epoch_complete:
            return
        hvd.end_round(self.model)
        hvd.average_moving_statistics(self.model, self.run.config.model.not_averaged)
        logs = {} if logs is None else logs
        trained, results = self.trained or (self.summed(1), self.results)
        self.set_metrics(logs, trained | self.validated, (results,))
        logs |= self.validated
