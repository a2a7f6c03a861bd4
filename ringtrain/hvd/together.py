"""Actions whose error on one rank is raised on all of them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from ringtrain.errors import OutOfSync, RingtrainError
from ringtrain.hvd.backend import horovod
from ringtrain.hvd.collectives import allgather_object, broadcast_object, init
from ringtrain.hvd.step_timing import during

T = TypeVar("T")
Report = tuple[type[RingtrainError], str, str]
"""class, message and host of an error"""


def run_together(action: Callable[[], T], of_script: bool = False) -> T:
    """Runs an action on every rank, and raises on all ranks if it fails on one. A collective.

    Args:
        action: Called once per rank, without arguments. Must not contain a collective that a failing rank skips.
        of_script: Whether the action calls a script's own code, which may raise any exception.

    Returns:
        Result of `action` on this rank.

    Raises:
        RingtrainError: On every rank, the error of the lowest failing rank: a RingtrainError or an `OSError`. Other
            exceptions are bugs and end this rank only, or with `of_script` are raised unchanged on a rank that fails.
    """
    result, failure, report = _tried(action, of_script)
    try:
        with during("reduce"):
            reports = allgather_object(report, name="ringtrain_run_together")
    except OutOfSync:
        if failure is not None:  # the others are still in the action, in a collective of it: this error is the cause
            raise failure from None
        raise
    if failure is not None and not _is_expected(failure):
        raise failure
    for rank, other in enumerate(reports):
        if other is not None:
            raise _error_of(rank, other) from failure
    return result  # type: ignore[return-value]


def on_rank_0(action: Callable[[], T]) -> T:
    """Runs an action on rank 0, for example a download before `ringtrain.fit`. A collective; starts Horovod first.

    Args:
        action: Called on rank 0, without arguments. Must not contain a collective.

    Returns:
        Its result, on every rank.

    Raises:
        RingtrainError: On every rank, as `run_together`.
    """
    if not horovod.is_initialized():
        init()
    result, failure, report = None, None, None
    if horovod.rank() == 0:
        result, failure, report = _tried(action)
    with during("reduce"):
        result, report = broadcast_object((result, report), root_rank=0, name="ringtrain_on_rank_0")
    if report is not None:
        raise _error_of(0, report) from failure
    of_rank_0: T = result
    return of_rank_0


def barrier() -> None:
    """Waits until every rank has called it. A collective; starts Horovod first."""
    on_rank_0(lambda: None)
    run_together(lambda: None)


def _tried(action: Callable[[], T], of_script: bool = False) -> tuple[T | None, Exception | None, Report | None]:
    """Result of an action, or its error, with what other ranks are told about it. Bugs are raised."""
    try:
        return action(), None, None
    except OutOfSync:  # of a collective in it, on all ranks
        raise
    except Exception as error:
        if not _is_expected(error) and not of_script:
            raise
        kind: type[RingtrainError] = RingtrainError
        if isinstance(error, RingtrainError):
            kind = type(error)
        message = str(error)
        if not _is_expected(error):
            message = f"{type(error).__name__}: {error}"
        return None, error, (kind, message, socket.gethostname())


def _is_expected(error: Exception) -> bool:
    return isinstance(error, RingtrainError | OSError)


def _error_of(rank: int, report: Report) -> RingtrainError:
    """Error of a rank as it is raised on this one."""
    kind, message, host = report
    if rank != horovod.rank() and horovod.size() > 1:
        message = f"rank {rank} on {host}: {message}"
    return kind(message)
