"""Does a large batch learn as much as a small one? Fashion-MNIST with 64 and with 2,048 samples per update.

    python examples/large_batch.py

Trains four variants for the same number of epochs, with three seeds each: the small batch; the large batch with a
linearly scaled learning rate and warm-up (Goyal et al. 2017, arXiv 1706.02677, section 2); scaled without warm-up; and
with the small batch's learning rate. Prints a table and plots the test accuracy per epoch. Completed runs are kept, so
an interrupted study resumes when it is started again.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "small batch": ["--schedule.warmup-epochs", "0"],
    "large, scaled and warmed up": [],
    "large, scaled, no warm-up": ["--schedule.warmup-epochs", "0"],
    "large, unscaled": ["--optimizer.learning-rate-scaling", "none", "--schedule.warmup-epochs", "0"],
}


def options(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "large_batch.toml"), help="the large batch's recipe")
    parser.add_argument("--small-batch", type=int, default=64, help="samples per update of all ranks together")
    parser.add_argument("--large-batch", type=int, default=2048, help="samples per update of all ranks together")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--output", type=Path, default=Path("runs/large-batch"), help="folder of runs, table and plot")
    return parser.parse_args(argv)


def train(study, way, seed):
    """Trains one variant with one seed; returns one record per epoch, fewer if the loss became NaN."""
    folder = study.output / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
    batch = study.small_batch if way == "small batch" else study.large_batch
    done = folder / "done"
    command = f"horovodrun -np {study.num_ranks} -H localhost:{study.num_ranks} python -m ringtrain.train".split()
    command += ["--config", study.config, "--seed", str(seed), "--train.epochs", str(study.epochs)]
    command += ["--optimizer.reference-batch-size", str(study.small_batch)]
    command += ["--train.batch-size", str(batch // study.num_ranks), *WAYS[way]]
    command += ["--run.directory", str(study.output), "--run.name", folder.name]
    line = shlex.join(command)
    if done.exists() and done.read_text() != line:
        raise SystemExit(f"{folder}: was trained by another command: choose another --output")
    if not done.exists():
        print(f"{way}, seed {seed}", flush=True)
        ended = subprocess.run(command, capture_output=True, text=True)
        diverged = "non-finite" in ended.stdout + ended.stderr
        if ended.returncode and not diverged:
            raise SystemExit(f"{line}\n{ended.stdout}{ended.stderr}")
        done.write_text(line)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return [json.loads(line) for line in lines]


def table(study, results):
    """Markdown table, one row per variant: median and range over the seeds of the last epoch's test accuracy."""
    median = f"test accuracy: median of {study.seeds}"
    head = f"| {study.epochs} epochs | global batch | learning rate | {median} | from | to |"
    rows = [head, "|---|---|---|---|---|---|"]
    for way, runs in results.items():
        batch = study.small_batch if way == "small batch" else study.large_batch
        last = [run[-1]["test_accuracy"] if len(run) == study.epochs else math.nan for run in runs]
        rates = [record["learning_rate"] for run in runs for record in run]
        rate = f"{max(rates):.4g}" if rates else ""
        if any(map(math.isnan, last)):
            rows.append(f"| {way} | {batch:,} | {rate} | NaN in {sum(map(math.isnan, last))} of {len(last)} | | |")
        else:
            figures = (statistics.median(last), min(last), max(last))
            rows.append(f"| {way} | {batch:,} | {rate} | " + " | ".join(f"{100 * one:.2f} %" for one in figures) + " |")
    return "\n".join(rows)


def draw(study, results):
    """Plots the test accuracy per epoch: a line through the medians and a band from minimum to maximum."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for way, runs in results.items():
        whole = [[100 * record["test_accuracy"] for record in run] for run in runs if len(run) == study.epochs]
        if whole:
            epochs = range(1, study.epochs + 1)
            (line,) = axes.plot(epochs, [statistics.median(at) for at in zip(*whole, strict=True)], ".-", label=way)
            low, high = ([pick(at) for at in zip(*whole, strict=True)] for pick in (min, max))
            axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(study.output / "large-batch.png", dpi=110)


def main():
    study = options()
    if study.small_batch % study.num_ranks or study.large_batch % study.num_ranks:
        batches = f"{study.small_batch} and {study.large_batch}"
        raise SystemExit(f"got batches of {batches}, which {study.num_ranks} ranks cannot share evenly")
    study.output.mkdir(parents=True, exist_ok=True)
    results = {way: [] for way in WAYS}
    for seed in range(study.seeds):  # all variants per seed, so that partial results cover each of them
        for way, runs in results.items():
            runs.append(train(study, way, seed))
    text = table(study, results)
    (study.output / "large-batch.md").write_text(text + "\n")
    draw(study, results)
    print(f"\n{text}\n\n{study.output / 'large-batch.png'}")


if __name__ == "__main__":
    main()
