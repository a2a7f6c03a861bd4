"""What tune tries, in which order, what it keeps, and that what it writes can be read."""

from __future__ import annotations

import dataclasses

import pytest

from ringtrain import cli, config_io
from ringtrain.cluster.launch_options import GROUPS, LaunchOptions
from ringtrain.config import Config
from ringtrain.errors import ConfigError, LaunchError
from ringtrain.lab import options as opt
from ringtrain.lab import ranks
from ringtrain.lab.tune import candidates
from ringtrain.lab.tune import cli as tune_cli
from ringtrain.lab.tune.candidates import BudgetOver, Choice, Facts, Lever
from ringtrain.options import options_of, words_of

ONE_HOST = Facts(2, 2, 8, threads=1, nccl=False, yields=True)
TWO_HOSTS = Facts(2, 1, 8, threads=2, nccl=False, yields=False)
GPUS = Facts(8, 4, 161, threads=0, nccl=True, yields=False)


def tried(name, facts, told=(), launcher="mpirun"):
    lever = candidates.next_lever(name, facts, config_io.read(list(told)), launcher, allow_compression=False)
    return [choice.text() for choice in lever.candidates]


def test_what_gains_most_is_tried_first_and_what_changes_numbers_only_where_that_is_allowed():
    assert candidates.order(ONE_HOST, False)[0] == "ranks" and candidates.order(ONE_HOST, False)[-1] == "compression"
    assert (
        candidates.order(TWO_HOSTS, False)[0] == "controller"
        and candidates.order(TWO_HOSTS, False)[-1] == "compression"
    )
    assert candidates.order(TWO_HOSTS, True)[:2] == ["compression", "controller"]
    assert "hierarchical" not in candidates.order(ONE_HOST, True)
    orders = [{*candidates.order(facts, True)} for facts in (ONE_HOST, TWO_HOSTS)]
    assert orders[0] | orders[1] == {*candidates.LEVERS} and orders[0] ^ orders[1] == {"ranks", "hierarchical"}
    assert not candidates.next_lever("compression", ONE_HOST, Config(), "mpirun", allow_compression=False).keep
    assert candidates.next_lever("compression", ONE_HOST, Config(), "mpirun", allow_compression=True).keep


@pytest.mark.parametrize(
    ("name", "facts", "expected"),
    [
        ("ranks", ONE_HOST, ["-np 1 train.batch_size=64"]),
        (
            "ranks",
            dataclasses.replace(ONE_HOST, num_ranks=8, ranks_per_host=8),
            ["-np 1 train.batch_size=256", "-np 4 train.batch_size=64"],
        ),
        ("ranks", TWO_HOSTS, []),
        ("ranks", GPUS, []),
        ("groups", dataclasses.replace(ONE_HOST, num_ranks=1, ranks_per_host=1), []),
        ("yielding", ONE_HOST, ["OMPI_MCA_mpi_yield_when_idle=0"]),
        ("yielding", TWO_HOSTS, ["OMPI_MCA_mpi_yield_when_idle=1"]),
        ("yielding", Facts(2, 2, 8, 1, False, yields=None), []),
        ("threads", ONE_HOST, ["device.threads=2"]),
        ("threads", TWO_HOSTS, ["device.threads=1", "device.threads=4"]),
        ("threads", GPUS, []),
        ("groups", ONE_HOST, ["hvd.groups=1", "hvd.groups=2", "hvd.groups=4"]),
        ("groups", Facts(2, 2, 2, 1, False, None), ["hvd.groups=1"]),
        ("update", ONE_HOST, ["optimizer.jit=True"]),
        ("passes", GPUS, ["train.jit=True"]),
        ("hierarchical", TWO_HOSTS, []),
        ("hierarchical", GPUS, ["HOROVOD_HIERARCHICAL_ALLREDUCE=1"]),
        ("controller", ONE_HOST, ["--launcher horovodrun-gloo"]),
        ("compression", ONE_HOST, ["hvd.compression=fp16", "hvd.compression=powersgd:4", "hvd.local_steps=8"]),
    ],
)
def test_a_lever_has_what_is_worth_trying_there(name, facts, expected):
    assert tried(name, facts) == expected


