"""ringtrain sweep: trains with many values of some options and reports the best.

    ringtrain sweep --space space.toml -H localhost:2 -- python -m ringtrain.train --config configs/digits.toml
    ringtrain sweep --space space.toml --set "--lr={learning_rate}" -H localhost:2 -- python own.py

Each trial is a ring on its own slots. Optuna keeps trials and results in the sweep's folder: the same command resumes
an interrupted sweep.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ringtrain import config_io, data
from ringtrain.cluster import processes
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.derived import lower_is_better
from ringtrain.errors import HostsError, LaunchError, RunDirectoryError
from ringtrain.lab import ranks, stats
from ringtrain.lab import sweep_space as space
from ringtrain.lab import sweep_trials as trials
from ringtrain.lab.script import Script, runs_in
from ringtrain.lab.sweep_space import STUDY_FILE, Study, Trial
from ringtrain.lab.sweep_trials import Trials, number_text, values_in_words
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_0, AT_LEAST_1, FILE, NAME, Argument, N

DEFAULT_TRIALS = 20
REPORTED = 3
"""number of best trials that the final hint compares"""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    space: Annotated[str, FILE]
    """TOML with the values of each option to try"""
    trials: Annotated[int, N, AT_LEAST_0] = 0
    """in all; 0: 20, of a grid all"""
    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """all combinations, any, or those that promise most"""
    ranks_per_trial: Annotated[int, Argument("R"), AT_LEAST_1] = 1
    """of each trial's ring"""
    ensemble: Annotated[int, Argument("K"), AT_LEAST_0] = 0
    """also evaluate the averaged prediction of the best K"""
    set: Annotated[tuple[str, ...], Argument("TEMPLATE", is_repeated=True, may_be_option=True)] = ()
    """arguments of the script with a trial's values, such as "--lr={learning_rate}"; may be repeated"""
    objective: Annotated[str, NAME] = ""
    """metric of an epoch, or images_per_s, to compare trials by (val_loss; of the trainer test_loss)"""
    folder: Annotated[str, Argument("DIR")] = ""
    """of the sweep (runs/sweep- and the name of its space)"""


@dataclass(frozen=True)
class Best:
    """Models whose predictions are averaged."""

    runs: Sequence[str]
    """folders, the best first"""


def on_ranks(options: Best, train_args: Sequence[str]) -> dict[str, Any]:
    """Evaluates models and the average of their predictions."""
    return evaluate(options.runs)


def main(options: Options, start: ranks.Start, call: ranks.Call) -> int:
    """Runs the sweep, prints and writes its results.

    Returns:
        0, or 128 + the number of the signal that ended the sweep.
    """
    refuse(start.launch)
    path = Path(options.space)
    script = Script.of(start.train_args)
    if options.ensemble and not script.is_trainer:
        raise LaunchError("got --ensemble with a script, whose test data it alone has: load its runs' model.keras")
    found = space.read(path, script.is_trainer)
    objective = options.objective or ("test_loss" if script.is_trainer else "val_loss")
    own = [] if script.is_trainer else [name for name in found if "." not in name]
    job = Trials(script, options.set, objective, own)
    folder = Path(options.folder or f"runs/sweep-{path.stem}")
    points = space.grid(path, found) if options.sampler == "grid" else []
    if points:
        most = min(options.trials or len(points), len(points))
    else:
        most = options.trials or DEFAULT_TRIALS
    hosts, num_ranks = start.hosts, options.ranks_per_trial
    num_slots = sum(host.slots for host in hosts)
    if num_ranks > num_slots:
        listed = ",".join(map(str, hosts))
        raise HostsError(f"got --ranks-per-trial {num_ranks}, but {num_slots} slots in all ({listed}): name more hosts")
    minimize = lower_is_better(objective)
    folder.mkdir(parents=True, exist_ok=True)
    with trials.held(folder / "lock") as lock:
        if lock is None:
            raise RunDirectoryError(f"{folder}: another ringtrain sweep works there: wait, or give another --folder")
        claim(folder, options, job, found)
        study = Study(folder, found, options.sampler, minimize, points)
        aim = "lowest" if minimize else "highest"
        processes.say(f"sweep: {most} trials in {folder}, for the {aim} {objective} of the last epoch")
        sweep = trials.Sweep(folder, study, job, most, num_ranks, hosts, start.launch_words)
        sweep.go()
        if sweep.stopped_by:
            name = signal.Signals(sweep.stopped_by).name
            processes.say(f"sweep: stopped by {name}; the same command goes on")
            return 128 + sweep.stopped_by
        return conclude(folder, study, job, options, call)


def refuse(launch: LaunchOptions) -> None:
    """Rejects options of launch that parallel trials cannot use."""
    for name in ("np", "output", "timeline", "oversubscribe"):
        if getattr(launch, name):
            option = "-np" if name == "np" else f"--{name}"
            raise LaunchError(f"got {option}: each trial has its own --ranks-per-trial, slots and files: leave it out")
    if launch.bind != "none":
        raise LaunchError("got --bind core: each trial would bind its ranks to a host's first cores: leave it out")
    if launch.launcher not in ("mpirun", "horovodrun", "horovodrun-gloo"):
        raise LaunchError(f"got --launcher {launch.launcher}, expected mpirun, horovodrun or horovodrun-gloo")


