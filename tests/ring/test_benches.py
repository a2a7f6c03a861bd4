"""ringtrain bench startup, checkpoint and input, as little of each as there can be: that they work, not how fast."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from launching import BIN, ROOT, run
from timed_job import NOTES, PAUSE_S

pytestmark = pytest.mark.launch

HERE = Path(__file__).parent

SMALL = ["--data.name", "synthetic", "--data.num-samples", 128, "--data.image-size", 8, "--model.name", "mlp"]
LEAN = """
import sys
from ringtrain.models import lazy_keras
lazy_keras.start()
import inspect, tensorflow, keras
inspect.getmodule(lazy_keras.start)  # walks through all modules
print("sklearn" in sys.modules, "matplotlib" in sys.modules)
print(keras.wrappers.SKLearnClassifier.__name__, keras.visualization.plot_image_gallery.__name__)
print("sklearn" in sys.modules, "matplotlib" in sys.modules)
"""


COSTLY_MODEL = """
import keras, numpy as np, ringtrain
model = keras.Sequential([keras.Input((16,)), *(keras.layers.Dense(2048) for _ in range(3)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
ringtrain.fit(model, np.ones((4096, 16), "float32"), np.ones((4096, 1)), batch_size=64)
"""


def results_of(tmp_path, kind: str, np: int, *words: object, env: dict[str, str] | None = None) -> dict:
    out = tmp_path / f"{kind}.json"
    where = ["-np", np, "-H", f"localhost:{np}", "--turns", 1, "--out", out]
    command = [BIN / "ringtrain", "bench", kind, *map(str, [*where, *words])]
    ended = run(0, command, 600, env, warm=kind != "startup")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "median (p10 to p90)" in ended.stdout
    return json.loads(out.read_text())["results"]


def test_startup_has_the_times_that_the_job_has_noted_by_itself(tmp_path):
    """Each stage lasts from the one before it: between two notes lie at least the stages that begin and end there."""
    before_s = time.time()
    env = {NOTES: str(tmp_path / "notes"), "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    job = ["--data.name", "timed_job:data", "--model.name", "timed_job:model", "--train.callbacks", "timed_job:Noting"]
    found = results_of(tmp_path, "startup", 2, "--launcher", "horovodrun-gloo", "--", *job, env=env)
    after_s = time.time()
    (launched,) = found["launched"].values()
    stages = {name: spread["median"] for name, spread in launched["stages_s"].items()}
    begun, ended = {"command": before_s}, {}
    for name, begin_s, end_s in map(json.loads, (tmp_path / "notes").read_text().splitlines()):
        begun[name], ended[name] = begin_s, end_s
    assert list(begun) == ["command", "data", "model", "step 1", "step 2"]

    def of(first: str, last: str) -> float:
        names = list(stages)
        return sum(stages[name] for name in names[names.index(first) : names.index(last) + 1])

    rounded_s = 0.02
    # At least what was noted within them, ...
    assert of("data", "data") > ended["data"] - begun["data"] - rounded_s
    assert of("model", "model") > ended["model"] - begun["model"] - rounded_s
    assert of("data", "model") > ended["model"] - begun["data"] - rounded_s
    assert of("model", "training") > ended["step 1"] - begun["model"] - rounded_s
    # ... and at most what was noted around them.
    assert of("model", "model") < begun["step 1"] - ended["data"] + rounded_s
    assert of("agreement", "training") < begun["step 2"] - ended["model"] + rounded_s
    assert of("process", "training") < begun["step 2"] - begun["command"] + rounded_s
    assert abs(launched["first_step_s"]["median"] - of("process", "training")) < 1e-6
    assert 0 < stages["ending"] < after_s - ended["step 2"]
    assert min(stages.values()) >= 0
    plain = found["plain_s"]
    assert plain["built"]["median"] - plain["imported"]["median"] > PAUSE_S
    assert plain["imported"]["median"] > 0


def test_checkpoint_compares_the_same_bytes_and_leaves_nothing(tmp_path):
    found = results_of(tmp_path, "checkpoint", 2, "--steps", 2, "--", *SMALL, "--run.directory", tmp_path / "runs")
    weights = 4 * (8 * 8 * 100 + 100 + 100 * 10 + 10)
    assert 3 * weights < found["bytes"] < 4 * weights  # with Adam's two moments
    assert found["stall_s"]["repeats"] == 1 and found["plain_write_s"]["median"] > 0
    assert list((tmp_path / "runs").iterdir()) == []


def test_input_measures_every_source_beside_itself_without_the_pipeline(tmp_path):
    words = ["--batches", 1, "--rank-images-per-s", 100, "--", "--train.batch-size", 8, "--data.image-size", 32]
    found = results_of(tmp_path, "input", 1, *words)
    assert list(found) == ["digits", "fashion-mnist", "imagenet-tfrecords"]
    assert found["imagenet-tfrecords"].keys() == {"pipeline", "alone", "/ alone", "same work", "/ same work"}
    assert found["digits"]["pipeline"]["median"] > 0


def test_input_of_a_script_is_its_batches_alone(tmp_path):
    (tmp_path / "own.py").write_text(COSTLY_MODEL)
    found = results_of(tmp_path, "input", 2, "--batches", 5, "--", "python", tmp_path / "own.py")["own.py"]
    assert found["input alone"]["median"] > 3 * found["training"]["median"] and found["waiting"] < 0.5
    assert not (tmp_path / "runs").exists()


def test_what_training_does_not_need_is_loaded_when_it_is_used():
    ended = run(0, [sys.executable, "-c", LEAN], 120)
    before, used, after = ended.stdout.splitlines()
    assert (before, used, after) == ("False False", "SKLearnClassifier plot_image_gallery", "True True"), ended.stderr
