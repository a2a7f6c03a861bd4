"""Two ranks with the callback of examples/mlflow_callback.py: only rank 0 records, and a resumed run goes on there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launching import ROOT, run

SCRIPT = Path(__file__).with_name("tracked_fit.py")
TIMEOUT_S = 600


def test_rank_0_alone_records_and_a_resumed_run_continues_its_record(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    for epochs in (2, 4):
        ended = run(2, [sys.executable, SCRIPT, uri, str(epochs)], TIMEOUT_S, env, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    client = mlflow.MlflowClient(uri)
    (recorded,) = client.search_runs([client.get_experiment_by_name("ringtrain").experiment_id])
    losses = [(one.step, one.value) for one in client.get_metric_history(recorded.info.run_id, "loss")]
    lines = (tmp_path / "runs" / "tracked" / "metrics.jsonl").read_text().splitlines()
    epochs_of_run = [json.loads(line) for line in lines]
    assert losses == [(one["epoch"] - 1, pytest.approx(one["loss"])) for one in epochs_of_run] and len(losses) == 4
    assert recorded.info.status == "FINISHED"
