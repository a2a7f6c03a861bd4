"""What a command of ringtrain tells the scripts that it starts, such as options of `ringtrain.fit`, or the trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ringtrain.errors import ConfigError, LaunchError
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.json_text import INVALID, parse_json

RUN = "fit-1"
"""name of the first run in a command's folder, if it has none of its own"""


@dataclass(frozen=True, kw_only=True)
class ForScript:
    """Content of RINGTRAIN_FOR_SCRIPT, which every rank of the script has."""

    by: str = ""
    """command that has chosen it, such as "ringtrain sweep"; "": nothing was chosen"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """options by dotted name, which win over the script's own"""
    trial: Mapping[str, Any] = field(default_factory=dict)
    """values that `ringtrain.trial` returns, by name"""
    folder: str = ""
    """directory of the script's runs, which are fit-1, fit-2, ... if they have no name, and of the files that Keras'
    callbacks write; "": those of the script"""
    epochs: int = 0
    """largest number of epochs of each `fit`; 0: as the script has it"""
    steps: int = 0
    """largest number of steps of an epoch; 0: as the script has it"""
    ranks: int = 0
    """number of ranks that `batch_per_rank` multiplies by; 0: of those that train"""
    observer: str = ""
    """module:function of the name of each `fit`, which returns a callback to add to it"""

    def write(self, path: Path, **facts: Any) -> None:
        """Writes a file for `ringtrain launch --tuned`; `facts`, such as measurements, are for its readers."""
        path.write_text(json.dumps({**asdict(self), **facts}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ForScript:
        """Reads a file. Raises LaunchError if it is not one that sweep has written."""
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            known = {one.name for one in fields(cls)}
            return cls(**{name: value for name, value in content.items() if name in known})
        except (OSError, *INVALID) as error:
            raise LaunchError(
                f"{path}: expected the file best.json that ringtrain sweep has written: {error}"
            ) from None

    def variables(self) -> dict[str, str]:
        """Environment variables with which ranks read it."""
        return {FOR_SCRIPT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ForScript:
        """Content of the variable; empty if it is unset. Raises ConfigError if it is invalid."""
        text = environ.get(FOR_SCRIPT, "{}")
        try:
            return cls(**parse_json(text))
        except INVALID as error:
            raise ConfigError(
                f"{FOR_SCRIPT}: got {text[:80]!r}, which no command of ringtrain has set: {error}"
            ) from error


def trial() -> Mapping[str, Any]:
    """Values that `ringtrain sweep` tries in this start of the script, by name; empty outside of a sweep.

    `ringtrain launch --tuned FILE` gives the values of the sweep's best trial, if FILE is its `best.json`.

    Returns:
        Read-only mapping of the names in the sweep's space to text, numbers or booleans.

    Example:
        >>> units = ringtrain.trial().get("units", 64)
    """
    return MappingProxyType(dict(ForScript.from_environment().trial))
