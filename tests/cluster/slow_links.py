"""Measures docs/slow-links.md: accuracy of each way over its steps, and its speed on links of a rate. Needs root.

    python tests/cluster/slow_links.py accuracy RESULTS      # 11 ways, three seeds, about an hour on two cores
    python tests/cluster/slow_links.py speed RESULTS         # at 100 and at 10 Mb/s, about half an hour
    python tests/cluster/slow_links.py show RESULTS          # tables, and RESULTS/slow-links.png

Weights after a step do not depend on a link's rate, so accuracy is measured without a limit, and seconds are steps times
the measured time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import accuracy_over_steps
import lab
import launching
import numpy as np

from ringtrain.config import HvdConfig
from ringtrain.derived import num_reductions, reduced_bytes

LOW, LOCAL, OUTER = "--hvd.compression", "--hvd.local-steps", ("--hvd.outer-optimizer", "nesterov")
WAYS: dict[str, list[str]] = {
    "ring": [],
    "fp16": [LOW, "fp16"],
    "bf16": [LOW, "bf16"],
    "powersgd:1": [LOW, "powersgd:1"],
    "powersgd:4": [LOW, "powersgd:4"],
    "8 local steps": [LOCAL, "8"],
    "8 local steps, Nesterov": [LOCAL, "8", *OUTER],
    "32 local steps": [LOCAL, "32"],
    "32 local steps, Nesterov": [LOCAL, "32", *OUTER],
    "8 local steps, powersgd:4": [LOCAL, "8", LOW, "powersgd:4"],
    "one host": [],
}
RATES = (100, 10)
SEEDS = (0, 1, 2)
EPOCHS, BATCH, TARGET = 2, 64, 0.88
SHAPES = ((5, 5, 1, 32), (32,), (5, 5, 32, 64), (64,), (3136, 1024), (1024,), (1024, 10), (10,))
RUN = ["--config", "configs/fashion_mnist.toml", "--train.epochs", str(EPOCHS), "--train.batch-size", str(BATCH)]
BENCH = ["--model.name", "cnn", "--data.name", "synthetic", "--data.image-size", "28", "--device.threads", "1"]
LIMIT_S = 3600.0


def name_of(way: str, seed: int) -> str:
    return "-".join([*way.replace(",", "").replace(":", " ").lower().split(), str(seed)])


def accuracy(results: Path) -> None:
    """Trains each way with each seed; what is there already is not done again."""
    for seed in SEEDS:
        for way, options in WAYS.items():
            name = name_of(way, seed)
            if (results / name / "summary.json").exists():
                continue
            told = [*RUN, *options, "--seed", seed, "--run.directory", results, "--run.name", name]
            told += ["--train.callbacks", "accuracy_over_steps:Accuracy"]
            argv = [sys.executable, "-m", "ringtrain.train", *map(str, told)]
            points = results / f"{name}.jsonl"
            points.unlink(missing_ok=True)
            env = {"PYTHONPATH": f"{launching.ROOT}:{Path(__file__).parent}", accuracy_over_steps.FILE: str(points)}
            ended = launching.run(1 if way == "one host" else 2, argv, LIMIT_S, env)
            print(name, ended.stdout.strip().splitlines()[-1:] if ended.returncode == 0 else ended.stderr, flush=True)


def speed(results: Path) -> None:
    """Measures steps with and without communication, in turns, on two hosts."""
    for rate in RATES:
        for way, options in WAYS.items():
            out = results / f"{rate}-{way}.json"
            if way == "one host" or out.exists():
                continue
            steps = 32 if "local" in way else 4 if rate == RATES[-1] and "powersgd" not in way else 20
            argv = ["ringtrain", "bench", "train", "-H", "host1:1,host2:1", "--launcher", "horovodrun-gloo"]
            argv += ["--turns", "3", "--steps", str(steps), "--out", str(out), "--", *BENCH, *options]
            with lab.Lab(2) as hosts:
                for host in hosts.names:
                    hosts.limit(host, rate)
                with hosts.start("host1", argv, {"PYTHONPATH": str(launching.ROOT)}) as command:
                    code = command.wait(LIMIT_S)
            print(rate, way, code, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("accuracy", "speed", "show"))
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    options.results = options.results.resolve()
    options.results.mkdir(parents=True, exist_ok=True)
    {"accuracy": accuracy, "speed": speed, "show": show}[options.action](options.results)


if __name__ == "__main__":
    main()
