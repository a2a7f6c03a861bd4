"""Help by section and completion in the shell: all say what config/sections.py says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain import cli
from ringtrain.config import files, help_texts
from ringtrain.config.sections import Config, changed_options, option_types, value_of
from ringtrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Help of the trainer."""
    with pytest.raises(SystemExit) as end:
        files.read(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> list[str]:
    """Options that a help text lists, without the negative forms."""
    return list(re.findall(r"^  (--?[\w.-]+)", text, re.MULTILINE))


def flag_of(option: str) -> str:
    return f"--{option.replace('_', '-')}"


# ---- help -----------------------------------------------------------------------------------------------------------


def test_each_section_has_its_options_and_all_sections_have_all(capsys: pytest.CaptureFixture[str]) -> None:
    options: list[str] = []
    for section in help_texts.sections():
        text = shown(capsys, "--train.epochs", "3", "--help", section)
        prefix = "" if section == help_texts.GENERAL else section
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
    assert files.read(words) == Config()
    assert changed_options(files.read([*words, "--train.jit", "--data.no-augment"])) == {
        **{"data.augment": False, "train.jit": True},
    }


def test_a_word_that_is_no_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--help optimiser: no section of the configuration: did you mean opt"):
        files.read(["--help", "optimiser"])
    assert cli.main(["train", "-np", "2", "--help", "optimiser"]) == 2
    assert capsys.readouterr().err.startswith("ringtrain: --help optimiser: no section")


def test_values_of_a_file_are_shown_as_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text("[train]\nepochs = 77\n")
    assert "(default: 77)" in shown(capsys, "--config", str(tmp_path / "mine.toml"), "--help")
    assert "(default: 77)" not in shown(capsys, "--help")
    assert cli.main(["train", "-np", "2", "--config", str(tmp_path / "mine.toml"), "--help"]) == 0
    assert "(default: 77)" in capsys.readouterr().out


# ---- completion -----------------------------------------------------------------------------------------------------

COMPLETED = {
    "tr": ["train "],
    "train --train.e": ["--train.epochs "],
    "train -np 2 --optimizer.name la": ["lamb", "lars"],
    "train --help da": ["data "],
    "train --schedule.warmup-": ["--schedule.warmup-epochs", "--schedule.warmup-start"],
    "launch --launcher mp": ["mpirun", "mpijob"],
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
    assert BASH.splitlines()[1] in (ROOT / "docs" / "installation.md").read_text()
