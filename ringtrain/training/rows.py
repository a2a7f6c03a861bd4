"""Training on rows by number and on streams of batches, of which each rank trains its rows."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

import ringtrain
from ringtrain import data, hvd
from ringtrain.errors import ConfigError, DataError
from ringtrain.hvd import train_step
from ringtrain.training.step import Step

if TYPE_CHECKING:
    from ringtrain.training.run import Run


OTHER_SHAPES = re.compile(r"(Dimensions must be equal|Incompatible shapes|Cannot reshape a tensor|Input to reshape).*")
"""messages of TensorFlow's, perhaps since a model expects the rows of a whole batch"""
OF_A_PART = (
    "layers and train_step get this rank's part of the first axis of each tensor of the batch: take the number of rows"
    " from the data, as by tf.shape(x)[0]"
)


def check_parts(rows_per_step: int, num_rows: int, num_parts: int, noun: str) -> None:
    """Raises ConfigError if the last, smaller batch of an epoch has fewer rows than the parts that must have some."""
    rest = num_rows % rows_per_step
    if 0 < rest < num_parts:
        raise ConfigError(
            f"train.batch_size: a step has {rows_per_step} rows on {num_parts} {noun}, and the last of an epoch {rest}"
            f" of {num_rows}, expected {num_parts} or more, one for each: choose another size, or train with ring"
        )


class Rows:
    """Context in which a run trains; called with an epoch and one of its steps, it makes the steps from there on."""

    def __init__(self, run: Run, step: Step | None = None) -> None:
        self.run, self.train = run, run.job.data_set.train
        parts = data.Parts.of_rank(run.rank, run.size, run.config.train.virtual_ranks)
        has_header = run.strategy.shares_state  # one graph for ranks that change, and the same bits with them
        self._batches_of: Any
        if isinstance(self.train, data.Stream):
            self._batches_of = self.train.take_rows(parts, run.job.model.steps_per_execution, has_header)
        else:
            numbers = run.job.numbers
            # A call of several steps must not go on with the next epoch.
            num_epochs = run.config.train.epochs if run.job.model.steps_per_execution == 1 else 0
            self._batches_of = data.RowBatches(
                self.train,
                numbers.samples_per_step,
                parts,
                run.config.seed,
                numbers.steps_per_epoch,
                has_header,
                num_epochs,
            )
        # Batches that all epochs share begin with the first epoch that is trained, as in Keras.
        whole = not isinstance(self.train, data.Stream) and self._batches_of.steps == run.job.numbers.steps_per_epoch
        self._first_epoch = 0 if whole else run.start.initial_epoch
        # The step that the strategy has prepared, for a state that all ranks share, or one for this rank's own.
        self._step = step or Step(run.job.model)
        self._step.divide(has_header=not self._batches_of.is_even, has_empty_parts=self._batches_of.has_empty_parts)

    def __enter__(self) -> Rows:
        self._step.fingerprint.assign(0.0)
        self._step.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._step.__exit__(*error)
        finally:
            if isinstance(self.train, data.Stream):
                self.train.close()

    def __call__(self, epoch: int, first_step: int) -> Iterator[Mapping[str, Any]]:
        return self._steps(self._batches_of(epoch - self._first_epoch, first_step))

    def _steps(self, batches: Iterator[Any]) -> Iterator[Mapping[str, Any]]:
        while True:
            logs = self._run_step(batches)
            if logs is None:
                return
            self._note_unlike()
            yield logs

    def _note_unlike(self) -> None:
        """Says and notes once what the first step has shown."""
        text, noted = self._step.unlike, self.run.job.facts.get("unlike_one_process", [])
        if not text or text in noted:
            return
        self.run.job.facts["unlike_one_process"] = [*noted, text]
        if self.run.rank == 0:
            print(f"ringtrain: unlike 1 rank: {text}", file=sys.stderr, flush=True)

    def fingerprint(self) -> int | None:
        """Number of the global batches that this rank has trained, below 2 ** 31; None: ranks do not compare them."""
        if self.run.size == 1 or not isinstance(self.train, data.Stream):
            return None
        return int(self._step.fingerprint)

    def _run_step(self, batches: Iterator[Any]) -> Mapping[str, Any] | None:
        """Logs of a call of Keras' train function; None: this epoch has fewer batches than the first."""
        run, clock = self.run, self.run.clock
        try:
            logs: Mapping[str, Any] = run.job.model.train_function(batches)
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            if self.train.may_end_early and not clock.epoch_complete:
                num_batches = clock.global_step % clock.steps_per_epoch
                self._say(f"an epoch of the data ended after {num_batches} of {clock.steps_per_epoch} batches")
                clock.end_epoch()
                return None
            where = ""
            if isinstance(self.train, data.Stream) and self.train.is_shard:
                where = f" on rank {run.rank}"
            raise DataError(
                f"ringtrain.fit: the data ended{where} after {clock.global_step} batches of {run.config.train.epochs}"
                f" epochs with {run.job.numbers.steps_per_epoch} each: pass as many, or fewer steps_per_epoch or epochs"
            ) from error
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            explain_shapes(run.job.model, error)
            raise
        if self.train.may_end_early and clock.steps_left <= run.job.model.steps_per_execution:
            self._check_end(batches)
        return logs

    def _check_end(self, batches: Iterator[Any]) -> None:
        """Says so if an epoch of unknown length has more batches than the first: they are not trained."""
        with contextlib.suppress(tf.errors.OutOfRangeError):
            if next(batches, None) is not None:
                steps = self.run.clock.steps_per_epoch
                self._say(f"an epoch of the data has more than {steps} batches: not trained")

    def _say(self, text: str) -> None:
        if self.run.rank == 0:
            advice = "its length changes: use repeat() and steps_per_epoch for epochs of one length"
            print(f"ringtrain: {text}: {advice}", file=sys.stderr, flush=True)


def explain_shapes(model: keras.Model, error: Exception) -> None:
    """Explains an error of a step that may come from a part's number of rows, by a ConfigError or a note."""
    if hvd.size() == 1:
        return
    found = OTHER_SHAPES.search(str(error))
    if found:
        problem, _, _ = found[0].partition(" for '{{")
        raise ConfigError(f"ringtrain.fit: {_line_of_script(error)}: {problem.strip()}: {OF_A_PART}") from None
    if train_step.is_own(model):
        error.add_note(f"ringtrain.fit: {OF_A_PART}")


def _line_of_script(error: Exception) -> str:
    """The innermost line outside of packages, file:line; TensorFlow's errors of graphs have their frames as text."""
    frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'File "([^"]+)", line (\d+)', str(error))
    elsewhere = ("site-packages", str(Path(ringtrain.__file__).parent), "<")
    own = [f"{name}:{number}" for name, number in frames if not any(one in name for one in elsewhere)]
    return [type(error).__name__, *own][-1]


@contextlib.contextmanager
def errors_named(name: str) -> Iterator[None]:
    """Context in which errors of data name the function that they come from, instead of `ringtrain.fit`."""
    try:
        yield
    except tf.errors.OpError as error:
        text = data.text_of_data_error(error)
        if text:
            raise DataError(text) from None
        raise
    except DataError as error:
        error.args = (str(error).replace("ringtrain.fit:", f"{name}:", 1), *error.args[1:])
        raise
