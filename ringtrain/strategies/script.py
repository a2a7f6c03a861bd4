"""Strategy of `ringtrain.fit`: ring, with the data and the compiled model of a script."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from ringtrain import data, hvd
from ringtrain.config import Config, changed_options
from ringtrain.derived import Numbers
from ringtrain.errors import ConfigError, DataError, OutOfSync
from ringtrain.hvd.distributed import undistribute
from ringtrain.hvd.keras_patches import distributed, innermost, layers_of
from ringtrain.optim import divided
from ringtrain.optim.uneven import UnevenBatches
from ringtrain.protocol.attempt import Attempt
from ringtrain.run import console, devices, resume
from ringtrain.run.context import Validation
from ringtrain.strategies.ring import OF_OPTIMIZER, Ring

if TYPE_CHECKING:
    from rich.console import Console

    from ringtrain.run.context import RunContext


OF_A_WHOLE_BATCH = ("dice", "tversky", "circle")
"""Keras' losses that are no mean over rows"""


class Script(Ring):
    """Strategy ring for the model of a script.

    Attributes:
        is_quiet: Whether nothing is printed.
        unlike_one_process: Parts of the model whose results are not those of one process.
    """

    is_scripted = True
    ends_with_callbacks = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_quiet = False
        self.unlike_one_process: list[str] = []
        self._batches: UnevenBatches | None = None
        self._is_stream = False

    def console(self) -> Console:
        return console.console_for(1 if self.is_quiet else hvd.rank())

    def shard(self, numbers: Numbers) -> str:
        n = numbers
        return f"up to {n.batch_size} of {n.samples_per_step} rows of a step on each rank, the last batch included"

    def begin(self) -> devices.Pinning:
        try:
            return hvd.run_together(lambda: devices.pin_late(hvd.local_rank(), hvd.local_size(), self.config.device))
        except tf.errors.UnknownError:
            raise OutOfSync(
                f"ringtrain.fit: rank {hvd.rank()} has waited for the others, of which one has exited: every rank must"
                " call it, so it cannot be under a condition such as hvd.rank() == 0; see also that rank's output"
            ) from None

    def same_global_batch(self, config: Config, attempt: Attempt) -> Config:
        return config  # a script gives the global batch itself

    def build(self, model: keras.Model, train: data.Arrays | data.Stream, batch_size: int) -> None:
        """Makes a compiled model's optimizers distributed, and builds model, metrics, loss and optimizers."""
        optimizers = hvd.optimizers_of(model)
        changed = changed_options(self.config).items()
        options = {name: value for name, value in changed if name.startswith(OF_OPTIMIZER)}
        for optimizer in optimizers:
            if not distributed(optimizer):
                self.distribute(optimizer)
                type(innermost(optimizer)).options_of_fit = options
                continue
            earlier = getattr(innermost(optimizer), "options_of_fit", None)
            if earlier is None and options:
                raise ConfigError(
                    f"ringtrain.fit: options set {next(iter(options))}, but the optimizer is distributed already: pass"
                    " it to hvd.DistributedOptimizer, or leave hvd.DistributedOptimizer out"
                )
            if earlier is not None and earlier != options:
                raise ConfigError(
                    f"ringtrain.fit: the optimizer is sharded since an earlier fit with the options {earlier}: pass the"
                    " same ones, or compile the model again with a new optimizer"
                )
        num_rows = max(2, batch_size // hvd.size())
        if isinstance(train, data.Stream):
            batch = train.dataset.element_spec  # unknown sizes stay unknown, and no batch is read
        else:
            batch = train.rows(0, min(len(train), num_rows))
        has_call = type(model).call is not keras.Model.call
        if has_call:
            model._symbolic_build(data_batch=batch)
        if len(optimizers) > 1 or not has_call:
            tf.function(model.train_step).get_concrete_function(batch)  # builds optimizers of a train_step
            model.built = True
        if hvd.size() > 1:
            rows = train.rows if isinstance(train, data.Arrays) and len(train) >= divided.NUM_ROWS else None
            self.unlike_one_process = unlike_one_process(model, batch, rows)

    def clock(self, run: RunContext) -> resume.Clock:
        per_call = run.model.steps_per_execution
        return resume.Clock(run.start, run.numbers.steps_per_epoch, run.status, run.journal, per_call)

    def summary(self, run: RunContext) -> dict[str, Any]:
        train: Any = run.data_set.train
        facts = {"script": sys.argv[0], "unlike_one_process": self.unlike_one_process, "on_resume": train.on_resume}
        return {**super().summary(run), **facts}

    def fingerprint(self) -> int | None:
        return int(self._batches.fingerprint) if self._batches and self._is_stream else None

    @contextlib.contextmanager
    def training(self, run: RunContext) -> Iterator[Callable[[int, int], Iterator[Any]]]:
        train, rank, size = run.data_set.train, run.rank, run.size
        rows: Any
        self._is_stream = isinstance(train, data.Stream) and size > 1
        if isinstance(train, data.Stream):
            rows = data.StreamRows(train, rank, size, run.model.steps_per_execution)
        else:
            numbers = run.numbers
            rows = data.RowBatches(
                train, numbers.samples_per_step, rank, size, run.config.seed, numbers.steps_per_epoch
            )
        self._batches = UnevenBatches(run.model, not rows.is_even, rows.has_empty_parts)
        try:
            with self._batches:
                run.model.make_train_function(force=True)  # an earlier one has other gradients and losses
                yield rows
        finally:
            if isinstance(train, data.Stream):
                train.close()

    def run_step(self, run: RunContext, batches: Iterator[Any]) -> Mapping[str, Any] | None:
        train, clock = run.data_set.train, run.clock
        try:
            logs = super().run_step(run, batches)
            if train.may_end_early and clock.steps_left <= run.model.steps_per_execution:
                self._check_end(run, batches)
            return logs
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            if train.may_end_early and not clock.epoch_complete:
                num_batches = clock.global_step % clock.steps_per_epoch
                self._say(run, f"an epoch of the data ended after {num_batches} of {clock.steps_per_epoch} batches")
                clock.end_epoch()
                return None
            raise DataError(
                f"ringtrain.fit: the data ended after {run.clock.global_step} batches of {run.config.train.epochs}"
                f" epochs with {run.numbers.steps_per_epoch} each: pass as many, or fewer steps_per_epoch or epochs"
            ) from error

    def _check_end(self, run: RunContext, batches: Iterator[Any]) -> None:
        """Says so if an epoch of unknown length has more batches than the first: they are not trained."""
        with contextlib.suppress(tf.errors.OutOfRangeError):
            if next(batches, None) is not None:
                self._say(run, f"an epoch of the data has more than {run.clock.steps_per_epoch} batches: not trained")

    def _say(self, run: RunContext, text: str) -> None:
        if run.rank == 0:
            advice = "its length changes: use repeat() and steps_per_epoch for epochs of one length"
            print(f"ringtrain: {text}: {advice}", file=sys.stderr, flush=True)


def validation_of(given: data.FitArguments, test: data.Split, batch_size: int, prefix: str) -> Validation:
    """Returns the evaluation that arguments of `fit` describe; `batch_size`: rows of a training step on all ranks."""
    evaluated = 1 if isinstance(test, data.Stream) else given.validation_batch_size or batch_size
    freq = given.validation_freq
    due = freq if not isinstance(freq, int) else None if freq == 1 else range(freq, given.epochs + 1, freq)
    return Validation(prefix, evaluated, due)


def unlike_one_process(model: keras.Model, batch: Any, rows: Callable[[int, int], Any] | None) -> list[str]:
    """Parts of a built model whose results on several ranks are not those of one process, a phrase each.

    Args:
        batch: One of the model's batches, or its specification.
        rows: Returns the batch of the rows from one number up to another, of at least `divided.NUM_ROWS`. None: neither
            gradients nor metrics are tested.
    """
    found = []
    is_known, seen = divided.is_known(model), divided.Comparison()
    if not is_known or hvd.seeds(model):
        seen = divided.compare(model, batch, rows)
    if any(not hasattr(layer, "device_of_sums") for layer in hvd.batch_norm_layers(model)):
        found.append("batch normalization uses each rank's rows (all rows with model.sync_batch_norm)")
    if seen.draws:
        found.append("random layers draw other numbers on each rank")
    if seen.draws_by_tensorflow:
        found.append("tf.random draws other numbers on each rank")
    losses = model._compile_loss._flat_losses if model._compile_loss else []
    if names := [one.name for one in losses if _function_of(one.loss) in OF_A_WHOLE_BATCH]:
        found.append(f"the loss of {', '.join(names)} is a function of a whole batch, here of each rank's rows")
    elif seen.distance is not None:
        found.append(
            f"a batch's gradient is not the mean of its parts' ({seen.distance:.1e} apart): train_step, loss or"
            " optimizer combine the rows of each rank by themselves"
        )
    if seen.error and not is_known:
        found.append(f"gradients of a whole batch and of its parts were not compared: {seen.error}")
    if _merges_rows(model):
        found.append("an embedding's rows that occur several times are added up before the update")
    names = list(dict.fromkeys([*_not_summed(model, rows), *seen.metrics])) if rows else []
    if names:
        found.append(f"{', '.join(names)}: the metric is no sum over rows")
    return found


def _merges_rows(model: keras.Model) -> bool:
    """Returns whether an update with the sum of a row's gradients differs from Keras' with its parts."""
    if not any(isinstance(layer, keras.layers.Embedding) for layer in layers_of(model)):
        return False
    for optimizer in map(innermost, hvd.optimizers_of(model)):
        reduction, is_linear = optimizer.reduction, isinstance(optimizer, keras.optimizers.SGD)
        if not is_linear and (reduction.merges_rows or reduction.sparse_as_dense or reduction.sharded):
            return True
    return False


def _function_of(loss: Any) -> str:
    """Name of the function of a loss, which may be given as a class, a function or a text."""
    return str(getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)).lower()


