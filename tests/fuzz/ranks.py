"""Trains drawn jobs on every rank of one start, and in Keras' own `fit`: ranks.py FOLDER LIMIT_S JOB [JOB ...].

FOLDER/JOB.py is a job's script. Each rank leaves FOLDER/JOB.<size>.<rank>: what one process of Keras trains, what the
ranks train, and what a run that is killed and started again trains; or the exception that ended it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import ringtrain
import ringtrain.hvd as hvd
from ringtrain.errors import RingtrainError

KERAS = (keras.Model.fit, keras.Model.evaluate, keras.Model.predict)


@dataclasses.dataclass
class Outcome:
    """Values that a job has returned, by path; or why it has not."""

    values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    refused: str = ""
    """error of ringtrain"""
    error: str = ""
    """traceback of any other exception"""
    unlike: tuple[str, ...] = ()
    """what the run's summary names as unlike one process"""


class Killed(BaseException):
    """Ends a job after a step."""


def end_at(step: int, by_signal: bool) -> keras.callbacks.Callback:
    """Callback that ends a job before a step, by an exception or by SIGTERM, which saves."""

    class End(keras.callbacks.Callback):
        left = step

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if self.left == 0 and by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.left == 0:
                raise Killed

    return End()


def flattened(results: Any) -> dict[str, np.ndarray]:
    """Numbers and texts of a nest by path."""
    values = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, part in sorted(value.items()):
                visit(f"{path}/{name}", part)
        elif isinstance(value, (list, tuple)):
            visit(f"{path}/length", len(value))
            for number, part in enumerate(value):
                visit(f"{path}/{number}", part)
        else:
            values[path] = np.asarray(value)

    visit("", results)
    return values


def outcome_of(script: str, fits: Callable[[], tuple[Any, Any, Any]]) -> Outcome:
    """Outcome of a script with functions in place of `fit`, `evaluate` and `predict`."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float64")
    space = {"__name__": "job"}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(script, space)
            return Outcome(flattened(space["job"](*fits())))
    except RingtrainError as error:
        return Outcome(refused=f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome(error=traceback.format_exc())


def on_ranks(folder: Path, name: str, unlike: list[str], *callbacks: Any) -> tuple[Any, Any, Any]:
    """`fit` of ringtrain under names of a job, `evaluate` and `predict`."""
    calls = iter(range(1, 9))

    def fit(model: keras.Model, *args: Any, **more: Any) -> Any:
        more["callbacks"] = [*more.get("callbacks", ()), *callbacks]
        options = {"run.directory": str(folder), "checkpoint.every_steps": 1, "tracking.every_steps": 0}
        history = ringtrain.fit(model, *args, name=f"{name}-{next(calls)}", options=options, **more)
        summary = json.loads((history.run / "summary.json").read_text())
        unlike.extend(summary.get("unlike_one_process") or ())
        return history

    return fit, ringtrain.evaluate, ringtrain.predict


def train(script: str, folder: Path, name: str, step: int) -> dict[str, Outcome]:
    """Outcomes of one process, of the ranks, and of ranks that end before a step (0: none do) and start again."""
    outcomes = {"keras": outcome_of(script, lambda: KERAS)}
    unlike: list[str] = []
    outcomes["ranks"] = outcome_of(script, lambda: on_ranks(folder, name, unlike))
    outcomes["ranks"].unlike = tuple(unlike)
    if step and not outcomes["ranks"].error and not outcomes["ranks"].refused:
        end = end_at(step, by_signal=step % 2 == 0)
        with contextlib.suppress(Killed, SystemExit):
            ended = outcome_of(script, lambda: on_ranks(folder, f"{name}-ended", [], end))
            if ended.error:  # the job has fewer steps, or the end itself failed
                outcomes["resumed"] = ended
                return outcomes
        outcomes["resumed"] = outcome_of(script, lambda: on_ranks(folder, f"{name}-ended", []))
    return outcomes


def main() -> None:
    folder, limit_s, jobs = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    hvd.init()
    for job in jobs:
        name, _, step = job.partition(":")
        faulthandler.dump_traceback_later(limit_s, exit=True)
        script = (folder / f"{name}.py").read_text()
        outcomes = train(script, folder / f"runs-{hvd.size()}", name, int(step or 0))
        path = folder / f"{name}.{hvd.size()}.{hvd.rank()}"
        path.with_suffix(path.suffix + ".part").write_bytes(
            pickle.dumps({kind: vars(one) for kind, one in outcomes.items()})
        )
        path.with_suffix(path.suffix + ".part").rename(path)
        hvd.allgather_object(name, name="next_job")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
