"""MLflow, on a real server, and Weights & Biases, offline: what they receive, resumed runs, and trackers that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ringtrain
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config import CheckpointConfig, Config, RunConfig, TrackingConfig
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.monitor import trackers
from ringtrain.run import tracking

pytestmark = pytest.mark.slow

REQUIRED = "RINGTRAIN_REQUIRE_TRACKERS"
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(96, 6)), RANDOM.normal(size=(96, 3))
STEPS = 3
"""of an epoch"""


class Killed(Exception):
    pass


def needs(package: str) -> Any:
    """Module of a package; without it, the test is skipped, or fails if REQUIRED is set."""
    return __import__(package) if os.environ.get(REQUIRED) else pytest.importorskip(package)


def _model(wrap: Any = lambda optimizer: optimizer) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(wrap(keras.optimizers.SGD(0.01)), "mse", metrics=["mae"])
    return model


def _fit(folder: Path, name: str, *callbacks: Any, epochs: int = 4, **tracked: Any) -> Any:
    options = Config(
        run=RunConfig(directory=str(folder)),
        checkpoint=CheckpointConfig(every_steps=1),
        tracking=TrackingConfig(every_steps=2, **tracked),
    )
    arguments = {"batch_size": 32, "verbose": 0, "validation_data": (X, Y), "name": name, "options": options}
    return ringtrain.fit(_model(), X, Y, callbacks=callbacks, epochs=epochs, **arguments)


def _after(step: int, function: Any) -> keras.callbacks.Callback:
    """Callback that calls a function once, before the step after this one."""

    class After(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == step:
                function()

    return After()


def _kill() -> None:
    raise Killed


def _records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for a tracker also after an error, however busy the machine is."""
    monkeypatch.setattr(trackers, "STOPPED_END_S", trackers.END_S)


