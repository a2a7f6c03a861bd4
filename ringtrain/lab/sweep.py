"""ringtrain sweep: trains with many values of some options and reports the best.

    ringtrain sweep --space space.toml -H localhost:2 -- python -m ringtrain.train --config configs/digits.toml
    ringtrain sweep --space space.toml --set "--lr={learning_rate}" -H localhost:2 -- python own.py

Each trial is a ring on its own slots. Optuna keeps trials and results in the sweep's folder: the same command resumes
an interrupted sweep.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ringtrain import data
from ringtrain.cluster import processes
from ringtrain.cluster.launch import find_hosts
from ringtrain.cluster.launch_options import LaunchOptions
from ringtrain.config import files
from ringtrain.config.derived import lower_is_better
from ringtrain.config.options import AT_LEAST_0, AT_LEAST_1, FILE, NAME, Argument, N
from ringtrain.errors import HostsError, LaunchError, RunDirectoryError
from ringtrain.lab import ranks, stats
from ringtrain.lab import sweep_space as space
from ringtrain.lab.script import Script, runs_in
from ringtrain.lab.sweep_space import STUDY_FILE, Study
from ringtrain.lab.sweep_trials import Sweep, TrialJob, held, number_text, values_in_words
from ringtrain.lab.tables import Table
from ringtrain.protocol.json_text import INVALID, parse_json

DEFAULT_TRIALS = 20
LAUNCHERS = ("mpirun", "horovodrun", "horovodrun-gloo")
HOST_OPTIONS = ("hostfile", "hosts", "include", "exclude")
"""options of launch in whose place each trial gets its slots"""


@dataclass(frozen=True)
class SweepOptions:
    """SweepOptions of the command."""

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


def main(options: SweepOptions, launch: LaunchOptions) -> int:
    """Runs the sweep, prints and writes its results.

    Returns:
        0, or 128 + the number of the signal that ended the sweep.
    """
    # What is tried, on which hosts: mistakes are reported before anything starts.
    if launch.launcher not in LAUNCHERS:
        raise LaunchError(f"got --launcher {launch.launcher}, expected one of {', '.join(LAUNCHERS)}")
    path, script = Path(options.space), Script.of(launch.command)
    if options.ensemble and not script.is_trainer:
        raise LaunchError("got --ensemble with a script, whose test data it alone has: load its runs' model.keras")
    found = space.read(path, script.is_trainer)
    objective = options.objective or ("test_loss" if script.is_trainer else "val_loss")
    own = [] if script.is_trainer else [name for name in found if "." not in name]
    job = TrialJob(script, options.set, objective, own)
    job.command(dict.fromkeys(own, 1))
    points, most = [], options.trials or DEFAULT_TRIALS
    if options.sampler == "grid":
        points = space.grid(path, found)
        most = min(options.trials or len(points), len(points))
    hosts, num_ranks = find_hosts(launch)[0], options.ranks_per_trial
    num_slots = sum(host.slots for host in hosts)
    if num_ranks > num_slots:
        listed = ",".join(map(str, hosts))
        raise HostsError(f"got --ranks-per-trial {num_ranks}, but {num_slots} slots in all ({listed}): name more hosts")

    # One sweep at a time works in a folder, which belongs to its settings.
    folder = Path(options.folder or f"runs/sweep-{path.stem}")
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / "lock") as lock:
        if lock is None:
            raise RunDirectoryError(f"{folder}: another ringtrain sweep works there: wait, or give another --folder")
        settings: dict[str, Any] = {f"space of {option}": str(one) for option, one in found.items()}
        settings |= {"--sampler": options.sampler, "--ranks-per-trial": num_ranks, "--objective": objective}
        settings |= {"command": list(script.command), "--set": list(options.set)}
        claim(folder, settings)
        study = Study(folder, found, options.sampler, lower_is_better(objective), points)
        aim = "lowest" if study.minimize else "highest"
        processes.say(f"sweep: {most} trials in {folder}, for the {aim} {objective} of the last epoch")
        sweep = Sweep(folder, study, job, most, num_ranks, hosts, ranks.launch_words(launch, HOST_OPTIONS))
        sweep.go()
        if sweep.stopped_by:
            name = signal.Signals(sweep.stopped_by).name
            processes.say(f"sweep: stopped by {name}; the same command goes on")
            return 128 + sweep.stopped_by
        conclude(folder, study, job, options)
    return 0


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Records the settings of a sweep in its folder, or checks that they match those on record."""
    path = folder / "sweep.json"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    elif not (folder / STUDY_FILE).exists() and any(folder.glob("trial-*")):
        raise LaunchError(f"{folder}: holds trials without {STUDY_FILE}, their record: give another --folder")
    try:
        known = dict(parse_json(path.read_text(encoding="utf-8")))
    except INVALID:
        raise LaunchError(f"{path}: expected a JSON object that says what the folder is for: delete it") from None
    for name in {**known, **settings}:
        if known.get(name) != settings.get(name):
            raise LaunchError(
                f"{folder}: holds a sweep whose {name} is {known.get(name)}, got {settings.get(name)}: give another"
                " --folder, or delete it"
            )


