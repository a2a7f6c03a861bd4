"""The configuration: file, command line, errors in one line, derived numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringtrain.config import combinations, files
from ringtrain.config.derived import derive, without_effect
from ringtrain.config.sections import (
    DEFAULTS,
    Config,
    HvdConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    option_types,
    with_values,
)
from ringtrain.errors import ConfigError


def test_command_line_wins_over_file_wins_over_defaults(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("seed = 3\n[train]\nepochs = 5\nbatch_size = 7\n[optimizer]\nlearning_rate = 1\n")
    config = files.read(["--config", str(file), "--train.epochs", "9", "--device.share-gpus"])
    assert (config.seed, config.train.epochs, config.train.batch_size) == (3, 9, 7)
    assert config.optimizer.learning_rate == 1.0 and isinstance(config.optimizer.learning_rate, float)
    assert config.device.share_gpus
    assert config.model == Config().model


def test_toml_gives_back_the_same_configuration(tmp_path):
    options = ["--optimizer.learning-rate", "3e-7", "--schedule.milestones", "3", "4.5", "--device.share-gpus"]
    config = files.read(["--run.name", 'quo"te \\ é', *options])
    assert config.schedule.milestones == (3.0, 4.5)
    file = tmp_path / "config.toml"
    file.write_text(files.to_toml(config), encoding="utf-8")
    assert files.read_toml(file) == config
    assert files.read(["--config", str(file)]) == config


BAD_FILES = {
    "[train]\nepoch = 3": "unknown key train.epoch: did you mean train.epochs?",
    "sede = 3": "unknown key sede: did you mean seed?",
    "[train]\nepochs = 'many'": "train.epochs: got 'many', expected int",
    "[train]\nepochs = true": "train.epochs: got True, expected int",
    "[optimizer]\nlearning_rate = true": "optimizer.learning_rate: got True, expected float",
    "[optimizer]\nname = 'sdg'": "optimizer.name: got 'sdg', expected one of sgd, adam, adamw, lamb, lars",
    "[device]\nshare_gpus = 1": "device.share_gpus: got 1, expected bool",
    "train = 3": "train: got 3, expected a table: [train]",
    "[train]\nepochs = 0": "train.epochs: got 0, expected 1 or more",
    "[run]\nname = 'a/b'": "run.name: got a/b, expected a name, not a path",
    "[train]\nepochs = 2\n[schedule]\nwarmup_epochs = 2.5": (
        "schedule.warmup_epochs: got 2.5, expected no more than train.epochs (2)"
    ),
    "[train]\nwarmup_epochs = 3": "unknown key train.warmup_epochs: did you mean schedule.warmup_epochs?",
    "[schedule]\nname = 'steps'": "schedule.name: steps needs schedule.milestones: give epochs such as 30 60 80",
    "[schedule]\nmilestones = 3": "schedule.milestones: got 3, expected a list of numbers",
    "[schedule]\nmilestones = [6, 3]": "schedule.milestones: got (6.0, 3.0), expected epochs above 0, each after the",
    "[schedule]\nname = 'steps'\nmilestones = [2]\nwarmup_epochs = 3": (
        "schedule.milestones: got 2, expected none within the warm-up (schedule.warmup_epochs 3)"
    ),
    "[schedule]\nwarmup_epochs = inf": "schedule.warmup_epochs: got inf, expected a number from 0 on",
    "[model]\nlabel_smoothing = 1": "model.label_smoothing: got 1.0, expected 0 up to 1, 1 excluded",
    "[model]\nsplit = 'layers:1'": "model.split: got layers:1, expected layers:2, columns:2, ...",
    "[model]\nmicro_batches = 8\n[train]\nbatch_size = 4": "model.micro_batches: got 8, expected no more than ",
    "[train]\nvirtual_ranks = 3": "train.virtual_ranks: got 3, expected 0, or 1, 2, 4, ... up to 4096",
    "[schedule]\npower = nan": "schedule.power: got nan, expected a number above 0",
    "[train": "not TOML: ",
}


VALUES = {
    "hvd.op": "adasum",
    "hvd.compression": "powersgd:2",
    "model.split": "layers:2",
    "model.loss": "mse",
    "model.label_smoothing": 0.1,
}


@pytest.mark.parametrize("first", combinations.NOT_TOGETHER)
def test_options_that_do_not_go_together_are_refused_in_either_order(first):
    def value_for(condition: str) -> dict[str, Any]:
        option, _, word = condition.partition(" ")
        if option not in option_types():
            return {}  # a fact
        values = {"ps": "ps-sync", "powersgd": "powersgd:2"}
        value = values.get(word, word) or VALUES.get(option, {bool: True}.get(option_types().get(option), 2))
        return {option: value}

    for other in combinations.NOT_TOGETHER[first]:
        of_first, of_other = value_for(first), value_for(other)
        with_values(Config(), of_first)
        with_values(Config(), of_other)
        if of_first and of_other:
            with pytest.raises(ConfigError, match="do not go together: leave one out"):
                with_values(Config(), of_other | of_first)
            continue
        assert other in combinations.ADVICE or of_other
        config, facts = with_values(Config(), of_other | of_first), {first, other}
        combinations.check(with_values(Config(), of_other), DEFAULTS, {other})
        combinations.check(with_values(Config(), of_first), DEFAULTS, {first})
        words = f"^{first.partition(' ')[0]}.* and {other.partition(' ')[0]}.* do not go together"
        with pytest.raises(ConfigError, match=words):
            combinations.check(config, DEFAULTS, facts - option_types().keys())


@pytest.mark.parametrize("text", BAD_FILES)
def test_file_errors_name_file_and_key_in_one_line(tmp_path, text):
    file = tmp_path / "x.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        files.read(["--config", str(file)])
    assert str(error.value).startswith(f"{file}: {BAD_FILES[text]}")
    assert "\n" not in str(error.value)


def test_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        files.read(["--config", str(tmp_path / "none.toml")])
    with pytest.raises(
        ConfigError, match="No such file or directory: this recipe is in a clone of ringtrain; ringtrain init"
    ):
        files.read(["--config", "configs/none.toml"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        files.read(["--config", str(tmp_path)])
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe9"')
    with pytest.raises(ConfigError, match="not TOML"):
        files.read(["--config", str(tmp_path / "latin.toml")])


BAD_LINES = {
    "--train.epoch 3": "unknown option --train.epoch: did you mean --train.epochs?",
    "--train.batch_sise 3": "unknown option --train.batch_sise: did you mean --train.batch-size?",
    "configs/digits.toml": "got 'configs/digits.toml', expected options such as",
    "--train.epochs many": "argument --train.epochs: invalid int value: 'many'",
    "--train.epochs": "argument --train.epochs: expected one argument",
    "--train.warmup-epochs 3": "unknown option --train.warmup-epochs: did you mean --schedule.warmup-epochs?",
    "--optimizer.name sdg": "argument --optimizer.name: invalid choice: 'sdg'",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_command_line_errors_are_one_line(line, capfd):
    with pytest.raises(ConfigError) as error:
        files.read(line.split())
    assert str(error.value).startswith(f"command line: {BAD_LINES[line]}")
    assert not {"\n", "\x1b"} & set(str(error.value))
    assert capfd.readouterr() == ("", "")


def test_the_range_of_a_value_on_the_command_line_is_checked():
    with pytest.raises(ConfigError, match=r"^train.epochs: got -3, expected 1 or more$"):
        files.read(["--train.epochs", "-3"])


def test_an_option_may_be_spelled_as_in_a_file():
    for text in ("--train.batch_size 8", "--train.batch-size 8", "--train.batch_size=8"):
        config = files.read([*text.split(), "--data.no_augment", "--device.no-memory-growth"])
        assert config.train.batch_size == 8
        assert not config.data.augment and not config.device.memory_growth


def test_the_last_of_several_values_holds_and_a_list_may_be_empty(tmp_path):
    assert files.read(["--train.epochs", "2", "--train.epochs", "3"]).train.epochs == 3
    file = tmp_path / "x.toml"
    file.write_text("[schedule]\nname = 'steps'\nmilestones = [2, 3]\n")
    words = ["--config", str(file), "--schedule.name", "constant", "--schedule.milestones"]
    assert files.read(words).schedule.milestones == ()
    for given in (["4", "5"], ["4", "5", "--"]):
        assert files.read([*words, *given]).schedule.milestones == (4.0, 5.0)
    words[-1:] = ["--schedule.milestones=4", "5"]
    assert files.read(words).schedule.milestones == (4.0, 5.0)
    with pytest.raises(ConfigError, match="got 'more', expected options"):
        files.read(["--train.epochs", "3", "--", "more"])


def test_derived_numbers():
    config = Config(train=TrainConfig(epochs=3, batch_size=32), schedule=ScheduleConfig(warmup_epochs=2))
    numbers = derive(config, num_ranks=2, num_train=1437, num_test=360)
    assert numbers.global_batch_size == 64
    assert (numbers.steps_per_epoch, numbers.num_steps, numbers.warmup_steps) == (23, 69, 46)
    assert numbers.learning_rate == pytest.approx(2**0.5 * config.optimizer.learning_rate)
    for scaling, reference, factor in (("none", 32, 1), ("sqrt", 16, 2), ("linear", 16, 4), ("linear", 128, 0.5)):
        optimizer = OptimizerConfig(learning_rate_scaling=scaling, reference_batch_size=reference)
        other = derive(dataclasses.replace(config, optimizer=optimizer), 2, 1437, 360)
        assert other.learning_rate == pytest.approx(factor * optimizer.learning_rate)
        assert other.initial_learning_rate == pytest.approx(min(1, factor) * optimizer.learning_rate)


@pytest.mark.parametrize(("name", "factor"), [("adam", 8), ("adamw", 8), ("lamb", 8), ("sgd", 64), ("lars", 64)])
def test_the_default_scaling_on_64_ranks_is_the_optimizers(name, factor):
    config = Config(optimizer=OptimizerConfig(name=name, learning_rate=0.001))
    assert derive(config, 64, 10_000, 10).learning_rate == pytest.approx(0.001 * factor)
    optimizer = dataclasses.replace(config.optimizer, learning_rate_scaling="linear")
    linear = dataclasses.replace(config, optimizer=optimizer)
    assert derive(linear, 64, 10_000, 10).learning_rate == pytest.approx(0.064)
    # Adasum makes the step of N ranks by itself: what counts is one rank's batch, here 2 x 64 samples of 32.
    adasum = dataclasses.replace(
        config,
        hvd=HvdConfig(op="adasum"),
        optimizer=dataclasses.replace(config.optimizer, accumulation_steps=2),
        train=TrainConfig(batch_size=64),
    )
    for num_ranks in (1, 4, 64):
        expected = {8: 2, 64: 4}[factor] * 0.001
        assert derive(adasum, num_ranks, 10_000, 10).learning_rate == pytest.approx(expected)


def test_what_has_no_effect_is_said():
    assert without_effect(Config()) == []
    config = Config(
        optimizer=OptimizerConfig(name="adamw", nesterov=True, trust_coefficient=0.1, learning_rate_scaling="none"),
        schedule=ScheduleConfig(warmup_start=0.5, milestones=(3.0,), end_factor=0.5, power=2.0, factor=0.2),
    )
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, reference_batch_size=256))
    assert [sentence.partition(" has no effect: it needs ")[0] for sentence in without_effect(config)] == [
        *("optimizer.reference_batch_size", "optimizer.nesterov", "optimizer.trust_coefficient"),
        *("schedule.warmup_start", "schedule.milestones", "schedule.factor", "schedule.end_factor", "schedule.power"),
        "optimizer.name adamw without optimizer.weight_decay is adam",
    ]
    late = Config(train=TrainConfig(epochs=5), schedule=ScheduleConfig(name="steps", milestones=(3.0, 5.0, 7.5)))
    assert without_effect(late) == ["schedule.milestones 5 7.5: the run ends after epoch 5"]