# ---- MLflow -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[Any]]]:
    """MLflow's own server with its database and files in a folder: its address and its process."""
    needs("mlflow")
    needs("flask")  # mlflow-skinny has no server
    for name, value in {**trackers.MLFLOW_DEFAULTS, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--artifacts-destination", "artifacts"]
    words += ["--backend-store-uri", "sqlite:///runs.db"]
    log, folder = tmp_path / "server.log", tmp_path / "server"
    folder.mkdir()
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        uri = f"http://127.0.0.1:{port}"
        while not _answers(uri):
            assert process.poll() is None, log.read_text()
        yield uri, process
        _end(process)


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        threading.Event().wait(0.1)
        return False


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a server with all its processes."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


def test_mlflow_receives_a_run_continues_it_and_may_fail(
    server: Any, patient: None, tmp_path: Path, capfd: Any
) -> None:
    uri, process = server
    MlflowClient = pytest.importorskip("mlflow").MlflowClient

    client = MlflowClient(uri)
    with pytest.raises(Killed):
        _fit(tmp_path, "one", _after(5, _kill), mlflow=uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "ringtrain"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED" and run.info.run_name == "one"

    # The resumed run is the same, with every number of the files and the report.
    history = _fit(tmp_path, "one", mlflow=uri)
    (run,) = client.search_runs([experiment.experiment_id])
    run_id, summary = run.info.run_id, json.loads((history.run / "summary.json").read_text())
    assert run.info.status == "FINISHED" and run.data.tags["checksum"] == history.checksum
    assert summary["tracked"] == {"MLflow": f"{uri}/#/experiments/{experiment.experiment_id}/runs/{run_id}"}
    assert summary["resumed_from"] and summary["config"]["tracking"]["mlflow"] == uri
    assert run.data.params["train.epochs"] == "4" and run.data.params["num_steps"] == str(4 * STEPS)
    for file, prefix in (("metrics.jsonl", ""), ("steps.jsonl", "steps/")):
        for name in ("loss", "mae", *(["val_loss"] if not prefix else [])):
            points = {one.step: one.value for one in client.get_metric_history(run_id, prefix + name)}
            assert points == {one["global_step"]: one[name] for one in _records(history.run, file)}, (file, name)
    files = {one.path for one in client.list_artifacts(run_id)}
    assert files == {"config.toml", "report.html", "summary.json"}
    page = Path(client.download_artifacts(run_id, "report.html", str(tmp_path))).read_text()
    assert "<h1>one</h1>" in page and history.checksum in page
    assert "does not accept" not in capfd.readouterr().err

    # Another name is another run. Its server is lost in the middle: one warning, and all files.
    history = _fit(tmp_path, "two", _after(4, lambda: _end(process)), mlflow=uri)
    ids = [json.loads((tmp_path / name / trackers.IDS).read_text())["mlflow"]["run_id"] for name in ("one", "two")]
    assert ids[0] == run_id != ids[1]
    warned = re.findall(r"ringtrain: MLflow does not accept records: (.*); training continues", capfd.readouterr().err)
    assert len(warned) == 1, "the connection is refused, or breaks in a request"
    assert [one["global_step"] for one in _records(history.run)] == [3, 6, 9, 12]
    assert json.loads((history.run / "summary.json").read_text())["checksum"] == history.checksum
    assert (history.run / "report.html").exists()

    # Lost before the start, it ends the start.
    with pytest.raises(
        ConfigError,
        match=rf"^tracking.mlflow in options: got {uri}, which cannot be used: .*refused.*: start that server",
    ):
        _fit(tmp_path, "three", mlflow=uri)
    assert not (tmp_path / "three").exists()


# ---- Weights & Biases ---------------------------------------------------------------------------------------------


def _written(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: after a header of 7 bytes, a log in LevelDB's format of protocol buffers."""
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7]) if left >= 7 else (0, 0, 0)
        if not kind:  # the rest of a block is empty
            at += left
            continue
        if at + 7 + length > len(data):
            return
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(parts)
            parts = b""


def _ended(path: Path) -> list[Any]:
    """Records of a .wandb file whose run has ended; W&B's process may write them after its `finish` has returned."""
    until = time.monotonic() + 60
    records = [*_written(path)]
    while not any(one.HasField("exit") for one in records):
        assert time.monotonic() < until, f"{path.name} has {len(records)} records, and no end"
        time.sleep(0.1)
        records = [*_written(path)]
    return records


def test_wandb_writes_a_run_offline_and_continues_it(tmp_path: Path, patient: None) -> None:
    needs("wandb")
    with pytest.raises(Killed):
        _fit(tmp_path, "one", _after(5, _kill), wandb="offline")
    history = _fit(tmp_path, "one", wandb="offline")
    parts = [_ended(path) for path in sorted(history.run.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(parts) == 2
    run_id = json.loads((history.run / trackers.IDS).read_text())["wandb"]["id"]
    for part in parts:
        (run,) = [one.run for one in part if one.HasField("run")]
        assert run.run_id == run_id and run.display_name == "one" and run.project == "ringtrain"
    rows = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in one.history.item}
        for part in parts
        for one in part
        if one.HasField("history")
    ]
    for file, prefix in (("metrics.jsonl", ""), ("steps.jsonl", "steps/")):
        expected = {one["global_step"]: one["mae"] for one in _records(history.run, file)}
        assert {row["global_step"]: row[f"{prefix}mae"] for row in rows if f"{prefix}mae" in row} == expected
    configured = {item.key: item.value_json for one in parts[1] for item in one.config.update}
    assert configured["train.epochs"] == "4" and configured["num_steps"] == str(4 * STEPS)
    (artifact,) = [one.artifact for one in parts[1] if one.HasField("artifact")]
    assert {one.path for one in artifact.manifest.contents} >= {"report.html", "summary.json"}
    assert f'"{history.checksum}"' in {item.value_json for one in parts[1] for item in one.summary.update}
    assert [one.exit.exit_code for one in parts[1] if one.HasField("exit")] == [0]
    tracked = json.loads((history.run / "summary.json").read_text())["tracked"]
    assert tracked == {"W&B": f"wandb sync {history.run}/wandb/offline-run-*"}


# ---- without either -----------------------------------------------------------------------------------------------


class Unsteady(types.ModuleType):
    """Replaces the package wandb: the function that `fails` names raises once; `log` waits for `go`."""

    def __init__(self, fails: str = "log") -> None:
        super().__init__("wandb")
        self.rows: list[dict[str, Any]] = []
        self.go, self.fails, self.exit_codes = threading.Event(), fails, list[int]()
        self.id, self.url, self.summary = "x", None, {}
        self.artifacts: list[str] = []
        self.Settings = lambda **settings: settings
        self.Artifact = lambda name, type: types.SimpleNamespace(add_file=self.artifacts.append)
        self.config = types.SimpleNamespace(update=lambda values, allow_val_change: None)

    def fail(self, function: str) -> None:
        if self.fails == function:
            self.fails = ""
            raise ConnectionError("gone for a moment")

    def login(self, prompt: bool) -> bool:
        return False

    def init(self, **arguments: Any) -> Any:
        self.fail("init")
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self.go.wait()
        self.fail("log")
        self.rows.append(row)

    def log_artifact(self, artifact: Any) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Unsteady:
    package = Unsteady()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def _sent(package: Unsteady, folder: Path, file: str = "metrics.jsonl", prefix: str = "") -> None:
    """Asserts that the package has received the records of a file, each once and in order."""
    sent = [(row["global_step"], row[f"{prefix}mae"]) for row in package.rows if f"{prefix}mae" in row]
    assert sent == [(record["global_step"], record["mae"]) for record in _records(folder, file)]


WARNING = "W&B does not accept records: gone for a moment; training continues"


def test_a_tracker_that_waits_and_fails_holds_up_nothing_and_misses_nothing(
    package: Unsteady, tmp_path: Path, capfd: Any
) -> None:
    released = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: package.go.set() if epoch == 3 else None)
    _fit(tmp_path, "one", released, wandb="offline")
    folder = tmp_path / "one"
    _sent(package, folder)
    _sent(package, folder, "steps.jsonl", "steps/")
    assert package.summary["in_sync"] is True and package.exit_codes == [0]
    assert str(folder / "report.html") in package.artifacts
    assert capfd.readouterr().err.count(WARNING) == 1