def test_nothing_is_tried_that_the_configuration_or_the_launcher_excludes():
    assert tried("groups", ONE_HOST, ["--hvd.deterministic"]) == []
    assert (
        tried("groups", ONE_HOST, ["--hvd.op", "adasum"]) == tried("controller", ONE_HOST, ["--hvd.op", "adasum"]) == []
    )
    for words in (["--optimizer.name", "sgd"], ["--optimizer.jit"], ["--strategy.name", "mpi-ring"]):
        assert tried("update", ONE_HOST, words) == []
    for words in (["--train.jit"], ["--model.sync-batch-norm"], ["--strategy.name", "mpi-ring"]):
        assert tried("passes", ONE_HOST, words) == []
    assert tried("ranks", ONE_HOST, ["--strategy.name", "mpi-ring"]) == []
    for words in (["--hvd.op", "adasum"], ["--hvd.local-steps", "4"], ["--train.virtual-ranks", "2"]):
        assert tried("ranks", ONE_HOST, words) == []
    seven = dataclasses.replace(ONE_HOST, num_ranks=7, ranks_per_host=7)
    assert tried("ranks", seven) == ["-np 1 train.batch_size=224"]  # the same batch
    assert tried("ranks", ONE_HOST, ["--device.threads", "2"]) == ["-np 1 device.threads=4 train.batch_size=64"]
    of_script = candidates.next_lever("ranks", ONE_HOST, Config(), "mpirun", False, is_script=True)
    assert [choice.text() for choice in of_script.candidates] == ["-np 1"]
    assert tried("controller", ONE_HOST, launcher="srun") == []
    assert tried("controller", ONE_HOST, launcher="horovodrun-gloo") == ["--launcher mpirun"]
    assert tried("compression", ONE_HOST, ["--hvd.compression", "fp16"]) == []
    assert tried("compression", ONE_HOST, ["--hvd.groups", "2"]) == ["hvd.compression=fp16", "hvd.local_steps=8"]
    for name in candidates.order(GPUS, True):
        for facts in (ONE_HOST, TWO_HOSTS, GPUS):
            lever = candidates.next_lever(name, facts, Config(), "mpirun", True)
            for choice in lever.candidates:
                config_io.read(choice.words())  # nothing that is refused


@pytest.mark.parametrize(
    ("ratios", "better"),
    [
        ((1.3, 1.2, 1.25), True),
        ((1.3, 1.2), False),  # nothing can be said of two
        ((1.3, 0.9, 1.25), False),
        ((1.01, 1.012, 1.011), False),  # for sure, and not worth it
        ((1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 0.9), True),  # one bad turn of twelve
        ((), False),
    ],
)
def test_what_is_kept_given_ratios(ratios, better):
    assert candidates.is_better(ratios) is better


class Speeds:
    """Runs nothing: images/s by what is in a choice's text."""

    def __init__(self, **factors):
        self.factors, self.starts = factors, []

    def __call__(self, choice, variants, turns):
        self.starts.append((choice.text(), [variant.text() for variant in variants], turns))
        return [[self.of(choice, variant)] * turns for variant in variants]

    def of(self, choice, variant):
        speed = 100.0
        for word, factor in self.factors.items():
            if word in (choice.text() + variant.text()).replace(".", "_").replace("=", "_"):
                if factor == "fails":
                    raise LaunchError("it ended")
                speed *= factor
        return speed


def test_candidates_that_need_a_start_are_measured_in_turns_and_a_slower_one_is_given_up():
    run = Speeds(threads_1=0.8, threads_4=1.2)
    lever = Lever("threads", (Choice({"device.threads": 1}), Choice({"device.threads": 4})))
    first, second = candidates.compare(lever, Choice({"hvd.groups": 2}), run)
    own = "hvd.groups=2"
    both = [own, f"{own} device.threads=1", f"{own} device.threads=4"]
    assert [text for text, _, _ in run.starts] == [*both, *both, own, f"{own} device.threads=4"]
    assert (first.verdict, len(first.ratios)) == ("gain not certain", 2)
    assert (second.verdict, second.ratios) == ("kept", (1.2, 1.2, 1.2))


def test_candidates_of_one_start_are_compared_in_it_and_the_best_is_kept():
    run = Speeds(groups_1=1.1, groups_2=1.2, groups_4=0.9)
    lever = candidates.next_lever("groups", ONE_HOST, Config(), "mpirun", False)
    outcomes = candidates.compare(lever, Choice(), run)
    assert len(run.starts) == 1 and run.starts[0][1] == ["as it was", "hvd.groups=1", "hvd.groups=2", "hvd.groups=4"]
    assert [one.verdict for one in outcomes] == ["another is better", "kept", "gain not certain"]


def test_compression_is_measured_and_not_kept_unless_it_is_allowed():
    for allowed, verdict in ((True, "kept"), (False, "not kept: it changes numbers; --allow-compression keeps it")):
        lever = candidates.next_lever("compression", TWO_HOSTS, Config(), "mpirun", allowed)
        outcome, *_ = candidates.compare(lever, Choice(), Speeds(fp16=1.9))
        assert outcome.verdict == verdict


def test_what_fails_is_left_out_and_what_has_no_time_is_not_decided():
    lever = Lever("controller", (Choice(launcher="horovodrun-gloo"),))
    (outcome,) = candidates.compare(lever, Choice(), Speeds(gloo="fails"))
    assert outcome.verdict == "failed: it ended"

    def run(choice, variants, turns):
        if len(run.starts) == 5:
            raise BudgetOver
        run.starts.append(choice)
        return [[200.0 if choice.launcher else 100.0]]

    run.starts = []
    (outcome,) = candidates.compare(lever, Choice(), run)
    assert (outcome.ratios, outcome.verdict) == ((2.0, 2.0), "not decided: the time is up")


