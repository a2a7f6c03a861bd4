"""Trains drawn jobs on every rank of one start, and in Keras' own `fit`: ranks.py FOLDER JOB:MODE:STEP ...

FOLDER/JOB.py is a job's script. FOLDER/JOB.keras gets what one process of Keras trains, and FOLDER/JOB.<size>.<rank>
what a rank trains, and what a run that is ended and started again trains; or the exception that ended it. Modes are

- train: with STEP > 0, the ranks also end a run before this step, and start it again;
- compare: as well, and where Keras has other values, it trains weights that differ by rounding;
- kill: all ranks are killed soon after this step has begun;
- again: what `kill` has ended is started again, which FOLDER/JOB.again.<rank> has;
- death: rank 1 of an elastic job, which has no other job, is killed soon after this step has begun;
- configured: model, data and callbacks of the only fit of a job are trained by `ringtrain.train`.
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
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import ringtrain
import ringtrain.hvd as hvd
from ringtrain import train
from ringtrain.config.sections import Config, with_values
from ringtrain.data.fit_arguments import OF_DATA
from ringtrain.errors import RingtrainError

sys.path.insert(0, str(Path(__file__).parent))
from run import LIMIT_S, TOLERANCE, difference


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


def kill_at(step: int, rank: int | None = None) -> keras.callbacks.Callback:
    """Callback that kills its rank up to 0.1 s after the beginning of a step, on all ranks alike or on one alone."""

    class Kill(keras.callbacks.Callback):
        left = step

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if self.left == 0 and rank in (None, hvd.rank()):
                threading.Timer(step * 37 % 10 / 100, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return Kill()


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


def outcome_of(script: str, folder: Path, fits: Callable[[dict[str, Any]], tuple[Any, Any, Any]]) -> Outcome:
    """Outcome of a script in a folder of its own, with functions in place of `fit`, `evaluate` and `predict`."""
    keras.utils.clear_session()
    folder.mkdir(parents=True, exist_ok=True)
    space = {"__name__": "job"}
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            exec(script, space)
            return Outcome(flattened(space["job"](*fits(space["OPTIONS"]))))
    except RingtrainError as error:
        return Outcome(refused=f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome(error=traceback.format_exc())


def in_keras(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    return keras.Model.fit, keras.Model.evaluate, keras.Model.predict


def nearly_in_keras(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """`fit` of weights that differ by rounding."""

    def fit(model: keras.Model, *args: Any, **more: Any) -> Any:
        rng = np.random.default_rng(0)
        for variable in model.trainable_variables:
            variable.assign(variable * (1 + 1e-14 * rng.normal(size=variable.shape)))
        return keras.Model.fit(model, *args, **more)

    return fit, keras.Model.evaluate, keras.Model.predict


@dataclasses.dataclass
class OnRanks:
    """`fit` of ringtrain under names of a job, `evaluate` and `predict`."""

    runs: Path
    name: str
    callbacks: tuple[keras.callbacks.Callback, ...] = ()
    unlike: list[str] = dataclasses.field(default_factory=list)
    """what the summaries of its runs name as unlike one process"""

    def __call__(self, options: dict[str, Any]) -> tuple[Any, Any, Any]:
        calls = iter(range(1, 9))
        options = {
            "run.directory": str(self.runs),
            "checkpoint.every_steps": 1,
            "tracking.every_steps": 0,
            "strategy.name": "mpi-ring" if os.environ.get("RINGTRAIN_COLLECTIVES") == "mpi4py" else "ring",
            **options,
        }

        def fit(model: keras.Model, *args: Any, **more: Any) -> Any:
            more["callbacks"] = [*more.get("callbacks", ()), *self.callbacks]
            history = ringtrain.fit(model, *args, name=f"{self.name}-{next(calls)}", options=options, **more)
            summary = json.loads((history.run / "summary.json").read_text())
            self.unlike.extend(summary.get("unlike_one_process") or ())
            return history

        return fit, ringtrain.evaluate, ringtrain.predict


def references(folder: Path, names: list[str]) -> None:
    """Trains each job in one process of Keras, on the next rank that is free, unless another start has done so."""
    for name in names:
        with contextlib.suppress(FileExistsError):
            (folder / f"{name}.claim").touch(exist_ok=False)
            faulthandler.dump_traceback_later(LIMIT_S / 3, exit=True)
            script = (folder / f"{name}.py").read_text()
            write(folder / f"{name}.keras", {"keras": outcome_of(script, folder / f"{name}-keras", in_keras)})


def write(path: Path, outcomes: dict[str, Outcome]) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(pickle.dumps({kind: vars(one) for kind, one in outcomes.items()}))
    part.rename(path)


def trained(script: str, folder: Path, runs: Path, name: str, step: int) -> dict[str, Outcome]:
    """Outcomes of the ranks, and of ranks that end before a step (0: none do) and start again."""
    ranks = OnRanks(runs, name)
    outcomes = {"ranks": outcome_of(script, folder / "ranks", ranks)}
    outcomes["ranks"].unlike = tuple(ranks.unlike)
    if outcomes["ranks"].error or outcomes["ranks"].refused or not step:
        return outcomes
    end = end_at(step, by_signal=step % 2 == 0)
    with contextlib.suppress(Killed, SystemExit):
        ended = outcome_of(script, folder / "ended", OnRanks(runs, f"{name}-ended", (end,)))
        if ended.error:  # the end itself failed
            return {**outcomes, "resumed": ended}
    outcomes["resumed"] = outcome_of(script, folder / "ended", OnRanks(runs, f"{name}-ended"))
    return outcomes


def lose_a_rank(folder: Path, name: str, step: int) -> None:
    """Trains a job in an elastic start, in which rank 1 is killed after a step has begun."""
    ranks = OnRanks(folder / "runs-elastic", f"{name}-elastic", (kill_at(step, rank=1),))
    script = (folder / f"{name}.py").read_text()
    outcome = outcome_of(script, folder / f"{name}-elastic-{os.getpid()}", ranks)
    write(folder / f"{name}.death.{hvd.rank()}", {"death": outcome})


class Captured(Exception):
    """Ends a job at its first fit, with the arguments of that."""


def captured(script: str) -> tuple[keras.Model, dict[str, Any]]:
    """Model and arguments of the first fit of a script."""

    def fit(model: keras.Model, *args: Any, **more: Any) -> Any:
        raise Captured(model, dict(zip(("x", "y"), args, strict=False)) | more)

    space = {"__name__": "job"}
    exec(script, space)
    try:
        space["job"](fit, None, None)
    except Captured as call:
        return call.args
    raise ValueError("the job has no fit")


def configured(script: str, folder: Path, runs: Path, name: str) -> Outcome:
    """Outcome of a job whose model, data and callbacks are named by a configuration."""
    of_job = types.ModuleType("drawn_job")
    sys.modules["drawn_job"] = of_job
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            _, given = captured(script)
            precision = keras.config.dtype_policy().name
            callbacks = list(given.get("callbacks", ()))
            of_job.data = lambda: {key: value for key, value in captured(script)[1].items() if key in OF_DATA}

            def model(*_: Any) -> keras.Model:  # callbacks may use the model of their own job
                of_job.made, of_job.given = captured(script)
                return of_job.made

            of_job.model = model
            for number in range(len(callbacks)):
                setattr(of_job, f"callback_{number}", lambda number=number: of_job.given["callbacks"][number])
            values = {
                "run.directory": str(runs),
                "run.name": name,
                "data.name": "drawn_job:data",
                "model.name": "drawn_job:model",
                "seed": given.get("seed", 0),
                "train.precision": precision,
                "train.epochs": given.get("epochs", 1),
                "train.batch_size": given.get("batch_size", 32) // hvd.size(),
                "train.callbacks": tuple(f"drawn_job:callback_{number}" for number in range(len(callbacks))),
                "tracking.every_steps": 0,
            }
            train.train(with_values(Config(), values))
    except RingtrainError as error:
        return Outcome(refused=f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome(error=traceback.format_exc())
    variables = {"weights": of_job.made.weights, "optimizer": of_job.made.optimizer.variables}
    return Outcome(flattened({kind: [one.numpy() for one in them] for kind, them in variables.items()}))


def main() -> None:
    folder, jobs = Path(sys.argv[1]), sys.argv[2:]
    if ":death:" in jobs[0]:
        name, _, step = jobs[0].split(":")
        lose_a_rank(folder, name, int(step))
        return
    hvd.init()
    references(folder, [job.partition(":")[0] for job in jobs if ":train:" in job or ":compare:" in job])
    for job in jobs:
        name, mode, step = job.split(":")
        hvd.allgather_object(name, name="next_job")
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        script = (folder / f"{name}.py").read_text()
        own = folder / f"{name}-rank-{hvd.rank()}"
        if mode == "configured":
            path = folder / f"{name}.configured.{hvd.rank()}"
            outcomes = {mode: configured(script, own / "configured", folder / "runs-configured", name)}
        elif mode in ("train", "compare"):
            path = folder / f"{name}.{hvd.size()}.{hvd.rank()}"
            reference = Outcome(**pickle.loads((folder / f"{name}.keras").read_bytes())["keras"])
            outcomes = {"ranks": reference}
            if not reference.error:
                outcomes = trained(script, own / str(hvd.size()), folder / f"runs-{hvd.size()}", name, int(step))
            found = outcomes["ranks"].values
            if mode == "compare" and found and hvd.rank() == 0 and difference(reference.values, found, TOLERANCE):
                outcomes["nearly keras"] = outcome_of(script, folder / f"{name}-nearly", nearly_in_keras)
        else:
            path = folder / f"{name}.{mode}.{hvd.rank()}"
            kill = (kill_at(int(step)),) if mode == "kill" else ()
            runs = OnRanks(folder / "runs-killed", f"{name}-killed", kill)
            outcomes = {mode: outcome_of(script, own / "killed", runs)}
        write(path, outcomes)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
