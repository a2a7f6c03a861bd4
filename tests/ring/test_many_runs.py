"""train() in one process, again and again: each run is as if a process had been started for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launching import run

TIMEOUT_S = 300
SCRIPT = """
import contextlib, dataclasses, json, sys
import tensorflow as tf
from ringtrain import config_io, hvd, train
from ringtrain.strategies import STRATEGIES, Kind, samples
from ringtrain.strategies.ring import Ring
from ringtrain.errors import ConfigError, DataError

BASE = ["--data.name", "digits", "--train.epochs", "1"]
folder, runs = sys.argv[1], json.loads(sys.argv[2])
results = []
for name, options in runs:
    run = ["--run.directory", folder, "--run.name", name]
    config = config_io.read([*BASE, *run, *options])
    try:
        results.append(train.train(config)["checksum"])
    except (ConfigError, DataError) as error:
        results.append(str(error))


class OwnStep(Ring):
    # A strategy of one file: Horovod's ring, and a step of its own in place of Keras' train function.
    @contextlib.contextmanager
    def training(self, run):
        step = tf.function(run.model.train_step, autograph=False)
        yield samples.Steps(lambda batches: step(next(batches)), samples.shards(run))


STRATEGIES["own-step"] = Kind(OwnStep, collectives="")
config = config_io.read([*BASE, "--model.name", "cnn", "--run.directory", folder, "--run.name", "own-step"])
config = dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, name="own-step"))
results.append(train.train(config)["checksum"])
if hvd.rank() == 0:
    with open(f"{folder}/results.json", "w") as file:
        json.dump(results, file)
"""
RUNS = {
    "plain": ["--model.name", "cnn"],
    "accumulated": ["--model.name", "mlp", "--optimizer.accumulation-steps", "2", "--optimizer.name", "sgd"],
    "half": ["--model.name", "mlp", "--train.precision", "mixed_float16", "--seed", "3", "--train.batch-size", "16"],
}
REFUSED = {
    "fused": (["--hvd.fusion-mb", "7"], "hvd.fusion_mb: needs HOROVOD_FUSION_THRESHOLD"),
    "drawn": (["--tracking.timeline-steps", "3"], "without a timeline"),
    "towers": (["--strategy.name", "towers"], "in a process whose ranks talk by Horovod"),
    "missing": (["--data.name", "npz", "--data.file", "missing.npz"], "missing.npz"),
}


def results(folder: Path, runs: list[tuple[str, list[str]]]) -> list[str]:
    """Checksum or error of each run, trained one after the other by the same two ranks."""
    command = [sys.executable, "-c", SCRIPT, folder, json.dumps(runs)]
    ended = run(2, command, TIMEOUT_S, warm=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "results.json").read_text())


def test_runs_of_one_process_are_those_of_processes_of_their_own(tmp_path: Path) -> None:
    refused = [(name, options) for name, (options, _) in REFUSED.items()]
    again = ("again", RUNS["plain"])
    complete = ("plain", [*RUNS["plain"], "--run.resume", "auto"])
    together = results(tmp_path / "one", [*RUNS.items(), *refused, again, complete])

    *together, own_step = together
    checksums, words, repeated = together[:3], together[3:-2], together[-2:]
    assert own_step == checksums[0], "a strategy of the test's own, which is one entry in STRATEGIES"
    alone = [checksums[0]] + [results(tmp_path / name, [(name, RUNS[name])])[0] for name in ("accumulated", "half")]
    assert checksums == alone and len({*checksums}) == 3
    assert repeated == [checksums[0]] * 2, "also after errors, and of a run that is complete"
    for text, (_, expected) in zip(words, REFUSED.values(), strict=True):
        assert expected in text
    for name in (*RUNS, "again"):
        folder = tmp_path / "one" / name
        assert json.loads((folder / "summary.json").read_text())["checksum"] in checksums
        events = [json.loads(line)["event"] for line in (folder / "logs" / "journal-1.jsonl").read_text().splitlines()]
        assert events[0] == "start" and events[-1] == "end" and events.count("end") == 1
        assert (folder / "logs" / "rank-1.log").read_text().startswith("rank 1 of 2")
    assert not any((tmp_path / "one" / name).exists() for name in REFUSED)
