"""Help by section, completion in the shell and the JSON schema: all say what config.py says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ringtrain import cli, config_help, config_io
from ringtrain.config import RULES, Config, changed_options, option_types, value_of
from ringtrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Help of the trainer."""
    with pytest.raises(SystemExit) as end:
        config_io.read(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> list[str]:
    """Options that a help text lists, without the negative forms."""
    return list(re.findall(r"^  (--?[\w.-]+)", text, re.MULTILINE))


def flag_of(option: str) -> str:
    return f"--{option.replace('_', '-')}"


# ---- help -----------------------------------------------------------------------------------------------------------


def test_the_common_options_come_first_and_sections_follow(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    assert len(config_help.COMMON) == 10
    assert flags(text) == ["--config", *map(flag_of, config_help.COMMON)]
    listed = re.findall(r"^  (\w+) {2,}\S", text.partition("sections:")[2], re.MULTILINE)
    assert listed == [*config_help.sections()]
    assert text.index("common options:") < text.index("sections:")


def test_each_section_has_its_options_and_all_sections_have_all(capsys: pytest.CaptureFixture[str]) -> None:
    options: list[str] = []
    for section in config_help.sections():
        text = shown(capsys, "--train.epochs", "3", "--help", section)
        prefix = "" if section == config_help.GENERAL else section
        assert flags(text) == [flag_of(name) for name in option_types() if name.rpartition(".")[0] == prefix]
        options += flags(text)
    assert sorted(options) == sorted(map(flag_of, option_types()))
    assert sorted(flags(shown(capsys, "--help", "all"))) == sorted(options)


def test_every_option_of_the_help_is_read_and_its_default_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    words: list[str] = []
    for option, kind in option_types().items():
        value = value_of(Config(), option)
        if kind is bool:
            section, _, key = flag_of(option)[2:].rpartition(".")
            words.append(f"--{section}.{'' if value else 'no-'}{key}")
            assert f"--{section}.{key}, --{section}.no-{key}" in shown(capsys, "--help", "all")
        else:
            words += [flag_of(option), *([] if value == () else [str(value)])]
    assert config_io.read(words) == Config()
    assert changed_options(config_io.read([*words, "--train.jit", "--data.no-augment"])) == {
        **{"data.augment": False, "train.jit": True},
    }


def test_a_word_that_is_no_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--help optimiser: no section of the configuration: did you mean opt"):
        config_io.read(["--help", "optimiser"])
    assert cli.main(["train", "-np", "2", "--help", "optimiser"]) == 2
    assert capsys.readouterr().err.startswith("ringtrain: --help optimiser: no section")


def test_values_of_a_file_are_shown_as_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text("[train]\nepochs = 77\n")
    assert "(default: 77)" in shown(capsys, "--config", str(tmp_path / "mine.toml"), "--help")
    assert "(default: 77)" not in shown(capsys, "--help")
    assert cli.main(["train", "-np", "2", "--config", str(tmp_path / "mine.toml"), "--help"]) == 0
    assert "(default: 77)" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["--help", "all"]])
