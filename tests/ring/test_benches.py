"""ringtrain bench startup, checkpoint and input, as little of each as there can be: that they work, not how fast."""

from __future__ import annotations

import json
import sys

from launching import BIN, run

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


def results_of(tmp_path, kind: str, np: int, *words: object) -> dict:
    out = tmp_path / f"{kind}.json"
    where = ["-np", np, "-H", f"localhost:{np}", "--turns", 1, "--out", out]
    command = [BIN / "ringtrain", "bench", kind, *map(str, [*where, *words])]
    ended = run(0, command, 600, warm=kind != "startup")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "median (p10 to p90)" in ended.stdout
    return json.loads(out.read_text())["results"]


def test_startup_tells_stages_that_add_up(tmp_path):
    found = results_of(tmp_path, "startup", 2, "--launcher", "horovodrun-gloo", "--", *SMALL)
    (launched,) = found["launched"].values()
    stages = {name: spread["median"] for name, spread in launched["stages_s"].items()}
    assert list(stages)[:3] == ["process", "python", "libraries"] and min(stages.values()) >= 0
    ending = stages.pop("ending")
    assert ending > 0 and abs(sum(stages.values()) - launched["first_step_s"]["median"]) < 1e-6
    plain = found["plain_s"]
    assert 0 < plain["imported"]["median"] < plain["built"]["median"]


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


def test_what_training_does_not_need_is_loaded_when_it_is_used():
    ended = run(0, [sys.executable, "-c", LEAN], 120)
    before, used, after = ended.stdout.splitlines()
    assert (before, used, after) == ("False False", "SKLearnClassifier plot_image_gallery", "True True"), ended.stderr