def _not_summed(model: keras.Model, rows: Callable[[int, int], Any]) -> list[str]:
    """Names of metrics whose state after two halves of a batch is not the sum of their states after each."""
    metrics = divided.metrics_of(model)
    if not metrics:
        return []

    kept = [*hvd.seeds(model), *hvd.global_seed(), *hvd.weights_of_one_rank(model)]
    before = [keras.ops.convert_to_numpy(variable) for variable in kept]

    def states(begin: int, end: int) -> list[list[Any]]:
        model.reset_metrics()
        model.test_step(rows(begin, end))
        return [[keras.ops.convert_to_numpy(variable) for variable in metric.variables] for metric in metrics]

    try:
        pairs = zip(metrics, states(0, 4), states(4, 8), states(0, 8), strict=True)
        names = [
            one.name for one, *each in pairs if not all(itertools.starmap(divided.is_sum, zip(*each, strict=True)))
        ]
    except Exception:  # of the script's own code; a step will raise it again
        return []
    finally:
        model.reset_metrics()
        is_random = len(hvd.global_seed()) + len(hvd.seeds(model)) > len(kept)
        for variable, value in zip(kept, before, strict=True):
            is_random = is_random or not np.array_equal(variable, value)
            variable.assign(value)
    return [] if is_random else names


