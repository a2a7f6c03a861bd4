"""What a sweep tries, where, and what it remembers: without starting anything."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from ringtrain import cli
from ringtrain.cluster.hosts import parse_hosts, select
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.lab import sweep_space as space
from ringtrain.lab import sweep_trials as trials
from ringtrain.lab.sweep_space import Study

TRAIN = ["python", "-m", "ringtrain.train"]


def read(folder: Path, text: str, is_trainer: bool = True) -> space.Space:
    (folder / "space.toml").write_text(text)
    return space.read(folder / "space.toml", is_trainer)


def test_options_are_named_as_on_the_command_line_or_as_in_a_configuration(tmp_path):
    text = """
        seed = [1, 2]
        "optimizer.learning-rate" = {low = 1e-4, high = 1, log = true}
        train.batch-size = {low = 16, high = 70}
        [schedule]
        warmup-epochs = [0, 2.5]
        """
    assert read(tmp_path, text) == {
        "seed": CategoricalDistribution([1, 2]),
        "optimizer.learning_rate": FloatDistribution(1e-4, 1.0, log=True),
        "train.batch_size": IntDistribution(16, 70),
        "schedule.warmup_epochs": CategoricalDistribution([0.0, 2.5]),
    }


def test_names_without_a_section_are_a_scripts_own(tmp_path):
    text = 'learning-rate = {low = 0.1, high = 1}\nkind = ["gru", "lstm"]\n"hvd.compression" = ["none", "fp16"]'
    assert read(tmp_path, text, is_trainer=False) == {
        "learning_rate": FloatDistribution(0.1, 1.0),
        "kind": CategoricalDistribution(["gru", "lstm"]),
        "hvd.compression": CategoricalDistribution(["none", "fp16"]),
    }


BAD = {
    "train.batchsize = [1]": "train.batchsize: is no option that differs between trials: did you mean train.batch",
    "learning_rate = [1]": "learning_rate: is no option that differs between trials: did you mean optimizer.learning_r",
    "train.batch_size = ['a']": "train.batch_size: got 'a', expected int",
    "train.batch_size = [8, 0]": "train.batch_size: got 0, expected 1 or more",
    "train.batch_size = []": "train.batch_size: got [], expected a list of values, or a range",
    "train.batch_size = {low = 1, high = 2.5}": "train.batch_size: got 2.5, expected int",
    "train.batch_size = {low = 4, hi = 8}": "train.batch_size: got {'low': 4, 'hi': 8}, expected a list of values, or",
    "optimizer.momentum = {low = 0.1, high = 1.5}": "optimizer.momentum: got 1.5, expected 0 up to 1, 1 excluded",
    "optimizer.name = ['sgd', 'adan']": "optimizer.name: got 'adan', expected one of sgd, adam, ",
    "run.name = ['a']": "run.name: is no option that differs between trials",
    "": "got no option, expected e.g. ",
    "train.epochs = [": "not TOML: ",
}
BAD_OF_A_SCRIPT = {
    '"train.batch-size" = [1]': "train.batch-size: is no option that differs between trials",
    '"hvd.compresion" = [1]': "hvd.compresion: is no option that differs between trials: did you mean hvd.compr",
    "rate = [[1], [2]]": "rate: got [1], expected numbers, text, or true and false",
    "kind = {low = 'a', high = 'b'}": "kind: got {'low': 'a', 'high': 'b'}, expected a list of values, or a range",
}


@pytest.mark.parametrize("text", [*BAD, *BAD_OF_A_SCRIPT])
def test_what_is_wrong_with_a_space_is_one_line(text, tmp_path):
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text, is_trainer=text in BAD)
    assert str(raised.value).startswith(f"{tmp_path / 'space.toml'}: {(BAD | BAD_OF_A_SCRIPT)[text]}")
    assert "\n" not in str(raised.value)


def test_the_command_says_it_in_one_line_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    of_trainer, of_script = "optimizer.momentum = {low = 0.1, high = 0.5}", "rate = [1, 2]"
    own = ["--", "python", "own.py"]
    for text, words, said in (
        (of_trainer, ["--sampler", "grid", "--", *TRAIN], "optimizer.momentum: a grid needs a list of values; or take"),
        (of_trainer, ["--ranks-per-trial", "3", "--", *TRAIN], "got --ranks-per-trial 3, but 2 slots in all (localhos"),
        (of_trainer, ["--launcher", "srun", "--", *TRAIN], "got --launcher srun, expected one of mpirun, horovodrun"),
        (of_trainer, ["--dry-run", "--", *TRAIN], "unrecognized arguments: --dry-run"),
        (
            of_trainer,
            ["--", *TRAIN, "--train.epoch", "3"],
            "unknown option --train.epoch: did you mean --train.epochs?",
        ),
        (of_script, ["--set", "--lr={rates}", *own], "values of the script, which are rate: 'rates'"),
        (of_script, ["--set", "--lr={rate", *own], "expected e.g. '--lr={learning_rate}'"),
        (of_script, ["--ensemble", "2", "--", "own.py"], "got --ensemble with a script"),
        (of_script, ["--", *TRAIN], "rate: is no option that differs between trials"),
        (of_script, ["--", "--data.name", "digits"], "got --data.name after --, expected a command: python own.py, or"),
        (of_script, [], "got nothing after --, expected a command"),
    ):
        (tmp_path / "space.toml").write_text(text)
        assert cli.main(["sweep", "--space", "space.toml", "-H", "localhost:2", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["space.toml"]


def test_a_grid_is_every_combination_in_order(tmp_path):
    found = read(tmp_path, "train.batch_size = [16, 32]\noptimizer.momentum = [0.1, 0.2, 0.3]")
    points = [(one["train.batch_size"], one["optimizer.momentum"]) for one in space.grid(tmp_path, found)]
    assert points == [(16, 0.1), (16, 0.2), (16, 0.3), (32, 0.1), (32, 0.2), (32, 0.3)]


def test_a_trial_is_on_one_host_where_it_fits():
    free = {"a": {0, 1, 2, 3}, "b": {1, 2}, "c": set()}
    assert trials.allot(free, 2) == {"a": (0, 1)}
    assert trials.allot(free, 3) == {"a": (0, 1, 2)}
    assert trials.allot(free, 5) == {"a": (0, 1, 2, 3), "b": (1,)}
    assert trials.allot(free, 7) == {} and trials.allot({"a": set()}, 1) == {}


def test_a_place_is_told_to_launch_so_that_it_takes_these_slots():
    """Which are GPUs: see cluster.run.starter."""
    hosts = select(parse_hosts("a:4,b:2,[fe80::1]:3"), exclude="a:0")
    place = {"a": (1, 3), "fe80::1": (2,)}
    _, listed, _, included = trials.words_of(place, hosts)
    found = select(parse_hosts(listed), included)
    assert {host.name: tuple(host.indices) for host in found} == place
    assert {host.name: host.slots for host in found} == {"a": 2, "fe80::1": 1}


# ---- what Optuna keeps --------------------------------------------------------------------------------------------

SPACE = {
    "optimizer.momentum": FloatDistribution(0.0, 0.9),
    "train.batch_size": IntDistribution(16, 70),
    "optimizer.learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "train.jit": CategoricalDistribution([False, True]),
}


def study(folder: Path, sampler: str = "random", points=(), space=SPACE) -> Study:
    return Study(folder, space, sampler, minimize=True, points=points)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sweep_that_goes_on_draws_what_it_has_not_drawn(sampler, tmp_path):
    drawn = []
    for most in (3, 6):
        one = study(tmp_path, sampler)
        while trial := one.next(most):
            drawn.append(one.values(trial)["optimizer.momentum"])
            one.finish(trial, 1.0)
    assert len(drawn) == len({*drawn}) == 6


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sweep_that_goes_on_keeps_what_was_running(sampler, tmp_path):
    first = study(tmp_path, sampler)
    trials = [first.next(9) for _ in range(3)]
    values = [first.values(trial) for trial in trials]
    first.finish(trials[0], 0.5, seconds=1.0)
    half = first.next(9)  # killed before it had all of its values
    momentum = half.suggest_float("optimizer.momentum", 0.0, 0.9)
    again = study(tmp_path, sampler)
    assert [trial.number for trial in again.interrupted()] == [1, 2, 3]
    assert [again.values(trial) for trial in again.interrupted()[:2]] == values[1:]
    completed = again.values(again.interrupted()[2])
    assert completed.keys() == SPACE.keys() and completed["optimizer.momentum"] == momentum
    assert all(16 <= one["train.batch_size"] <= 70 for one in values)
    assert [one.params for one in again.trials()] == [*values, completed]
    assert [one.state.name for one in again.trials()] == ["COMPLETE", *3 * ["RUNNING"]]
    assert again.next(4) is None


def test_a_grid_is_done_once_whenever_it_is_interrupted(tmp_path):
    options = {"train.batch_size": CategoricalDistribution([16, 32]), "train.jit": SPACE["train.jit"]}
    points = space.grid(tmp_path, options)
    done = []
    for _ in points:  # a start each; of each second one nothing is told
        one = study(tmp_path, "grid", points=points, space=options)
        trial = (one.interrupted() or [one.next(len(points))])[0]
        done.append(one.values(trial))
        one.finish(trial, 1.0)
        one.next(len(points))
    assert done == points
    last = study(tmp_path, "grid", points=points, space=options)
    assert last.next(len(points)) is None and not last.interrupted()


def test_without_optuna_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependency, match=re.escape("pip install 'ringtrain[sweep]'")):
        study(tmp_path)
