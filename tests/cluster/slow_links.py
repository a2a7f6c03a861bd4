"""Measures docs/slow-links.md: accuracy of each way over its steps, and its speed on links of a rate. Needs root.

    python tests/cluster/slow_links.py accuracy RESULTS      # 6 ways, three seeds, about an hour on two cores
    python tests/cluster/slow_links.py speed RESULTS         # at 100 and at 10 Mb/s, about half an hour
    python tests/cluster/slow_links.py show RESULTS          # tables, and RESULTS/slow-links.png

Weights after a step do not depend on a link's rate, so accuracy is measured without a limit, and seconds are steps
times the measured time of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import accuracy_over_steps
import lab
import launching
import numpy as np

from ringtrain import hvd

LOW = "--hvd.compression"
WAYS: dict[str, list[str]] = {
    "ring": [],
    "fp16": [LOW, "fp16"],
    "powersgd:1": [LOW, "powersgd:1"],
    "powersgd:4": [LOW, "powersgd:4"],
    "one host": [],
}
RATES = (100, 10)
SEEDS = (0, 1, 2)
EPOCHS, BATCH, TARGET = 2, 64, 0.88
SHAPES = ((5, 5, 1, 32), (32,), (5, 5, 32, 64), (64,), (3136, 1024), (1024,), (1024, 10), (10,))
NUM_TRAIN = 60_000
RUN = ["--config", "configs/fashion_mnist.toml", "--train.epochs", str(EPOCHS), "--train.batch-size", str(BATCH)]
BENCH = ["--model.name", "cnn", "--data.name", "synthetic", "--data.image-size", "28", "--device.threads", "1"]
BENCH += ["--train.batch-size", str(BATCH)]
LIMIT_S = 3600.0


def name_of(way: str, seed: int) -> str:
    return "-".join([*way.replace(",", "").replace(":", " ").lower().split(), str(seed)])


def accuracy(results: Path) -> None:
    """Trains each way with each seed; what is there already is not done again."""
    for seed in SEEDS:
        for way, options in WAYS.items():
            name = name_of(way, seed)
            if points_of(results, way, seed):
                continue
            told = [*RUN, *options, "--seed", seed, "--run.directory", results, "--run.name", name]
            told += ["--train.callbacks", "accuracy_over_steps:Accuracy"]
            argv = [sys.executable, "-m", "ringtrain.train", *map(str, told)]
            points = results / f"{name}.jsonl"
            points.unlink(missing_ok=True)
            env = {"PYTHONPATH": f"{launching.ROOT}:{Path(__file__).parent}", accuracy_over_steps.FILE: str(points)}
            ended = launching.run(1 if way == "one host" else 2, argv, LIMIT_S, env)
            print(name, ended.stdout.strip().splitlines()[-1:] if ended.returncode == 0 else ended.stderr, flush=True)


def block_of(way: str, rate: int) -> tuple[int, int]:
    """Turns of a measurement, and steps of each: few where a step takes seconds."""
    is_slow = rate == RATES[-1] and "powersgd" not in way
    return (1, 4) if is_slow else (3, 20)


def speed(results: Path) -> None:
    """Measures steps with and without communication, in turns, on two hosts, unless that is there already."""
    for rate, (way, options) in itertools.product(RATES, WAYS.items()):
        out = results / f"{rate}-{way}.json"
        if way == "one host" or out.exists():
            continue
        turns, steps = block_of(way, rate)
        argv = ["ringtrain", "bench", "train", "-H", "host1:1,host2:1", "--launcher", "horovodrun-gloo"]
        argv += ["--turns", str(turns), "--steps", str(steps), "--out", str(out), "--", *BENCH, *options]
        with lab.Lab(2) as hosts:
            for host in hosts.names:
                hosts.limit(host, rate)
            with hosts.start("host1", argv, {"PYTHONPATH": str(launching.ROOT)}) as command:
                code = command.wait(LIMIT_S)
        print(rate, way, code, flush=True)


def points_of(results: Path, way: str, seed: int) -> list[tuple[int, float]]:
    """Steps and test accuracies of a run; [] if it has not come to its end."""
    file = results / f"{name_of(way, seed)}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    points = [(step, accuracy) for step, accuracy in map(json.loads, lines)]
    num_steps = EPOCHS * (NUM_TRAIN // (BATCH * (1 if way == "one host" else 2)))
    return points if points and points[-1][0] == num_steps else []


def steps_to_target(points: Sequence[tuple[int, float]]) -> float:
    return next((step for step, accuracy in points if accuracy >= TARGET), float("nan"))


def megabytes(way: str, num_steps: float) -> float:
    """Sent by one of two ranks, whose ring sends what it reduces once."""
    if way == "one host" or math.isnan(num_steps):
        return 0.0 * num_steps
    return num_steps * sum(_reduced_bytes(way, shape) for shape in SHAPES) / 1e6


def _reduced_bytes(way: str, shape: tuple[int, ...]) -> int:
    """Of the gradient of a variable."""
    kind, _, rank = way.partition(":")
    if kind == "fp16":
        return 2 * math.prod(shape)
    matrix = hvd.Compression.powersgd(int(rank)).matrix_of(shape) if rank else None
    if matrix is None:
        return 4 * math.prod(shape)
    return 4 * int(rank) * sum(matrix)


def steps_per_s(results: Path, rate: int) -> dict[str, tuple[float, float]]:
    """Steps per second of each way, and its images/s relative to two processes that do not communicate."""
    found: dict[str, tuple[float, float]] = {}
    alone: list[float] = []
    for way in WAYS:
        file = results / f"{rate}-{way}.json"
        if file.exists():
            of_2 = json.loads(file.read_text())["results"]
            speed = of_2["images_per_s"]["median"] / (2 * BATCH)
            found[way] = speed, of_2["ring_efficiency"]["median"]
            alone.append(of_2["images_per_s_alone"]["median"] / (2 * BATCH))
    return found | ({"one host": (statistics.median(alone), 0.5)} if alone else {})


def show(results: Path) -> None:
    """Prints a row per way and rate, and draws accuracy over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = pyplot.get_cmap("tab20")
    figure, panels = pyplot.subplots(1, len(RATES), figsize=(13, 4.5), sharey=True, layout="constrained")
    for rate, axes in zip(RATES, panels, strict=True):
        speeds = steps_per_s(results, rate)
        head = ("ms per step", "speed", f"s to {TARGET:.0%}", "MB to it", "accuracy at the end, %", "seeds")
        print(f"\n| {rate} Mb/s | {' | '.join(head)} |")
        print("|---|---|---|---|---|---|---|")
        for number, way in enumerate(WAYS):
            runs = [points for seed in SEEDS if (points := points_of(results, way, seed))]
            if not runs or way not in speeds:
                continue
            speed, share = speeds[way]
            steps = [steps_to_target(run) for run in runs]
            middle = statistics.median(steps) if not any(map(math.isnan, steps)) else float("nan")
            ends = sorted(100 * run[-1][1] for run in runs)
            print(
                f"| {way} | {1e3 / speed:,.1f} | {share:.2f} | {middle / speed:,.0f} | {megabytes(way, middle):,.1f} |"
                f" {statistics.median(ends):.2f} ({ends[0]:.2f} to {ends[-1]:.2f}) | {len(runs)} |"
            )
            mean = np.mean([[accuracy for _, accuracy in run] for run in runs], axis=0)
            axes.plot([step / speed for step, _ in runs[0]], 100 * mean, color=colors(number), label=way)
        axes.set(xscale="log", xlabel=f"seconds at {rate} Mb/s", ylim=(75, 91.5))
        axes.axhline(100 * TARGET, color="0.6", linestyle="--")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(results / "slow-links.png", dpi=64)


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