def conclude(folder: Path, study: Study, job: TrialJob, options: SweepOptions) -> None:
    """Prints and writes the results and the best values."""
    trials, best, objective = study.trials(), study.best(), job.objective
    ordered = [*best, *(trial for trial in trials if trial not in best)]
    rows = []
    for trial in ordered:
        values = [number_text(trial.params.get(option)) for option in study.space]
        facts = [number_text(trial.user_attrs.get(fact)) for fact in ("epochs", "seconds")]
        rows.append([str(trial.number), trial.state.name.lower(), number_text(trial.value), *facts, *values])
    head = ("trial", "", objective, "epochs", "s", *(option.rpartition(".")[2] for option in study.space))
    Table(head, rows, f"{len(best)} of {len(trials)} trials complete").show()
    results: dict[str, Any] = {"objective": objective, "trials": [record_of(trial) for trial in trials]}
    results |= {"direction": "minimize" if study.minimize else "maximize", "best": best[0].number if best else None}
    stats.write(folder / "results.json", vars(options), results)
    if not best:
        reason = trials[0].user_attrs.get("reason", "it was stopped")
        raise LaunchError(f"none of {len(trials)} trials completed; e.g.: {reason}")
    winner = best[0]
    print(f"best: trial {winner.number}, {objective} {number_text(winner.value)}: {values_in_words(winner.params)}")
    print(f"  {job.write_best(folder / 'best.json', winner, options.ranks_per_trial)}")
    if options.ensemble:
        if options.ensemble > len(best):
            raise LaunchError(f"got --ensemble {options.ensemble}, but {len(best)} trials completed")
        folders = [runs_in(folder / f"trial-{trial.number:04d}")[-1].folder for trial in best]
        results["ensemble"] = evaluate(folders[: options.ensemble])
        stats.write(folder / "results.json", vars(options), results)


def record_of(trial: Any) -> dict[str, Any]:
    """Values and result of a trial, for the file of results."""
    record = {"number": trial.number, "state": trial.state.name.lower(), "values": trial.params, "value": trial.value}
    return record | trial.user_attrs


def evaluate(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Accuracy and cross-entropy of the models of runs, the best first, and of their averaged probabilities."""
    labels, first = predict(runs[0])
    predicted = [first]
    for run in runs[1:]:
        its_labels, probabilities = predict(run)
        if not np.array_equal(its_labels, labels):
            raise LaunchError(f"{run}: was tested on other samples than {runs[0]}: an ensemble needs the same")
        predicted.append(probabilities)
    predicted.append(np.mean(predicted, axis=0))
    scores: list[dict[str, Any]] = []
    for name, probabilities in zip([*map(str, runs), "all averaged"], predicted, strict=True):
        accuracy = np.mean(np.argmax(probabilities, axis=-1) == labels)
        of_label = np.take_along_axis(probabilities, labels[:, None], axis=-1)
        loss = -np.mean(np.log(np.maximum(of_label, 1e-300)))
        scores.append({"run": name, "accuracy": float(accuracy), "loss": float(loss)})
    rows = [[one["run"], f"{one['accuracy']:.2%}", f"{one['loss']:.4f}"] for one in scores]
    Table(["", "test accuracy", "cross-entropy"], rows, f"averaged probabilities of {len(runs)} models").show()
    return scores


def predict(run: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels [n] and predicted probabilities [n, classes] of a run's test samples."""
    import keras

    from ringtrain.training import configured

    config = files.read_toml(run / "config.toml")
    data_set = configured.find(config).read_data()
    path = run / "model.keras"
    try:
        model = keras.models.load_model(path, compile=False)
    except Exception as error:  # also from the model's own code
        raise LaunchError(f"{path}: cannot be read as a Keras model: {' '.join(str(error).split())[:300]}") from error
    samples = data.evaluation_shard(len(data_set.test), 0, 1)
    labels, probabilities = [], []
    for inputs, own in data.evaluation_batches(data_set.test, samples, config.train.batch_size):
        logits = keras.ops.cast(model.predict_on_batch(inputs), "float64")
        probabilities.append(np.asarray(keras.ops.softmax(logits)))
        labels.append(np.asarray(own))
    return np.concatenate(labels), np.concatenate(probabilities)
