"""Records of a run in MLflow and Weights & Biases, which a thread of rank 0 sends: no step waits for the network."""

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

from ringtrain.config import Config, option_types, value_of
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.protocol.json_text import parse_json

IDS = "tracking.json"
"""file in the run folder with the run's IDs in the trackers, which a resumed run continues"""
PROJECT = "ringtrain"
"""MLflow experiment and W&B project, unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT names another"""
FILES = ("report.html", "summary.json", "config.toml")
END_S, STOPPED_END_S = 60.0, 5.0
"""maximum time in seconds to send the last records of a complete run, and of one that an error or a signal has ended"""
# MLflow's own defaults, 120 s and 7 retries, add up to minutes before it reports a server that is down.
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
MAX_METRICS, MAX_PARAMS, MAX_CHARACTERS = 1000, 100, 5000
"""MLflow's limits: metrics and parameters of a request, and characters of a value"""


class Record(NamedTuple):
    """Metrics after a step; `time_s` is Unix time."""

    global_step: int
    time_s: float
    values: Mapping[str, float]


class MLflow:
    """Run on an MLflow server, or in another of MLflow's stores."""

    name = "MLflow"

    def __init__(self, uri: str, ids: dict[str, Any], folder: Path, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        self.client = _mlflow_client(uri)
        known = ids.get("mlflow", {})
        if known.get("uri") == uri:
            self.run_id, experiment_id = known["run_id"], known["experiment_id"]
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self.client.get_experiment_by_name(name)
            if experiment:
                experiment_id = experiment.experiment_id
            else:
                experiment_id = self.client.create_experiment(name)
            self.run_id = self.client.create_run(experiment_id, run_name=folder.name).info.run_id
            ids["mlflow"] = {"uri": uri, "experiment_id": experiment_id, "run_id": self.run_id}
            params = [Param(name, str(value)[:MAX_CHARACTERS]) for name, value in values.items()]
            for begin in range(0, len(params), MAX_PARAMS):
                self.client.log_batch(self.run_id, params=params[begin : begin + MAX_PARAMS])
        page = f"/#/experiments/{experiment_id}/runs/{self.run_id}"
        self.link = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        if uri.startswith("http"):
            self.link = uri.rstrip("/") + page

    def log(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for record in records:
            for name, value in record.values.items():
                key = re.sub(r"[^\w\-. :/]", "_", name)
                metrics.append(Metric(key, value, int(1000 * record.time_s), record.global_step))
        for begin in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[begin : begin + MAX_METRICS])

    def end(self, state: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        from mlflow.entities import RunTag

        try:
            tags = [RunTag(name, str(value)[:MAX_CHARACTERS]) for name, value in summary.items()]
            self.client.log_batch(self.run_id, tags=tags)
            for file in files:
                self.client.log_artifact(self.run_id, str(file))
        finally:  # the store of files may need other packages and credentials than the server
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
        limits = {"init_timeout": 30.0, "finish_timeout": END_S}  # at exit, W&B would wait for its network without end
        settings = wandb.Settings(console="off", silent=True, reinit="create_new", **limits)
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
        if files:
            artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
            for file in files:
                artifact.add_file(str(file))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if state == "FINISHED" else 1)


KINDS: dict[str, type[MLflow | WandB]] = {"mlflow": MLflow, "wandb": WandB}


def check(config: Config) -> None:
    """Raises, before the run has a folder, if a package, a key or MLflow's server is missing for its records.

    A run that is resumed, maybe after a restart, is not stopped by a tracker that it had: see `Trackers`.
    """
    options = config.tracking
    if re.search("://[^/]*:[^/]*@", options.mlflow):
        raise ConfigError(
            "--tracking.mlflow: got a URI with a password, which config.toml would contain: set"
            " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a variable of the database such as PGPASSWORD"
        )
    if config.run.name and Path(config.run.directory, config.run.name, IDS).exists():
        return
    if options.mlflow:
        with _errors_named("mlflow", options.mlflow):
            _mlflow_client(options.mlflow).search_experiments(max_results=1)
    if options.wandb != "off":
        with _errors_named("wandb", options.wandb):
            from wandb import login  # not wandb: a folder of that name, as W&B makes them, can be imported as well

            if options.wandb == "online" and not login(prompt=False):
                raise ConfigError("there is no API key")


@contextlib.contextmanager
def _errors_named(name: str, value: str) -> Iterator[None]:
    """Context that turns errors of a tracker's library into one line."""
    try:
        yield
    except ImportError as error:
        text = f"--tracking.{name} needs a package that is not installed ({error}): pip install 'ringtrain[{name}]'"
        raise MissingDependency(text) from error
    except Exception as error:
        cure = {"mlflow": "start that server", "wandb": "call wandb login, or take offline"}[name]
        text = (
            f"--tracking.{name}: got {value}, which cannot be used: {_reason(error)}: {cure}, or leave the option out"
        )
        raise ConfigError(text) from error


def _reason(error: BaseException) -> str:
    """Failure of the system behind an exception, such as a refused connection, else its own message, as one line."""
    cause = error
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            cause = inner
        inner = inner.__cause__ or inner.__context__
    return " ".join(str(cause).split())[:200] or type(cause).__name__


class Trackers:
    """Trackers of a run, as a context in which it trains: an exception ends the run there as failed.

    Records that a tracker does not accept are kept and sent with the next ones; its first failure is a warning. Raises
    RingtrainError if a tracker cannot be opened, unless it has an earlier part of this run: then it is opened later.
    """

    def __init__(self, config: Config, numbers: Mapping[str, Any], folder: Path) -> None:
        self.folder, self._ids = folder, {}
        self._values = {**{name: value_of(config, name) for name in option_types()}, **numbers}
        with contextlib.suppress(OSError, ValueError):
            self._ids = parse_json((folder / IDS).read_text(encoding="utf-8"))
        options = {name: value_of(config, f"tracking.{name}") for name in KINDS}
        self._options = {name: value for name, value in options.items() if value not in ("", "off")}
        self._unsent: dict[str, list[Record]] = {name: [] for name in self._options}
        self._opened: dict[str, MLflow | WandB] = {}
        self._warned: set[str] = set()
        self._new: queue.SimpleQueue[Record | Callable[[Any], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        for name, value in self._options.items():
            with self._warning(name) if name in self._ids else _errors_named(name, value):
                self._tracker(name)
        if self._unsent:
            self._thread.start()

    @property
    def links(self) -> dict[str, str]:
        """Address of the run in each tracker, or the command that shows it."""
        return {tracker.name: tracker.link for tracker in list(self._opened.values())}  # the thread may add to it

    def log(self, global_step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Puts metrics after a step into the queue of the thread."""
        self._new.put(Record(global_step, time_s, values))

    def end(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Sends summary and files, and waits for the thread; `exit_code` is above 0 after a signal."""
        files = [self.folder / name for name in FILES if (self.folder / name).exists()]
        facts = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
        # After a signal, the launcher kills ranks that do not exit within --grace.
        if exit_code:
            self._end(STOPPED_END_S, "KILLED", facts, files)
        else:
            self._end(END_S, "FINISHED", facts, files)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._end(STOPPED_END_S, "FAILED", {}, [])

    def _end(self, timeout_s: float, *arguments: Any) -> None:
        if self._thread.is_alive():
            self._new.put(lambda tracker: tracker.end(*arguments))
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(" and ".join(KINDS[name].name for name in self._unsent), f"no answer within {timeout_s:g} s")

    def _send(self) -> None:
        end: Callable[[Any], None] | None = None
        while end is None:
            item = self._new.get()
            records, end = ([item], None) if isinstance(item, Record) else ([], item)
            for name, unsent in self._unsent.items():
                unsent += records
                with self._warning(name):
                    if unsent and (end or self._new.empty()):
                        self._tracker(name).log(unsent)
                        unsent.clear()
                with self._warning(name):
                    if end:
                        end(self._tracker(name))

    def _tracker(self, name: str) -> MLflow | WandB:
        if name not in self._opened:
            self._opened[name] = KINDS[name](self._options[name], self._ids, self.folder, self._values)
            with contextlib.suppress(OSError):
                (self.folder / IDS).write_text(json.dumps(self._ids, indent=2) + "\n", encoding="utf-8")
        return self._opened[name]

    @contextlib.contextmanager
    def _warning(self, name: str) -> Iterator[None]:
        """Context in which a failure of a tracker is a warning."""
        try:
            yield
        except Exception as error:
            self._warn(KINDS[name].name, _reason(error))

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            text = f"{name} does not accept records: {why}; training continues, {self.folder} has all of them"
            print(f"ringtrain: {text}", file=sys.stderr, flush=True)
        self._warned.add(name)
