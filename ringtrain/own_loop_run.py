"""The run of a script's own training loop: its context, its steps and its batches.

The script makes the steps; `run.loop.Training` is around them, as in `fit`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain import data, keras_fit
from ringtrain.config import Config
from ringtrain.errors import ConfigError, DataError, OutOfSync
from ringtrain.monitor import journal

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from ringtrain.run.context import RunContext
    from ringtrain.run.loop import Training
    from ringtrain.sources.loop import LoopOfScript

MODULUS = 2**31 - 1
"""Fingerprints are below this."""


class Loop:
    """Run of a script's own loop.

        for epoch in run.epochs():
            for step, (x, y) in run.batches(dataset):     # or: for step in run.steps()
                run.log(loss=train_step(x, y))

    There are two loops, as scripts have two, with code of their own between epochs. Without `epochs`, `steps` and
    `batches` give those of all epochs. A step counts when the next one, or the next epoch, is asked for.

    Attributes:
        folder: Path of the run's folder.
        history: Values of all epochs by name, those before a resume included.
        checksum: Checksum of weights and optimizers, after the context.
    """

    def __init__(self, config: Config, source: LoopOfScript, verbose: bool) -> None:
        self.config = config
        self.source = source
        self.model = source.model
        source.is_quiet = not verbose
        self.folder: Path | None = None
        self.checksum = ""
        # Training ends first; then the results are written; last, the models are the script's own again.
        self._around = contextlib.ExitStack()
        """of the whole run, with its results"""
        self._during = contextlib.ExitStack()
        """of training, at the end of which the last state is saved"""
        self._run: RunContext | None = None
        """None: not begun, or complete"""
        self._training: Training | None = None
        self._epochs: Iterator[tuple[int, range]] = iter(())
        self._left: range | None = None
        """steps of the epoch under way; None: there is none"""
        self._open_step: int | None = None
        """number in its epoch of the step that the script makes"""
        self._logs: dict[str, Any] = {}
        # A variable, as the script's step may be a graph, in which a number would stay that of the first step.
        self._weight: tf.Variable | None = None
        """rows of this rank times the number of ranks, divided by all rows of the step"""
        self._share = self._share_before = 1.0
        self._fingerprint = 0
        self._data: tuple[tuple[Any, ...], Any, bool] | None = None
        """arguments of `batches`, what reads them, and whether they come with a header"""

    @property
    def history(self) -> dict[str, list[Any]]:
        history: dict[str, list[Any]] = self.source.history.history
        return history

    @property
    def global_step(self) -> int:
        """Number of steps that are complete, in all epochs."""
        if self._run is None:  # a run that was complete has no clock
            return self.config.train.epochs * self.source.steps
        return self._run.clock.global_step

    # ---- before and after --------------------------------------------------------------------------------------------

    @keras_fit.in_words_of_a_script()
    def __enter__(self) -> Loop:
        from ringtrain import hvd, train
        from ringtrain.run import loop
        from ringtrain.run.context import RunContext
        from ringtrain.sources import script_model

        if hvd.elastic.is_on():
            raise ConfigError(
                "ringtrain.loop: ranks cannot join and leave here: start the job without --elastic, or use"
                " hvd.elastic.run"
            )
        # The main path of train.py up to training. If a part fails, the stack undoes those before it.
        process = train.setup(self.config, self.source, None, journal.Stages())
        with contextlib.ExitStack() as stack:
            stack.enter_context(script_model.unchanged_afterwards(self.model))
            with train.journaled(process):
                run = train.agree(process)
            if not isinstance(run, RunContext):
                self._restore_result(process.config, run)
                keras_fit.end_by_signal(process.signals.exit_code)
                self._around = stack.pop_all()
                return self
            # From here on, the script trains. A rank may hang in code of the script: its main thread is watched, too.
            self._run, self.folder = run, run.folder
            stack.enter_context(run.signals)
            stack.enter_context(self._during)
            self._during.enter_context(train.training(run))
            self._during.enter_context(self._averaged_by_optimizers(run))
            if run.step_timer:
                run.step_timer.script = hvd.monitoring.MainThread()
            run.fingerprint = self._fingerprint_of_batches
            self._training = loop.Training(run)
            self._epochs = self._training.epochs(finalizes=False)
            self._around = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from ringtrain import train
        from ringtrain.run.console import A_CALLBACK

        # An error of the script, or a run that was complete: nothing is saved or compared.
        run = self._run
        if error is not None or run is None:
            self._around.__exit__(kind, error, trace)
            if run:
                run.lock.release()
            return
        with self._around, train.journaled(run):
            self._end_open_step()
            # A script that has left its loops before their end has decided to stop.
            stop = run.callbacks.stop
            if not stop.stopped_by and run.clock.global_step < run.numbers.num_steps:
                stop.stopped_by = A_CALLBACK
            # The generator of epochs ends the last one, with its callbacks, before the run ends.
            for _ in self._epochs:
                pass
            self._during.close()
            summary, exit_code = train.finish(run)
        self.checksum = summary["checksum"]
        keras_fit.end_by_signal(exit_code or run.signals.exit_code)

    @contextlib.contextmanager
    def _averaged_by_optimizers(self, run: RunContext) -> Iterator[None]:
        """Context in which the optimizers weigh this rank's gradients, and a tape that averages, too, is refused."""
        import tensorflow as tf

        from ringtrain import hvd

        if run.size == 1 or not self.source.distributes:
            yield
            return
        self._weight = tf.Variable(1.0, trainable=False, dtype=tf.float64)
        for optimizer in self.model.optimizers:
            hvd.weigh_gradients(optimizer, self._weight)
        hvd.process.PROCESS.averaged_by_optimizers = True
        try:
            with self.model.weighing_numbers(self._weight):
                yield
        finally:
            hvd.process.PROCESS.averaged_by_optimizers = False
            for optimizer in self.model.optimizers:
                hvd.weigh_gradients(optimizer, None)

    def _restore_result(self, config: Config, summary: Mapping[str, Any]) -> None:
        """Gives models and history the state of a run that was complete."""
        from ringtrain.run import resume
        from ringtrain.sources import script

        folder = self.folder = Path(config.run.directory) / config.run.name
        # Models are exported by name, one alone as in `fit`.
        models = self.model.models
        exported = {model.name: model for model in models}
        if len(models) == 1:
            exported = {"model": models[0]}
        resume.restore_result(self.model, folder, summary, config.checkpoint.saved_model, exported)
        script.restore_callbacks((), self.source.history, folder)
        self.checksum = summary["checksum"]

    # ---- the loops ---------------------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Yields the numbers of the epochs that are left, from 0 on; ends early where the ranks agree to stop."""
        for epoch, steps in self._epochs:
            self._left = steps
            yield epoch
            self._end_epoch()

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are left of an epoch, counted over all epochs from 0 on.

        They are global, so that data and random numbers can follow from them. They end early where ranks agree to stop.
        """
        if self._left is None:  # the script has one loop, over all epochs
            for _ in self.epochs():
                yield from self.steps()
            return
        # The script makes the step between two values of this generator, so that one ends when the next is asked for.
        run, training = self._running()
        for step in self._left:
            training.begin_step(step)
            self._open_step, self._logs, self._share = step, {}, 1.0
            self._note_input()
            yield run.clock.global_step
            self._end_step()
            if self.model.stop_training:
                break
        self._end_steps()

    def batches(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, shuffle: bool = True
    ) -> Iterator[tuple[int, Any]]:
        """Yields the number of each step, as `steps`, and this rank's rows of its batch.

        Batches before a resume are skipped. Parts of unequal size count by their rows, in gradients and in `log`.

        Args:
            x, y, sample_weight: As for `ringtrain.fit`: batches of all ranks together, arrays, or a function (rank,
                number of ranks) that returns the batches of this rank alone. Pass the same object in each epoch.
            shuffle: Whether arrays, and batches of a `PyDataset`, have another order in every epoch.

        Raises:
            DataError: Data that cannot be divided, or that end before the epoch.
        """
        if self._left is None:
            for _ in self.epochs():
                yield from self.batches(x, y, sample_weight, shuffle=shuffle)
            return
        from ringtrain.strategies.rows import errors_named

        # After a resume within the epoch, reading begins at the first step that is left.
        run, _ = self._running()
        with errors_named("run.batches"):
            reader, has_header = self._reader(run, x, y, sample_weight, shuffle)
            batches: Iterator[Any] = iter(())
            if self._left:
                batches = reader(run.clock.epoch, self._left.start)
        for step in self.steps():
            with errors_named("run.batches"):
                batch = next(batches, None)
            if batch is None:
                raise DataError(
                    f"run.batches: the data ended on rank {run.rank} after {self._open_step} of {self.source.steps}"
                    f" steps of epoch {run.clock.epoch + 1}: pass as many, or fewer steps_per_epoch"
                )
            if has_header:
                header, batch = batch
                self._weigh(header)
            self._note_input()
            yield step, batch

    def rows(self, num: int) -> slice:
        """This rank's rows of `num` rows of all ranks, as many as every other rank's.

        Raises:
            DataError: The number of ranks does not divide `num`, so that parts would be unequal.
        """
        from ringtrain import hvd

        # Nothing weighs the parts here: the mean of unequal parts would not be that of all rows.
        if num % hvd.size():
            raise DataError(
                f"run.rows: got {num} rows for {hvd.size()} ranks, expected a multiple: choose another batch, or"
                f" use run.batches, which weighs unequal parts"
            )
        begin, end = data.part_of(num, hvd.rank(), hvd.size())
        return slice(begin, end)

    def log(self, **values: Any) -> None:
        """Logs values of a step, or after the steps of an epoch, of that epoch.

        Of those of steps, the means over all rows are logged for the epoch, unless a metric has the same name. `loss`,
        or without it all whose names end in `_loss`, end the run where they are not finite. Those of an epoch are means
        over the ranks.

        Args:
            values: Numbers or tensors []; the same names on every rank and in every step.
        """
        # Values of a step count by its rows; those that follow the last step are the epoch's.
        if self._open_step is not None:
            self._logs |= values
            return
        if self._run is not None and self._left is not None:
            evaluation: Any = self._run.callbacks.evaluation
            evaluation.logged |= values

    def result(self, metric: keras.Metric) -> Any:
        """Result of a metric over the rows that all ranks have seen, as in a validation that they divide. Collective.

        The metric itself stays as it is on this rank.
        """
        from ringtrain.run.evaluation import result_over_ranks

        return result_over_ranks(metric)

    def stop(self) -> None:
        """Asks for the end of training on all ranks; any rank may call it.

        They end together after one of the next steps (`health.agree_every_steps`), at the latest after the epoch.
        """
        from ringtrain.run.console import A_CALLBACK

        if self._run is not None:
            self._run.callbacks.stop.request(A_CALLBACK)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _running(self) -> tuple[RunContext, Training]:
        if self._run is None or self._training is None:
            raise ConfigError("ringtrain.loop: the loop is in its context: write `with ringtrain.loop(...) as run:`")
        return self._run, self._training

    def _end_step(self) -> None:
        """Ends the step that the script has made, if there is one."""
        if self._open_step is None:
            return
        _, training = self._running()
        step, self._open_step = self._open_step, None
        self.model.log(self._logs, self._share)
        # The first comparison of weights fails if the step averages nothing, of which these are the usual reasons.
        try:
            training.end_step(step, self._logs)
        except OutOfSync as error:
            how = "the step applies gradients by an optimizer that ringtrain.loop does not have, or was traced before"
            if not self.source.distributes:
                how = "distribute=False needs tape = hvd.DistributedGradientTape(tape) in the step"
            raise OutOfSync(f"ringtrain.loop: {error}: {how}") from error

    def _end_steps(self) -> None:
        """Gives metrics the state of all ranks, when the steps of an epoch are complete."""
        from ringtrain.hvd import step_timing

        run, _ = self._running()
        if run.clock.epoch_complete:
            evaluation: Any = run.callbacks.evaluation
            evaluation.end_steps()
        # What follows is the script's, such as a validation: it counts to no step.
        if self._weight is not None:
            self._weight.assign(1.0)
            self._share_before = 1.0
        step_timing.PLACE.enter(step_timing.SCRIPT)

    def _end_open_step(self) -> None:
        """Ends a step in which the script has left its loop, if it was made: zip(run.steps(), ...) may end before."""
        # A step that has logged something was made, as far as can be seen from here.
        if self._logs:
            self._end_step()
        self._open_step = None

    def _end_epoch(self) -> None:
        """Ends the epoch under way; raises ConfigError if the script has left its steps, and asks for the next one."""
        # Ranks that leave an epoch at different steps would wait for each other without an end.
        self._end_open_step()
        self._left = None
        run, _ = self._running()
        clock = run.clock
        if clock.epoch_complete or run.callbacks.stop.stopped_by:
            return
        done, num = clock.global_step % self.source.steps, self.source.steps
        raise ConfigError(
            f"ringtrain.loop: the script has left the steps of epoch {clock.epoch + 1} after {done} of {num}: pass as"
            f" many batches as steps_per_epoch, or call run.stop()"
        )

    def _note_input(self) -> None:
        """Notes that the input of a step is ready: its graph computes from now on."""
        from ringtrain.hvd import step_timing

        step_timing.PLACE.note("input", [])

    # ---- data --------------------------------------------------------------------------------------------------------

    def _reader(self, run: RunContext, x: Any, y: Any, sample_weight: Any, shuffle: bool) -> tuple[Any, bool]:
        """Function that returns the batches of an epoch from one of its steps on, and whether each has a header."""
        # Made once, as the script passes the same objects in every epoch.
        arrays = (x, y, sample_weight)
        if self._data and all(array is before for array, before in zip(arrays, self._data[0], strict=True)):
            return self._data[1:]
        numbers, epochs, seed = run.numbers, run.config.train.epochs, run.config.seed
        arguments = data.FitArguments(
            x=x,
            y=y,
            sample_weight=sample_weight,
            steps_per_epoch=numbers.steps_per_epoch,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
        )
        # As in `fit`: each rank reads its part of every batch, and arrays are in memory once per host.
        train, _ = data.inputs(arguments, self.source.rows)
        parts = data.Parts.of_rank(run.rank, run.size)
        reader: Any
        if isinstance(train, data.Stream):
            reader = data.StreamRows(train, parts)
        else:
            reader = data.RowBatches(train, self.source.rows, parts, seed, numbers.steps_per_epoch)
        self._data = arrays, reader, not reader.is_even
        run.data_set = data.DataSet(train, run.data_set.test, 0, ())
        if run.size > 1:
            data.share_on_host(run.data_set)
        return reader, not reader.is_even

    def _fingerprint_of_batches(self) -> int | None:
        """Fingerprint of all batches so far, which the ranks compare; None: they do not."""
        # Without `run.batches`, nothing is known of the data; one rank has none to compare with.
        if self._run is None or self._data is None or self._run.size == 1:
            return None
        return self._fingerprint

    def _weigh(self, header: data.Header) -> None:
        """Weighs this rank's gradients by its rows of the batch."""
        # The ranks compare what all batches so far were, and this rank's gradients count by its rows.
        share = float(np.asarray(header.shares)[0])
        self._fingerprint = int(math.fmod(self._fingerprint * 31 + float(header.fingerprint), MODULUS))
        if self._weight is None and share != 1.0:
            raise DataError(
                "run.batches: parts of unequal size, which distribute=False cannot weigh: use batches that all ranks"
                " divide evenly, with drop_remainder=True"
            )
        # A rank without rows has a placeholder in their place, which the script's own metrics would count.
        if share == 0.0:
            raise DataError("run.batches: a batch has fewer rows than there are ranks: use drop_remainder=True")
        if self._weight is not None and share != self._share_before:
            self._weight.assign(share)
        self._share = self._share_before = share
