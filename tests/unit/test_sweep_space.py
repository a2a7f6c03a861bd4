"""What a sweep tries, where, and what it remembers: without starting anything."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from ringtrain import cli
from ringtrain.cluster.hosts import parse_hosts, select
from ringtrain.config import files
from ringtrain.config.sections import Config, with_values
from ringtrain.errors import ConfigError, MissingDependency
from ringtrain.lab import sweep_space as space
from ringtrain.lab import sweep_trials as trials
from ringtrain.lab.sweep_space import Study

ROOT = Path(__file__).parents[2]
TRAIN = ["python", "-m", "ringtrain.train"]


def read(folder: Path, text: str) -> space.Space:
    (folder / "space.toml").write_text(text)
    return space.read(folder / "space.toml", is_trainer=True)


def test_options_are_named_as_on_the_command_line_or_as_in_a_configuration(tmp_path):
    found = read(
        tmp_path,
        """
        seed = [1, 2]
        "optimizer.learning-rate" = {low = 1e-4, high = 1, log = true}
        train.batch-size = {low = 16, high = 70}
        [schedule]
        warmup-epochs = [0, 2.5]
        """,
    )
    assert found == {
        "seed": CategoricalDistribution([1, 2]),
        "optimizer.learning_rate": FloatDistribution(1e-4, 1.0, log=True),
        "train.batch_size": IntDistribution(16, 70),
        "schedule.warmup_epochs": CategoricalDistribution([0.0, 2.5]),
    }


def test_names_without_a_section_are_a_scripts_own(tmp_path):
    text = """
        learning-rate = {low = 1e-4, high = 1, log = true}
        seed = [1, 2]
        rate = [1, 0.5]
        units = {low = 8, high = 32}
        kind = ["gru", "lstm"]
        "hvd.compression" = ["none", "fp16"]
        """
    (tmp_path / "space.toml").write_text(text)
    found = space.read(tmp_path / "space.toml", is_trainer=False)
    assert found == {
        "learning_rate": FloatDistribution(1e-4, 1.0, log=True),
        "seed": CategoricalDistribution([1, 2]),
        "rate": CategoricalDistribution([1, 0.5]),
        "units": IntDistribution(8, 32),
        "kind": CategoricalDistribution(["gru", "lstm"]),
        "hvd.compression": CategoricalDistribution(["none", "fp16"]),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"train.batch-size" = [1]', "train.batch-size: is no option that differs between trials"),
        ('"hvd.compresion" = [1]', "hvd.compresion: is no option that differs between trials: did you mean hvd.compr"),
        ("rate = 3", "rate: got 3, expected a list of values, or a range"),
        ("rate = [[1], [2]]", "rate: got [1], expected numbers, text, or true and false"),
        (
            "kind = {low = 'a', high = 'b'}",
            "kind: got {'low': 'a', 'high': 'b'}, expected a list of values, or a range",
        ),
    ],
)
def test_what_is_wrong_with_a_scripts_space_is_one_line(text, said, tmp_path):
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        space.read(tmp_path / "space.toml", is_trainer=False)
    assert str(raised.value).startswith(f"{tmp_path / 'space.toml'}: {said}")


def test_a_sweep_of_a_script_says_what_it_cannot_do_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text("rate = [1, 2]")
    told = ["sweep", "--space", "space.toml", "-H", "localhost:2"]
    for words, said in (
        (["--set", "--lr={rates}", "--", "python", "own.py"], "values of the script, which are rate: 'rates'"),
        (["--set", "--lr={rate", "--", "python", "own.py"], "expected e.g. '--lr={learning_rate}'"),
        (["--ensemble", "2", "--", "own.py"], "got --ensemble with a script"),
        (["--", *TRAIN], "rate: is no option that differs between trials"),
        (["--", "--data.name", "digits"], "got --data.name after --, expected a command: python own.py, or python -m"),
        ([], "got nothing after --, expected a command"),
    ):
        assert cli.main([*told, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["space.toml"]


BAD = {
    "train.batchsize = [1]": "train.batchsize: is no option that differs between trials: did you mean train.batch",
    "learning_rate = [1]": "learning_rate: is no option that differs between trials: did you mean optimizer.learning_r",
    "train.batch_size = ['a']": "train.batch_size: got 'a', expected int",
    "train.batch_size = [true]": "train.batch_size: got True, expected int",
    "train.batch_size = [8, 0]": "train.batch_size: got 0, expected 1 or more",
    "train.batch_size = []": "train.batch_size: got [], expected a list of values, or a range",
    "train.batch_size = 3": "train.batch_size: got 3, expected a list of values, or a range {low = ..., high = ...}",
    "train.batch_size = {low = 1, high = 2.5}": "train.batch_size: got 2.5, expected int",
    "train.batch_size = {low = 8, high = 4}": "train.batch_size: got {'low': 8, 'high': 4}, expected a list",
    "train.batch_size = {low = 4, hi = 8}": "train.batch_size: got {'low': 4, 'hi': 8}, expected a list of values, or",
    "train.batch_size = {low = 4}": "train.batch_size: got {'low': 4}, expected a list of values, or a range",
    "optimizer.momentum = {low = 0, high = 0.9, log = true}": "optimizer.momentum: got {'low': 0, 'high': 0.9",
    "optimizer.momentum = {low = 0.1, high = 1.5}": "optimizer.momentum: got 1.5, expected 0 up to 1, 1 excluded",
    "optimizer.name = ['sgd', 'adan']": "optimizer.name: got 'adan', expected one of sgd, adam, ",
    "train.jit = ['yes']": "train.jit: got 'yes', expected bool",
    "schedule.milestones = [[1.0], [2.0]]": "schedule.milestones: got [1.0], expected numbers, text, or true and false",
    "train.monitor = ['loss']": "train.monitor: is no option that differs between trials",
    "run.name = ['a']": "run.name: is no option that differs between trials",
    "": "got no option, expected e.g. ",
    "train.epochs = [": "not TOML: ",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_with_a_space_is_one_line(text, tmp_path):
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'space.toml'}: {BAD[text]}")
    assert "\n" not in str(raised.value)


def test_the_command_says_it_in_one_line_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text("optimizer.momentum = {low = 0.1, high = 0.5}")
    told = ["sweep", "--space", "space.toml", "-H", "localhost:2"]
    for words, said in (
        (
            ["--sampler", "grid"],
            "space.toml: optimizer.momentum: a grid needs a list of values; or take --sampler random or tpe",
        ),
        (["--ranks-per-trial", "3"], "got --ranks-per-trial 3, but 2 slots in all (localhost:2): name more hosts"),
        (["--ranks-per-trial", "0"], "got --ranks-per-trial 0, expected 1 or more"),
        (["-np", "2"], "unrecognized arguments: -np 2"),
        (["--launcher", "srun"], "got --launcher srun, expected one of mpirun, horovodrun, horovodrun-gloo"),
        (["--dry-run"], "unrecognized arguments: --dry-run"),
        (["--", *TRAIN, "--train.epoch", "3"], "unknown option --train.epoch: did you mean --train.epochs?"),
    ):
        assert cli.main([*told, *words, *([] if "--" in words else ["--", *TRAIN])]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["space.toml"]


def test_a_grid_is_every_combination_in_order(tmp_path):
    found = read(
        tmp_path,
        """
        "train.batch-size" = [16, 32, 48, 64]
        "optimizer.momentum" = [0.1, 0.2, 0.3]
        "train.epochs" = [2, 3]
        """,
    )
    points = space.grid(tmp_path, found)
    assert len(points) == 4 * 3 * 2
    assert points[0] == {"train.batch_size": 16, "optimizer.momentum": 0.1, "train.epochs": 2}
    assert points[1]["train.epochs"] == 3
    assert [point["optimizer.momentum"] for point in points[:6:2]] == [0.1, 0.2, 0.3]


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


def test_a_configuration_with_lists_of_words_comes_back_from_its_toml(tmp_path):
    config = with_values(Config(), {"seed": 3, "model.metrics": ("top-5",), "schedule.milestones": (1.0, 2.0)})
    (tmp_path / "config.toml").write_text(files.to_toml(config))
    assert files.read_toml(tmp_path / "config.toml") == config


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