def test_a_tracker_that_is_lost_does_not_stop_a_run_that_resumes(package: Unsteady, tmp_path: Path, capfd: Any) -> None:
    """It is opened later. The control: a run that begins needs it."""
    package.go.set()
    package.fails = "init"
    with pytest.raises(
        ConfigError, match=r"^tracking.wandb in options: got offline, which cannot be used: gone for a moment"
    ):
        _fit(tmp_path, "one", wandb="offline")
    with pytest.raises(Killed):
        _fit(tmp_path, "one", _after(5, _kill), wandb="offline")
    package.fails = "init"
    package.rows.clear()
    history = _fit(tmp_path, "one", wandb="offline")
    assert [row["global_step"] for row in package.rows if "mae" in row] == [6, 9, 12]
    assert package.exit_codes == [1, 0] and package.summary["checksum"] == history.checksum
    assert capfd.readouterr().err.count(WARNING) == 1


def test_after_a_signal_a_tracker_gets_less_time_than_the_launcher_grants(
    package: Unsteady, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    assert LaunchOptions().grace > trackers.STOPPED_END_S
    monkeypatch.setattr(trackers, "STOPPED_END_S", 0.25)
    stuck = trackers.Trackers(Config(tracking=TrackingConfig(wandb="offline")), {}, tmp_path)
    stuck.log(1, 0.0, {"mae": 1.0})
    stuck.end(128 + signal.SIGTERM, {})
    assert "W&B does not accept records: no answer within 0.25 s" in capfd.readouterr().err
    package.go.set()


def test_a_run_whose_results_cannot_be_written_has_failed(
    package: Unsteady, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.go.set()
    monkeypatch.setattr(tracking, "write_results", lambda run, facts: _kill())
    with pytest.raises(Killed):
        _fit(tmp_path, "one", wandb="offline")
    assert package.exit_codes == [1]


def test_mlflow_ends_a_run_whose_files_it_cannot_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    states: list[str] = []
    info = types.SimpleNamespace(experiment_id="1", run_id="2")
    client = types.SimpleNamespace(
        get_experiment_by_name=lambda name: info,
        create_run=lambda experiment, run_name: types.SimpleNamespace(info=info),
        log_batch=lambda run_id, **batch: None,
        log_artifact=lambda run_id, file: _kill(),
        set_terminated=lambda run_id, state: states.append(state),
    )
    monkeypatch.setattr(trackers, "_mlflow_client", lambda uri: client)
    with pytest.raises(Killed):
        trackers.MLflow("http://localhost", {}, tmp_path, {}).end("FINISHED", {}, [tmp_path / "report.html"])
    assert states == ["FINISHED"]


def test_a_missing_key_and_a_password_are_refused_before_the_run_has_a_folder(package: Unsteady) -> None:
    with pytest.raises(
        ConfigError, match=r"^--tracking.wandb: got online, which cannot be used: there is no API key: call wandb l"
    ):
        trackers.check(Config(tracking=TrackingConfig(wandb="online")))
    with pytest.raises(ConfigError, match="got a URI with a password") as raised:
        trackers.check(Config(tracking=TrackingConfig(mlflow="http://me:hidden@localhost:5000")))
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("option", [{"mlflow": "http://127.0.0.1:1"}, {"wandb": "offline"}], ids=["mlflow", "wandb"])
def test_a_missing_package_is_one_line_and_no_run(
    option: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = option
    monkeypatch.setitem(sys.modules, name, None)
    expected = rf"^--tracking.{name} needs a package that is not installed .*: pip install 'ringtrain\[{name}\]'$"
    with pytest.raises(MissingDependency, match=expected):
        _fit(tmp_path, "one", **option)
    assert not (tmp_path / "one").exists()


def test_a_folder_of_runs_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingDependency, match="pip install"):
        trackers.check(Config(tracking=TrackingConfig(wandb="offline")))