def fake_start(speed_of, clock, seconds):
    """Ranks that are as fast as speed_of says; each start takes so many seconds on the clock."""

    def call(on_ranks, trial, train_args, num_ranks, environ=(), launcher=""):
        clock[0] += seconds
        told = [train_args, environ, launcher]
        found = {"facts": vars(ONE_HOST), "step_s": 0.01}
        if trial.autotune_s:
            return found | {"autotuned": {"fusion_mb": 16.126, "cycle_time_ms": 2.5}}
        return found | {"images_per_s": [[speed_of(f"{told} {one}")] * trial.turns for one in trial.variants]}

    return call


def test_the_search_keeps_what_gains_within_its_budget():
    def speed_of(text):
        faster = {"gloo": 1.3, "threads=2": 0.7, "groups=4": 1.1, "fusion-mb=16.13": 1.05, "fp16": 2.0, "idle": 0.5}
        speed = 100.0
        for word, factor in faster.items():
            speed *= factor if word in text else 1.0
        return speed

    def search(budget_s):
        clock, outcomes = [0.0], []
        budget = tune_cli.Budget(budget_s, lambda: clock[0])
        trials = tune_cli.Trials(fake_start(speed_of, clock, 5.0), ["--model.name", "cnn"], budget, lambda what: None)
        return tune_cli.search(trials, False, "mpirun", outcomes.append), outcomes, clock[0]

    best, outcomes, spent_s = search(600)
    assert best.text() == "--launcher horovodrun-gloo hvd.groups=4 hvd.fusion_mb=16.13 hvd.cycle_time_ms=2.5"
    assert [one.lever for one in outcomes if one.verdict == "kept"] == ["groups", "controller", "fusion"]
    assert spent_s < 200
    best, outcomes, spent_s = search(60)
    assert spent_s <= 60 and best.text() == "hvd.groups=4"
    assert outcomes[-1].verdict == "not decided: the time is up"
    with pytest.raises(LaunchError, match="not one start"):
        search(-1)
    with pytest.raises(LaunchError, match=r"compared nothing in 11 s, of which the first start took 5 s: .* --budget"):
        search(11)


def test_a_budget_that_allows_no_comparison_writes_no_toml(tmp_path):
    out, call = tmp_path / "tuned.toml", fake_start(lambda text: 100.0, [0.0], 0.0)
    start = ranks.Start("tune", LaunchOptions(command=("--model.name", "cnn")))
    options = tune_cli.Options(only="groups", budget="1s", out=str(out))
    with pytest.raises(LaunchError, match=r"compared nothing in 1 s") as error:
        tune_cli.main(options, start, call)
    assert not out.exists()
    enough = str(error.value).partition("--budget ")[2].partition(" ")[0]
    assert tune_cli.main(dataclasses.replace(options, budget=enough), start, call) == 0
    assert out.exists()


def test_the_toml_is_read_as_what_was_found_and_a_refused_value_cannot_come_out(tmp_path):
    best = Choice({"hvd.groups": 4, "hvd.cycle_time_ms": 2.5}, {"A": "b c"}, "horovodrun-gloo")
    line = tune_cli.launch_line(best, ["--hosts", "a:2"], ["--config", "tuned.toml"])
    assert line == (
        "A='b c' ringtrain launch --hosts a:2 --launcher horovodrun-gloo --forward A --"
        " python -m ringtrain.train --config tuned.toml"
    )
    told = ["--model.name", "cnn", "--hvd.groups", "2"]
    outcome = candidates.Outcome("groups", best, (1.1, 1.2, 1.3), "failed: in\ntwo lines")
    file = tmp_path / "tuned.toml"
    file.write_text(tune_cli.toml(best, told, line, [outcome]))
    assert line in file.read_text() and "1.200 (1.120 to 1.280)" in file.read_text()
    config = config_io.read_toml(file)
    assert config == config_io.read([*told, "--hvd.groups", "4", "--hvd.cycle-time-ms", "2.5"])
    with pytest.raises(ConfigError):
        tune_cli.toml(Choice({"hvd.groups": -1}), told, line, [])


def test_the_line_to_launch_repeats_the_options_that_were_given():
    words = ["-np", "2", "-H", "a:1,b:1", "--forward", "X", "--forward", "Y", "--oversubscribe", "--grace", "3"]
    words += ["--blacklist-cooldown", "1", "2", "--launcher", "mpirun"]
    _, given = cli.parse(["launch", *words, "true"])
    again = words_of(options_of(*GROUPS), given.values)
    assert "--hosts" in again and "--launcher" not in again, "what is at its default is not repeated"
    _, repeated = cli.parse(["launch", *again, "true"])
    assert LaunchOptions.of(repeated) == LaunchOptions.of(given)
    assert words_of(options_of(*GROUPS), {}) == []


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_budgets(text, seconds):
    assert opt.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-5m", "nan", "5 minutes"])
def test_bad_budgets(text):
    with pytest.raises(LaunchError, match="--budget"):
        opt.seconds_of(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "grups"], "got --only grups: did you mean groups?"),
        (["--budget", "soon"], "got --budget soon, expected a time such as 90s"),
        (["--dry-run"], "tune runs what it measures: leave out --dry-run"),
        (["--", "--train.epoch", "3"], "did you mean --train.epochs?"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(words, said, capsys):
    assert cli.main(["tune", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
