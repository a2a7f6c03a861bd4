"""A function run once per combination of its arguments, on Spark's executors."""

from __future__ import annotations

import inspect
import itertools
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtrain.cluster.spark import function_run
from ringtrain.cluster.spark.session import reason
from ringtrain.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOWS = ("grid", "zip")
MAX_AT_ONCE = 512
"""runs submitted to Spark at a time, for any number of slots"""


@dataclass(frozen=True)
class Row:
    """Arguments and outcome of one run."""

    arguments: Mapping[str, Any]
    result: Any = None
    """return value of the function"""
    error: str = ""
    """name of the exception type, ProcessDied if the process died; "": no error"""
    message: str = ""
    traceback: str = ""
    host: str = ""
    """host it ran on; "": unknown"""
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()
    """addresses of the GPUs that Spark assigned to it; the run sees no others"""


def launch(
    spark: SparkSession, map_fun: Callable[..., Any], args_dict: Mapping[str, Sequence[Any]], how: str = "grid"
) -> list[Row]:
    """Runs a function once per combination of hyperparameters, in parallel on Spark's slots.

    Each run is a separate process on an executor. It leaves no state behind for later runs, and an exception or crash
    does not stop the others. If Spark assigns GPUs to tasks (spark.task.resource.gpu.amount), CUDA_VISIBLE_DEVICES is
    set before the function is unpickled. Executors need not have ringtrain.

        rows = launch(spark, train, {"learning_rate": [0.1, 0.01], "units": [64, 128]})
        best = max((row for row in rows if not row.error), key=lambda row: row.result)

    Args:
        spark: Spark session, e.g. from `start`.
        map_fun: Function, called with keyword arguments. Modules that it uses must be installed on the executors.
        args_dict: List of values for each argument.
        how: "grid": all combinations, the last argument changes fastest. "zip": the first values of all arguments, then
            the second values, and so on.

    Returns:
        One row per run, in the order of the combinations.

    Raises:
        LaunchError: Before any run: a value is not a list, lists to be zipped differ in length, the function does not
            take an argument, the function or a value cannot be pickled, or the executors cannot run it.
    """
    runs = combinations(args_dict, how)
    check_arguments(map_fun, runs)
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(function_run)
    payloads = [_pickled(cloudpickle.dumps, map_fun, run) for run in runs]
    context, group = spark.sparkContext, f"ringtrain-{uuid.uuid4().hex}"

    def task(payload: bytes) -> dict[str, Any]:
        context.setJobGroup(group, f"ringtrain: {len(runs)} runs of {_name(map_fun)}", interruptOnCancel=True)
        return context.parallelize([payload], 1).map(function_run.run).collect()[0]

    def row(run: Mapping[str, Any], payload: bytes) -> Row:
        try:
            outcome = task(payload)
            outcome["result"] = pickle.loads(outcome["result"]) if outcome["result"] else None
            return Row(run, **outcome)
        except Exception as error:  # the executor was lost, or the result cannot be unpickled
            return Row(run, error=type(error).__name__, message=reason(error), traceback=str(error))

    pool = ThreadPoolExecutor(min(len(runs), MAX_AT_ONCE))
    try:
        try:
            pool.submit(task, b"").result()  # an empty run: a missing package is one error, not one per run
        except Exception as error:
            raise LaunchError(f"Spark's executors cannot run {_name(map_fun)}: {reason(error)}") from error
        return list(pool.map(row, runs, payloads))
    except BaseException:
        context.cancelJobGroup(group)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def combinations(args_dict: Mapping[str, Sequence[Any]], how: str = "grid") -> list[dict[str, Any]]:
    """Arguments of every run, see `launch`; raises LaunchError if `how` is invalid or does not fit the values."""
    if how not in HOWS:
        raise LaunchError(f"got how={how!r}, expected {' or '.join(map(repr, HOWS))}")
    for name, values in args_dict.items():
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise LaunchError(f"args_dict[{name!r}]: got {_shown(values)}, expected a list of values")
        if not values:
            raise LaunchError(f"args_dict[{name!r}]: got an empty list, expected at least one value")
    lengths = {name: len(values) for name, values in args_dict.items()}
    if how == "zip" and len({*lengths.values()}) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise LaunchError(f"how='zip': got lists of unequal lengths ({listed}), expected equal lengths")
    if how == "zip" and args_dict:
        return [dict(zip(args_dict, values, strict=True)) for values in zip(*args_dict.values(), strict=True)]
    return [dict(zip(args_dict, values, strict=True)) for values in itertools.product(*args_dict.values())]


def check_arguments(map_fun: Callable[..., Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Raises LaunchError if a function does not take the arguments of the runs, or requires others."""
    if not callable(map_fun):
        raise LaunchError(f"got {_shown(map_fun)} for map_fun, expected a function")
    try:
        signature = inspect.signature(map_fun)
    except (TypeError, ValueError):
        return  # some C functions have no signature
    try:
        signature.bind(**runs[0])
    except TypeError as error:
        named = ", ".join(runs[0]) or "nothing"
        raise LaunchError(f"{_name(map_fun)}{signature} got {named} from args_dict: {error}") from error


def _pickled(dumps: Callable[[Any], bytes], map_fun: Callable[..., Any], run: Mapping[str, Any]) -> bytes:
    try:
        return dumps((map_fun, dict(run)))
    except Exception as error:  # any type: objects define how they are pickled
        reason_text = " ".join(str(error).split())
        raise LaunchError(
            f"{_name(map_fun)} and its arguments cannot be sent to executors: {type(error).__name__}: {reason_text}:"
            f" create sessions, locks and open files inside the function"
        ) from error


def _name(map_fun: Callable[..., Any]) -> str:
    return getattr(map_fun, "__qualname__", repr(map_fun))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