def claim(folder: Path, options: Options, job: Trials, found: space.Space) -> None:
    """Records this sweep's settings in the folder, or checks that they match those on record."""
    own: dict[str, Any] = {f"space of {option}": vars(one) for option, one in found.items()}
    own |= {f"--{name.replace('_', '-')}": getattr(options, name) for name in ("sampler", "ranks_per_trial")}
    own |= job.settings()
    if not (folder / STUDY_FILE).exists() and any(folder.glob("trial-*")):
        raise LaunchError(
            f"{folder}: holds trials without {STUDY_FILE}, which says what was done: delete it, or give another"
            " --folder"
        )
    trials.claim(folder / "sweep.json", own)


def conclude(folder: Path, study: Study, job: Trials, options: Options, call: ranks.Call) -> int:
    """Writes the results and the best values, and prints them."""
    trials, best, objective = study.trials(), study.best(), job.objective
    show(trials, best, objective, list(study.space))
    results = {
        "objective": objective,
        "direction": "minimize" if study.minimize else "maximize",
        "best": best[0].number if best else None,
        "trials": [vars(one) for one in trials],
    }
    told = {name: getattr(options, name) for name in ("space", "sampler", "trials", "ranks_per_trial")}
    stats.write(folder / "results.json", "sweep", told, results)
    if not best:
        reasons = sorted(str(one.facts.get("reason")) for one in trials)
        raise LaunchError(f"none of {len(trials)} trials completed; e.g.: {reasons[0]}")
    launch = job.write_best(folder, best[0], options.ranks_per_trial)
    runs = []
    for one in best:
        runs += [str(run) for run in runs_in(folder / f"trial-{one.number:04d}")[-1:]]
    value = number_text(best[0].value)
    print(f"best: trial {best[0].number}, {objective} {value}: {values_in_words(best[0].values)}")
    print(f"  {launch}")
    print(f"compare: ringtrain report {' '.join(runs[:REPORTED])}")
    if options.ensemble:
        if options.ensemble > len(best):
            raise LaunchError(f"got --ensemble {options.ensemble}, but {len(best)} trials completed")
        ensemble = call(on_ranks, Best(runs[: options.ensemble]), num_ranks=1)
        scores = [*ensemble["models"], {"run": "all averaged", **ensemble["averaged"]}]
        rows = [[one["run"], f"{one['accuracy']:.2%}", f"{one['loss']:.4f}"] for one in scores]
        title = f"the averaged probabilities of {options.ensemble} models"
        Table(["", "test accuracy", "cross-entropy"], rows, title).show()
        stats.write(folder / "results.json", "sweep", told, {**results, "ensemble": ensemble})
    return 0


def show(trials: Sequence[Trial], best: Sequence[Trial], objective: str, options: Sequence[str]) -> None:
    """Prints all trials, the best first."""
    rest = [one for one in trials if one not in best]
    rows = []
    for one in [*best, *rest]:
        seconds = f"{one.facts['seconds']:.1f}" if "seconds" in one.facts else ""
        values = [number_text(one.values.get(option)) for option in options]
        epochs = str(one.facts.get("epochs", ""))
        rows.append([str(one.number), one.state, number_text(one.value), epochs, seconds, *values])
    head = ("trial", "", objective, "epochs", "s", *(option.rpartition(".")[2] for option in options))
    Table(head, rows, f"{len(best)} of {len(trials)} trials complete").show()
    for one in rest:
        if one.state == "failed":
            print(f"trial {one.number} failed: {one.facts.get('reason')}")


def evaluate(runs: Sequence[str]) -> dict[str, Any]:
    """Evaluates models on the test samples of their own configurations.

    Args:
        runs: Folders, the best first.
    """
    ranks.begin(config_io.read_toml(Path(runs[0], "config.toml")))
    labels, first = predict(Path(runs[0]))
    predicted = [first]
    for run in runs[1:]:
        its_labels, probabilities = predict(Path(run))
        if not np.array_equal(its_labels, labels):
            raise LaunchError(f"{run}: was tested on other samples than {runs[0]}: an ensemble needs the same")
        predicted.append(probabilities)
    scores = [score(labels, probabilities) for probabilities in predicted]
    averaged = score(labels, np.mean(predicted, axis=0))
    return {
        "models": [{"run": run, **its} for run, its in zip(runs, scores, strict=True)],
        "averaged": averaged,
    }


def predict(run: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels [n] and predicted probabilities [n, classes] of a run's test samples."""
    import keras

    from ringtrain.run import resume, setup

    config = config_io.read_toml(run / "config.toml")
    named = setup.find(config)
    data_set = named.read_data()
    keras.config.set_dtype_policy(config.train.precision)
    model = named.build_model(data_set.input_shape, data_set.num_classes)
    resume.load_weights(model, run / "model.keras")
    samples = data.evaluation_shard(len(data_set.test), 0, 1)
    labels, probabilities = [], []
    for inputs, own in data.evaluation_batches(data_set.test, samples, config.train.batch_size):
        logits = np.asarray(keras.ops.convert_to_numpy(model.predict_on_batch(inputs)), np.float64)
        exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities.append(exponents / exponents.sum(axis=-1, keepdims=True))
        labels.append(np.asarray(own))
    return np.concatenate(labels), np.concatenate(probabilities)


def score(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> dict[str, float]:
    """Accuracy and cross-entropy from labels [n] and probabilities [n, classes]."""
    of_the_label = np.take_along_axis(probabilities, labels[:, None], axis=-1)
    accuracy = np.mean(np.argmax(probabilities, axis=-1) == labels)
    return {"accuracy": float(accuracy), "loss": float(-np.mean(np.log(np.maximum(of_the_label, 1e-300))))}
