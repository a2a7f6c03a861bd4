"""Options that change the step itself: with each, two ranks train, agree, and resume in mid-epoch bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sample
from launching import run

HERE = Path(__file__).parent
TIMEOUT_S = 1200  # far above what it takes
CUT = 30
"""step of the checkpoint that a cut run resumes from, in the second of two epochs of 22 steps"""
SCRIPT = """
import json, shutil, sys
from pathlib import Path
from ringtrain import config_io, hvd, train

BASE = ["--data.name", "digits", "--train.epochs", "2", "--checkpoint.every-steps", "6", "--checkpoint.keep", "100"]
folder, cut, results = Path(sys.argv[1]), int(sys.argv[2]), {}


def trained(name, options):
    words = [*BASE, "--run.directory", str(folder), "--run.name", name, *options]
    return train.train(config_io.read(words))


for name, options in json.loads(sys.argv[3]).items():
    whole = trained(name, options)
    if hvd.rank() == 0:
        shutil.copytree(folder / name, folder / f"{name}-cut")
        (folder / f"{name}-cut" / "summary.json").unlink()
        for path in (folder / f"{name}-cut" / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > cut:
                shutil.rmtree(path)
    hvd.broadcast_object(None, root_rank=0)  # the copy is there
    results[name] = [whole, trained(f"{name}-cut", options)]
if hvd.rank() == 0:
    Path(folder, "results.json").write_text(json.dumps(results))
"""
MODEL = ["--model.name", "odd_model:dropping"]  # dropout and batch normalization
ALL = {
    "plain": MODEL,
    "another seed": [*MODEL, "--seed", "1"],
    "jit": [*MODEL, "--train.jit"],
    "mixed_float16": [*MODEL, "--train.precision", "mixed_float16"],
    "mixed_bfloat16": [*MODEL, "--train.precision", "mixed_bfloat16"],
    "adasum": [*MODEL, "--hvd.op", "adasum"],
    "fp16 on the wire": [*MODEL, "--hvd.compression", "fp16"],
    "lars": [*MODEL, "--optimizer.name", "lars", "--optimizer.learning-rate", "1"],
    "lamb": [*MODEL, "--optimizer.name", "lamb"],
    "adamw": [*MODEL, "--optimizer.name", "adamw", "--optimizer.weight-decay", "0.01"],
    "clipped": [*MODEL, "--optimizer.clip-norm", "0.1"],
    "accumulated": [*MODEL, "--optimizer.accumulation-steps", "4"],  # step 30 is between two updates
    "synchronized": [*MODEL, "--model.sync-batch-norm"],
    "fine-tuned": [*MODEL, "--model.trainable", "dense_1", "batch*"],
    "sgd, cosine": [*MODEL, "--optimizer.name", "sgd", "--optimizer.nesterov", "--schedule.name", "cosine"],
    "warmed up": [*MODEL, "--schedule.warmup-epochs", "1.5"],  # step 30 is in it
    "grouped": [*MODEL, "--hvd.groups", "2"],
    "exported": [*MODEL, "--checkpoint.saved-model"],
}
SAME = ("grouped", "exported")
"""train the weights of "plain": of two numbers the sum is the same in any order"""
ALWAYS = ("plain", "fine-tuned", *SAME)
OPTIONS = {name: words for name, words in ALL.items() if name in ALWAYS or sample.is_due(name)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Summaries of the whole and of the resumed run, by option, and "folder"."""
    folder = tmp_path_factory.mktemp("options")
    command = [sys.executable, "-c", SCRIPT, folder, CUT, json.dumps(OPTIONS)]
    ended = run(2, command, TIMEOUT_S, env={"PYTHONPATH": str(HERE)}, warm=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return {"folder": folder, **json.loads((folder / "results.json").read_text())}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_in_sync_and_resumes_where_it_was(results: dict[str, Any], name: str) -> None:
    whole, resumed = results[name]
    assert whole["in_sync"] is True and whole["num_ranks"] == 2 and not whole["resumed_from"]
    assert resumed["resumed_from"].endswith(f"step-{CUT:08d}")
    assert resumed["checksum"] == whole["checksum"]
    assert resumed["metrics"] == whole["metrics"]
    lines = (results["folder"] / name / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(line)["loss"] for line in lines)
    assert last < first, "it learns"


def test_options_change_what_is_trained(results: dict[str, Any]) -> None:
    """The negative control of equal checksums: every option that is to train other weights does."""
    checksums = {name: results[name][0]["checksum"] for name in OPTIONS}
    assert {checksums[name] for name in SAME} == {checksums["plain"]}
    assert len({*checksums.values()}) == len(OPTIONS) - len(SAME), checksums


def test_frozen_layers_are_not_trained(results: dict[str, Any]) -> None:
    plain, tuned = (results[name][0]["num_parameters"] for name in ("plain", "fine-tuned"))
    assert plain - tuned == 64 * 32 + 32  # the first dense layer


def test_the_exported_model_serves(results: dict[str, Any]) -> None:
    (saved,) = (results["folder"] / "exported").glob("*saved_model*")
    program = f"""
import numpy as np, tensorflow as tf
model = tf.saved_model.load({str(saved)!r})
print(model.serve(np.zeros((3, 8, 8, 1), "float32")).shape)
"""
    ended = run(0, [sys.executable, "-c", program], TIMEOUT_S, warm=True)
    assert ended.stdout == "(3, 10)\n", ended.stderr
