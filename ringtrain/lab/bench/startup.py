"""bench startup: from the command to the first step, by stages.

    ringtrain bench startup -np 2 --out startup.json -- --model.name cnn --data.name fashion-mnist

Measured alternately: `ringtrain launch`, the same with horovodrun, and, as the minimum of any training, the same number
of plain Python processes that only import TensorFlow and build the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain import config_io, data
from ringtrain.cluster.processes import call
from ringtrain.errors import LaunchError
from ringtrain.lab import ranks, stats
from ringtrain.lab.tables import Table
from ringtrain.monitor import journal
from ringtrain.options import AT_LEAST_1, FILE, N

TIMEOUT_S = 1800.0
SMALL = ("--data.name", "synthetic", "--data.num-samples", "512", "--data.image-size", "28", "--model.name", "cnn")
"""default training"""
SAID = {
    "process": "the launcher, until a rank's process is there",
    "python": "Python, and what ringtrain.train imports first",
    "libraries": "the configuration; TensorFlow, Keras, Horovod",
    "init": "hvd.init",
    "checks": "comparing places, code and packages",
    "data": "reading data",
    "model": "building and compiling the model",
    "restored": "reading a state, if there is one",
    "agreement": "the same state everywhere; a trial of averaging",
    "start": "the run's folder",
    "training": "the pipeline, tracing and making the first step",
}
PLAIN = """
import json, sys, time
import tensorflow, keras
imported_s = time.time()
from ringtrain import models
from ringtrain.config import ModelConfig
config, shape, num_classes = json.loads(sys.argv[1])
models.builder(ModelConfig(**config))(tuple(shape), num_classes)
print(imported_s, time.time())
"""


@dataclass(frozen=True)
class Options:
    """Options of the bench."""

    turns: Annotated[int, N, AT_LEAST_1] = 5
    """measurements of each kind, in turns"""
    out: Annotated[str, FILE] = ""
    """write the results as JSON"""


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Measures commands as typed by a user, without `call`; prints and writes."""
    told = list(start.train_args) or list(SMALL)
    config = config_io.read(told)
    data_set = data.source(config.data)()
    model = json.dumps([dataclasses.asdict(config.model), data_set.input_shape, data_set.num_classes])
    launchers = ("mpirun", "horovodrun") if start.launch.launcher == "mpirun" else (start.launch.launcher,)
    stages: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in launchers}
    plain: list[dict[str, float]] = []
    for _ in range(options.turns):
        for launcher in launchers:
            turn, num_ranks = launched([*start.launch_words, "--launcher", launcher], told)
            stages[launcher].append(turn)
        plain.append(imported(num_ranks, model))
    built_s = [turn["built"] for turn in plain]
    found = {}
    for launcher, turns in stages.items():
        first_s = [first_step_s(turn) for turn in turns]
        found[launcher] = {
            "first_step_s": stats.Spread.of(first_s),
            "ratio": stats.ratios(first_s, built_s),
            "stages_s": spreads(turns),
        }
    show(found, plain, f"{config.model.name}, {num_ranks} ranks")
    if options.out:
        results = {"launched": found, "plain_s": spreads(plain)}
        stats.write(Path(options.out), "startup", {"turns": options.turns}, results)
    return 0


def spreads(turns: Sequence[Mapping[str, float]]) -> dict[str, stats.Spread]:
    """Spread of each quantity over the turns."""
    found = {}
    for name in turns[0]:
        found[name] = stats.Spread.of([turn[name] for turn in turns])
    return found


def first_step_s(stages: Mapping[str, float]) -> float:
    """Seconds from the command to the end of the first step."""
    return sum(stages[name] for name in SAID)


def launched(words: Sequence[str], told: Sequence[str]) -> tuple[dict[str, float], int]:
    """Trains an epoch from the command line; returns rank 0's seconds per stage and the number of ranks.

    "ending" is the time from rank 0's last journal entry to the end of the command.
    """
    with tempfile.TemporaryDirectory(prefix="ringtrain-startup-") as folder:
        run = ["--train.epochs", "1", "--run.directory", folder, "--run.name", "startup"]
        python, train = [sys.executable, "-m"], ["python", "-m", "ringtrain.train"]
        begin_s = time.time()
        call([*python, "ringtrain", "launch", *words, "--", *train, *told, *run], TIMEOUT_S, only_good=True)
        end_s = time.time()
        events = {event["event"]: event for event in journal.read(Path(folder, "startup")) if event["rank"] == 0}
    if not {"start", "training", "end"} <= events.keys() or "stages" not in events["start"]:
        raise LaunchError("bench startup: the run has not written how it started: leave out what resumes or stops it")
    moments = {"command": begin_s, **events["start"]["stages"]}
    moments |= {name: events[name]["time_s"] for name in ("start", "training")}
    stages = {name: moments[name] - moments[before] for before, name in itertools.pairwise(moments)}
    return stages | {"ending": end_s - events["end"]["time_s"]}, events["start"]["size"]


def imported(num_processes: int, model: str) -> dict[str, float]:
    """Imports TensorFlow and builds a model in plain processes, all at once.

    Args:
        model: Its configuration, input shape and classes, as JSON.

    Returns:
        Seconds from the command until the slowest had imported TensorFlow and Keras, and until it had built the model.
    """
    one = shlex.join([sys.executable, "-c", PLAIN, model])
    begin_s = time.time()
    in_background = f"{one} 2>/dev/null & " * num_processes
    said = call(["sh", "-c", f"{in_background} wait"], TIMEOUT_S)
    moments = []
    for line in said.splitlines():
        moments.append([float(word) - begin_s for word in line.split()])
    if len(moments) != num_processes:
        raise LaunchError(f"bench startup: {len(moments)} of {num_processes} plain processes built the model")
    imported_s, built_s = (max(column) for column in zip(*moments, strict=True))
    return {"imported": imported_s, "built": built_s}


def show(found: Mapping[str, Mapping[str, Any]], plain: Sequence[Mapping[str, float]], title: str) -> None:
    """Prints the measurements."""
    built_s = stats.Spread.of([turn["built"] for turn in plain])
    head = ("seconds from the command to", "median (p10 to p90)")
    for launcher, its in found.items():
        stages = its["stages_s"]
        rows = [
            ["first step", its["first_step_s"].text()],
            *([f"  {text}", stages[name].text()] for name, text in SAID.items()),
            ["importing TensorFlow and building the model", built_s.text()],
            ["first step / that", its["ratio"].text()],
            ["from the last word to the command's end", stages["ending"].text()],
        ]
        Table(head, rows, f"{title}, ringtrain launch --launcher {launcher}").show()
