"""Data and compiled model of a run, made ready for several ranks, whether a script or a configuration has them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ringtrain import data, hvd
from ringtrain.checkpoint import model_state
from ringtrain.config import combinations
from ringtrain.config.derived import Numbers
from ringtrain.protocol.cores import num_threads
from ringtrain.training import agreement, devices, identity, script_model
from ringtrain.training.run import Job, Run, Validation, classes_of
from ringtrain.training.unlike import own_code


def job_of(
    run: Run,
    model: keras.Model,
    given: data.FitArguments,
    data_set: data.DataSet,
    batch_size: int,  # rows of a step on all ranks, where the data do not bring their own batches
    prefix: str,  # of the names of evaluated metrics
    numbers_of: Callable[[int, int], Numbers],  # by training rows, and rows in a step
) -> Job:
    """Makes a compiled model ready for several ranks; notes what these must have in common. Collective."""
    train, test = data_set.train, data_set.test
    facts = _facts_of(run, given, train, test)
    validation = _validation_of(given, test, batch_size, prefix)
    unlike = script_model.build(run, model, train, batch_size, facts)
    # Last: the tracing before it replaces parts of the step.
    plan = {**train.plan, **script_model.compile_by_xla(run, model, train)}

    # A stream brings its own batches, which are the steps. Their number of rows is known only if it is the same in all.
    num_rows, rows_per_step = len(train), batch_size
    if isinstance(train, data.Stream):
        rows_per_step = train.batch_size
        if train.is_shard:
            rows_per_step *= run.strategy.num_copies
        num_rows *= rows_per_step
        if train.is_shard and hvd.size() > 1:
            unlike.append("each rank has batches of its own")
    numbers = numbers_of(num_rows, rows_per_step)

    # What a person reads before training begins.
    name = run.config.data.name
    if name != train.kind:
        name += f" ({train.kind})"
    plan["data"] = f"{name}: {_size(train)} to train, {_size(test)} to evaluate"
    plan["on resume"] = train.on_resume
    plan["shard"] = (
        f"up to {numbers.batch_size} of {numbers.samples_per_step} rows of a step on each rank, the last batch included"
    )
    if isinstance(train, data.Stream):
        plan |= _plan_of_stream(train)
    if isinstance(test, data.Stream) and test.is_of_rank_0:
        plan["validated by"] = f"rank 0 alone, {test.why_rank_0}".removesuffix(", ")
    if unlike:
        plan["unlike 1 rank"] = "; ".join(unlike)
    own = own_code(model)
    if own and hvd.size() > 1:
        plan["own code"] = "; ".join(own)

    checksums, of_name = _checksums(run, model, data_set)
    return Job(
        data_set=data_set,
        numbers=numbers,
        checksums=checksums,
        of_name=of_name,
        model=model,
        all_callbacks=given.callbacks,
        validation=validation,
        plan=plan,
        facts={"unlike_one_process": unlike, "own_code": own, "on_resume": train.on_resume},
    )


def _size(part: data.Split) -> str:
    """Number of rows or batches, for the plan."""
    if isinstance(part, data.Stream):
        return f"{len(part):,} batches"
    return f"{len(part):,}"


def _plan_of_stream(train: data.Stream) -> dict[str, str]:
    """Rows of the plan on data that bring their own batches."""
    rows = {}
    if train.is_shard:
        rows["shard"] = f"{train.num_batches} batches of its own on each rank"
    elif train.batch_size == 1:
        rows["global batch"] = "a batch of the data, whose rows are not known before"
        rows["shard"] = "a part of the rows of each batch on each rank"
    return rows


def _checksums(run: Run, model: keras.Model, data_set: data.DataSet) -> tuple[dict[str, str], set[str]]:
    """Returns what all ranks have in common by name, and the names of that part which all runs of one name share."""
    # Data. The first batch of a stream to validate need not be the same in every start.
    train, test = data_set.train, data_set.test
    checksums = agreement.of_data(data_set)
    if run.config.train.virtual_ranks:  # equal bits need the same instructions, and as many threads
        checksums |= devices.of_kernels(run.pinning)
        checksums["number of threads"] = str(num_threads(tf.config.threading.get_intra_op_parallelism_threads()))
    of_name = {*checksums}
    if isinstance(test, data.Stream):
        of_name.remove(f"validation data{agreement.DIVIDED}")

    # Losses, metrics and optimizers; of an endless stream the length of a call, as an epoch's last one is whole, too.
    compiled = identity.of_script(model)
    if isinstance(train, data.NumberedRows):
        compiled["shuffle"] = str(train.shuffle)
    if isinstance(train, data.Stream) and train.is_endless:
        compiled["steps_per_execution"] = str(model.steps_per_execution)
    if isinstance(train, data.Stream) and not train.is_shard:
        content = identity.content_of(train.dataset)
        if content:
            compiled[f"content of the training data{agreement.DIVIDED}"] = content
    of_name |= compiled.keys()

    # A resume compares shapes by itself, one by one, and names the first that differs.
    checksums |= compiled
    checksums["model"] = _checksum_of_shapes(model_state.shapes_of(model.weights))
    return checksums, of_name


def _facts_of(run: Run, given: data.FitArguments, train: data.NumberedRows | data.Stream, test: data.Split) -> set[str]:
    """Facts of the data and the arguments of `fit`, for the table of what does not go together."""
    of_horovod = {"BroadcastGlobalVariablesCallback", "MetricAverageCallback"}
    is_shard = given.batch_per_rank or train.is_shard
    known = {
        combinations.ELASTIC: run.strategy.ranks_change,  # where ranks join in the middle of what others have begun
        combinations.SEVERAL_RANKS: hvd.size() > 1 and not is_shard,
        combinations.BATCH_PER_RANK: given.batch_per_rank,
        combinations.INITIAL_EPOCH: given.initial_epoch > 0,
        combinations.OWN_BATCHES: isinstance(train, data.Stream),
        combinations.OWN_VALIDATION: isinstance(test, data.Stream),
        combinations.HOROVOD_CALLBACKS: any(classes_of(callback) & of_horovod for callback in given.callbacks),
    }
    return {fact for fact, is_so in known.items() if is_so}


def _checksum_of_shapes(shapes: list[list[Any]]) -> str:
    """Checksum of the weights' shapes and dtypes; their names depend on earlier models of the process."""
    return f"with {len(shapes)} weights and checksum {zlib.crc32(str([one[1:] for one in shapes]).encode()):08x}"


def _validation_of(given: data.FitArguments, test: data.Split, batch_size: int, prefix: str) -> Validation:
    """Returns the evaluation that arguments of `fit` describe; `batch_size`: rows of a training step on all ranks."""
    if isinstance(test, data.Stream):
        evaluated = 1
    else:
        evaluated = given.validation_batch_size or batch_size
    # Keras' argument is a number of epochs or a list of them; a run has the epochs themselves, or None for all.
    freq = given.validation_freq
    if not isinstance(freq, int):
        return Validation(prefix, evaluated, freq)
    if freq == 1:
        return Validation(prefix, evaluated)
    return Validation(prefix, evaluated, range(freq, given.epochs + 1, freq))
