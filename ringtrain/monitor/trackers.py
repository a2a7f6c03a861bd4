"""Records of a run in MLflow and Weights & Biases, sent by rank 0 in a thread: no step waits for a network."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.config import Config, TrackingConfig, option_types, value_of
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.protocol.json_text import parse_json

IDS = "tracking.json"
"""file of the run folder with the run's IDs in the trackers, under which a resumed run continues"""
PROJECT = "ringtrain"
"""MLflow experiment and W&B project, unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT names another"""
FILES = ("report.html", "summary.json", "config.toml", "curves.png")
END_S, FAILED_END_S = 60.0, 5.0
"""seconds that the end of a run waits for records that are being sent"""
# MLflow's own defaults, 120 s and 7 retries, add up to minutes before it reports a server that is down.
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
MAX_METRICS, MAX_PARAMS, MAX_LETTERS = 1000, 100, 5000
"""of one request to MLflow, and of one value"""


class Record(NamedTuple):
    """Numbers after a step; `time_s` is Unix time."""

    global_step: int
    time_s: float
    values: Mapping[str, float]


class MLflow:
    """Run on an MLflow server, or in another of MLflow's stores."""

    name = "MLflow"

    def __init__(self, uri: str, ids: dict[str, Any], folder: Path, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        self.client, known = _mlflow_client(uri), ids.get("mlflow", {})
        if known.get("uri") == uri:
            self.run_id, experiment_id = known["run_id"], known["experiment_id"]
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self.client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
            self.run_id = self.client.create_run(experiment_id, run_name=folder.name).info.run_id
            params = [Param(name, str(value)[:MAX_LETTERS]) for name, value in values.items()]
            for begin in range(0, len(params), MAX_PARAMS):
                self.client.log_batch(self.run_id, params=params[begin : begin + MAX_PARAMS])
        ids["mlflow"] = {"uri": uri, "experiment_id": experiment_id, "run_id": self.run_id}
        page = f"/#/experiments/{experiment_id}/runs/{self.run_id}"
        self.link = uri.rstrip("/") + page if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"

    def log(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name), value, int(1000 * record.time_s), record.global_step)
            for record in records
            for name, value in record.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[begin : begin + MAX_METRICS])

    def end(self, state: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(
            self.run_id, tags=[RunTag(name, str(value)[:MAX_LETTERS]) for name, value in summary.items()]
        )
        for file in files:
            self.client.log_artifact(self.run_id, str(file))
        self.client.set_terminated(self.run_id, state)


def _mlflow_client(uri: str) -> Any:
    for name, value in MLFLOW_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


class WandB:
    """Run of Weights & Biases."""

    name = "W&B"

    def __init__(self, mode: Any, ids: dict[str, Any], folder: Path, values: Mapping[str, Any]) -> None:
        import wandb

        run_id = ids.setdefault("wandb", {"id": uuid.uuid4().hex[:8]})["id"]
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        settings = wandb.Settings(console="off", silent=True, init_timeout=30.0, reinit="create_new")
        self.run = wandb.init(
            project=project, name=folder.name, id=run_id, resume="allow", dir=str(folder), mode=mode, settings=settings
        )
        self.run.config.update(dict(values), allow_val_change=True)
        self.run.define_metric("*", step_metric="global_step")  # W&B's own step does not go back, as a resumed run may
        offline = f"wandb sync {shlex.quote(str(folder))}/wandb/offline-run-*"  # a resumed run has several
        self.link = str(self.run.url) if mode == "online" else offline

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self.run.log({"global_step": record.global_step, "time_s": record.time_s, **record.values})

    def end(self, state: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        import wandb

        self.run.summary.update(summary)
        artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
        for file in files:
            artifact.add_file(str(file))
        if files:
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if state == "FINISHED" else 1)


def check(config: TrackingConfig) -> None:
    """Raises, before the run has a folder, if a package is missing or MLflow's server does not answer."""
    if config.mlflow:
        with _errors_named("mlflow", config.mlflow):
            _mlflow_client(config.mlflow).search_experiments(max_results=1)
    if config.wandb != "off":
        with _errors_named("wandb", config.wandb):
            from wandb import init  # noqa: F401 - a folder wandb, as W&B makes them, can be imported as well


@contextlib.contextmanager
def _errors_named(name: str, value: str) -> Iterator[None]:
    """Raises errors of a tracker's library as one line."""
    try:
        yield
    except ImportError as error:
        why = f"--tracking.{name} needs a package that is not installed ({error})"
        raise MissingDependency(f"{why}: pip install 'ringtrain[{name}]'") from error
    except Exception as error:
        cure = {"mlflow": "start that server", "wandb": "call wandb login, or take offline"}[name]
        raise ConfigError(
            f"--tracking.{name} {value}: cannot be used: {_reason(error)}: {cure}, or leave the option out"
        ) from error


def _reason(error: BaseException) -> str:
    """Failure of the system behind an exception, such as a refused connection, else its own message, as one line."""
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    cause = next((one for one in reversed(chain) if isinstance(one, OSError)), error)
    return " ".join(str(cause).split())[:200] or type(cause).__name__


class Trackers:
    """Trackers of a run, as a context in which it trains: an exception ends the run there as failed.

    Records that a tracker does not accept are kept, and sent with the next ones; the first failure is a warning.
    Raises RingtrainError if a tracker cannot begin.
    """

    def __init__(self, config: Config, numbers: Mapping[str, Any], folder: Path) -> None:
        self.folder, wanted, ids = folder, config.tracking, {}
        values = {**{name: value_of(config, name) for name in option_types()}, **numbers}
        with contextlib.suppress(OSError, ValueError):
            ids = parse_json((folder / IDS).read_text(encoding="utf-8"))
        self._unsent: dict[MLflow | WandB, list[Record]] = {}
        if wanted.mlflow:
            with _errors_named("mlflow", wanted.mlflow):
                self._unsent[MLflow(wanted.mlflow, ids, folder, values)] = []
        if wanted.wandb != "off":
            with _errors_named("wandb", wanted.wandb):
                self._unsent[WandB(wanted.wandb, ids, folder, values)] = []
        self.links = {tracker.name: tracker.link for tracker in self._unsent}
        self._warned: set[str] = set()
        self._new: queue.SimpleQueue[Record | Callable[[Any], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        if self._unsent:
            (folder / IDS).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
            self._thread.start()

    def log(self, global_step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Sends numbers after a step, some time."""
        self._new.put(Record(global_step, time_s, values))

    def end(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Sends summary and files of a run that a signal has stopped (exit code above 0), or nothing, and waits."""
        files = [self.folder / name for name in FILES if (self.folder / name).exists()]
        facts = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
        self._end(END_S, "KILLED" if exit_code else "FINISHED", facts, files)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._end(FAILED_END_S, "FAILED", {}, [])

    def _end(self, timeout_s: float, *arguments: Any) -> None:
        if self._thread.is_alive():
            self._new.put(lambda tracker: tracker.end(*arguments))
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(", ".join(self.links), f"no answer within {timeout_s:g} s")

    def _send(self) -> None:
        end = None
        while end is None:
            received = [self._new.get()]
            while not self._new.empty():
                received.append(self._new.get())
            records = [one for one in received if isinstance(one, Record)]
            end = next((one for one in received if not isinstance(one, Record)), None)
            for tracker, unsent in self._unsent.items():
                unsent += records
                try:
                    if unsent:
                        tracker.log(unsent)
                        unsent.clear()
                    if end:
                        end(tracker)
                except Exception as error:
                    self._warn(tracker.name, _reason(error))

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            text = f"{name} does not accept records: {why}; training continues, {self.folder} has all of them"
            print(f"ringtrain: {text}", file=sys.stderr, flush=True)
        self._warned.add(name)
