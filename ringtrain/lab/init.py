"""ringtrain init: writes a commented configuration and a small job file, which train as they are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ringtrain.config import files, help_texts
from ringtrain.config.options import Argument
from ringtrain.config.sections import Config
from ringtrain.errors import RunDirectoryError

CONFIG, JOB = "config.toml", "job.py"
FIRST_JOB = Path(__file__).with_name("first_job.py")
VALUES: Mapping[str, Any] = {"data.name": "job:data", "model.name": "job:model", "train.epochs": 15}
"""options that the configuration sets; the other common ones stand in it as comments"""
HEAD = f"""\
# Configuration of the job in {JOB}. To train, in this folder:
#   ringtrain train --config {CONFIG}              in one process
#   ringtrain train -np 2 --config {CONFIG}        on two ranks
# The command line wins over this file: --train.epochs 20. All options: ringtrain train --help all
"""


@dataclass(frozen=True)
class InitOptions:
    """InitOptions of the command."""

    folder: Annotated[str, Argument("FOLDER", is_positional=True)] = "."
    """folder for both files, created if missing"""


def main(options: InitOptions) -> int:
    """Writes both files, or neither if one exists."""
    folder = Path(options.folder)
    texts = {folder / CONFIG: config_text(), folder / JOB: FIRST_JOB.read_text(encoding="utf-8")}
    for path in texts:
        if path.exists():
            raise RunDirectoryError(f"{path}: exists already: give another folder, or remove the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
            print(path)
    except OSError as error:
        raise RunDirectoryError(f"{folder}: cannot be written: {error.strerror}: give another folder") from error
    print(f"to train on two ranks, in {folder}:\n  ringtrain train -np 2 --config {CONFIG}")
    return 0


def config_text() -> str:
    """Commented TOML of the common options; those of VALUES are set, the others are comments with their defaults."""
    return "\n".join([HEAD, *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    texts, section, default = help_texts.texts(), "", Config()
    for option in sorted(help_texts.COMMON, key=list(texts).index):
        table, _, key = option.rpartition(".")
        if table != section:
            if section:
                yield ""
            yield f"[{table}]"
            section = table
        yield from textwrap.wrap(texts[option], 110, initial_indent="# ", subsequent_indent="# ")
        if option in VALUES:
            yield f"{key} = {files.toml_value(VALUES[option])}"
        else:
            yield f"# {key} = {files.toml_value(files.value_of(default, option))}"