@contextlib.contextmanager
def unchanged_afterwards(model: keras.Model, seeds_ranks: bool = True) -> Iterator[None]:
    """Context after which model, optimizers and layers are as before it, but for what is trained; see docs/fit.md.

    seeds_ranks: The run gives each rank other random numbers; afterwards they are equal again.
    """
    seeds_ranks = seeds_ranks and hvd.size() > 1
    objects = [model, *hvd.optimizers_of(model)]
    of_script = [one for one in objects[1:] if distributed(one)]
    synchronized = list(hvd.synchronized_layers(model))
    before = [{name: vars(one).get(name) for name in ("train_step", "apply")} for one in objects]
    if model.jit_compile:
        model.make_test_function()  # which XLA compiles, as it reduces nothing
    jit_compile, model.jit_compile = model.jit_compile, False  # XLA has no kernel for Horovod's allreduce
    seed = context.global_seed()
    numbers = [state.numpy() for state in hvd.global_seed(create=seeds_ranks)]
    try:
        yield
        if seeds_ranks:  # the script's next random numbers are equal on all ranks again: rank 0's
            hvd.broadcast_variables(hvd.global_seed(create=True), root_rank=0)
            numbers = [state.numpy() for state in hvd.global_seed()]
        if hvd.size() > 1 and hvd.local_steps_of(model) > 1 and not of_script:
            slots = [slot for one in hvd.optimizers_of(model) for slot in innermost(one).of_one_rank(now=True)]
            hvd.broadcast_variables(slots, root_rank=0)  # the ranks' slots differ
    finally:
        for one, values in zip(objects, before, strict=True):
            for name, value in values.items():
                vars(one).pop(name, None)
                if value is not None:
                    object.__setattr__(one, name, value)
        for optimizer in hvd.optimizers_of(model):
            if all(optimizer is not one for one in of_script):
                undistribute(optimizer)
        for layer in hvd.synchronized_layers(model):
            if all(layer is not one for one in synchronized):
                hvd.unsynchronize(layer)
        vars(model).pop("ringtrain_gradients", None)
        model.jit_compile, model.train_function = jit_compile, None
        if seeds_ranks:  # the ranks' own seeds would shuffle the script's next dataset otherwise on each rank
            tf.random.set_seed(seed)
            for state, value in zip(hvd.global_seed(), numbers, strict=False):
                state.assign(value)