def test_help_is_as_wide_as_the_terminal(words, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # A flag with its choices has a line of its own, which argparse does not break.
    assert max(len(line) for line in shown(capsys, *words).splitlines() if not line.startswith("  --")) <= 80


def test_train_shows_the_trainers_options_before_those_of_launch(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-np", "2", "-h"], ["--config", str(ROOT / "configs" / "digits.toml"), "--help"]):
        assert cli.main(["train", *words]) == 0
        text = capsys.readouterr().out
        assert text.index("--data.name") < text.index("-np N") < text.index("sections:")
        assert "--spark-conf" not in text
    assert cli.main(["train", "--help", "schedule"]) == 0
    assert flags(capsys.readouterr().out)[0] == "--schedule.name"


OWN = {"sweep": "space", "bench train": "turns", "bench allreduce": "out"}


@pytest.mark.parametrize("command", OWN)
def test_own_options_come_before_those_of_launch(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    own, launch = text.split("\noptions of ringtrain launch:\n")
    assert f"  --{OWN[command]} " in own and "  --hostfile" not in own
    assert "  --hostfile" in launch and f"  --{OWN[command]} " not in launch


# ---- completion -----------------------------------------------------------------------------------------------------

COMPLETED = {
    "tr": ["train "],
    "train --train.e": ["--train.epochs "],
    "train -np 2 --optimizer.name la": ["lamb", "lars"],
    "train --help da": ["data "],
    "train --schedule.warmup-": ["--schedule.warmup-epochs", "--schedule.warmup-start"],
    "launch --launcher mp": ["mpirun", "mpijob"],
    "sweep --ob": ["--objective "],
    "bench al": ["allreduce "],
    "report --po": ["--post-mortem "],
    "nonsense --x": [],
}
BASH = """
eval "$(register-python-argcomplete ringtrain)"
while read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete ringtrain
    printf '%s|' "${COMPREPLY[@]}"
    echo
done
"""


def test_bash_completes_commands_options_and_values() -> None:
    """In a real bash, with the line of the documentation."""
    lines = "".join(f"ringtrain {line}\n" for line in COMPLETED)
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["bash", "-c", BASH], input=lines, env=env, capture_output=True, text=True, check=True)
    answers = [[word for word in line.split("|") if word] for line in ended.stdout.splitlines()]
    assert dict(zip(COMPLETED, answers, strict=True)) == COMPLETED, ended.stderr


def test_the_documented_line_is_the_one_that_was_tested() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    assert BASH.splitlines()[1] in page


# ---- JSON schema ----------------------------------------------------------------------------------------------------


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether JSON schema allows a value: the keywords that ours has."""
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "object": dict}
    checks = {
        "type": lambda kind: isinstance(value, kinds[kind]) and isinstance(value, bool) == (kind == "boolean"),
        "enum": lambda allowed: value in allowed,
        "const": lambda only: value == only,
        "minimum": lambda least: value >= least,
        "maximum": lambda most: value <= most,
        "exclusiveMinimum": lambda below: value > below,
        "exclusiveMaximum": lambda above: value < above,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "items": lambda inner: all(valid(one, inner) for one in value),
        "uniqueItems": lambda _: len({*value}) == len(value),
        "anyOf": lambda several: any(valid(value, one) for one in several),
        "properties": lambda known: all(valid(value[key], known[key]) for key in value if key in known),
        "additionalProperties": lambda allowed: allowed or value.keys() <= schema["properties"].keys(),
        **dict.fromkeys(("description", "default", "$schema"), lambda _: True),
    }
    return all(checks[keyword](setting) for keyword, setting in schema.items())


def schema_of(option: str) -> dict[str, Any]:
    schema = config_help.schema()
    for key in option.split("."):
        schema = schema["properties"][key]
    return schema


def test_the_schema_is_printed_and_has_every_option_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == config_help.schema()
    names = [
        f"{section}.{key}" if "properties" in table else section
        for section, table in schema["properties"].items()
        for key in table.get("properties", [""])
    ]
    assert sorted(names) == sorted(option_types())
    for option in option_types():
        found, value = schema_of(option), value_of(Config(), option)
        assert found["description"].startswith(config_help.texts()[option]) and config_help.texts()[option]
        assert found["default"] == (list(value) if isinstance(value, tuple) else value)
        assert valid(found["default"], found)


PROBES = {
    int: [-2, -1, 0, 1, 2, 3, 4, 15, 16, 17, 2**32 - 1, 2**32],
    float: [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 4.0, 1e30],
    str: ["", ".", "..", "...", ".a", "a/b", "/", "a b", "cpu:0", "cpu:1", "gpu:0", "gpu:12", "gpu:", "gpu:x"],
}
LISTS = [[], [1.0], [1.0, 2.0], [0.0], [-1.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("option", RULES)
def test_limits_of_the_schema_are_those_of_the_rule(option: str) -> None:
    for value in PROBES.get(option_types()[option], LISTS):
        assert valid(value, schema_of(option)) == RULES[option].holds(value), (option, value)


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_recipes_are_valid_and_a_mistake_in_them_is_not(recipe: Path) -> None:
    tables, schema = tomllib.loads(recipe.read_text()), config_help.schema()
    assert valid(tables, schema)
    for section, key, value in (
        ("train", "epoch", 3),
        ("train", "epochs", "3"),
        ("hvd", "op", "sum"),
        ("trian", "", {}),
    ):
        wrong = {**tables, section: {**tables.get(section, {}), key: value} if key else value}
        assert not valid(wrong, schema), (section, key)


def test_the_first_configuration_names_the_schema() -> None:
    from ringtrain.lab.init import config_text

    (command,) = re.findall(r"(ringtrain schema) > schema.json", config_text())
    ended = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=ROOT, env={**os.environ}, capture_output=True, check=True
    )
    assert json.loads(ended.stdout) == config_help.schema()
