"""What a command of ringtrain tells the scripts that it starts, such as options of `ringtrain.fit`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ringtrain.errors import ConfigError
from ringtrain.protocol.env import FOR_SCRIPT
from ringtrain.protocol.json_text import INVALID, parse_json


@dataclass(frozen=True, kw_only=True)
class ForScript:
    """Content of RINGTRAIN_FOR_SCRIPT, which every rank of the script has."""

    by: str = ""
    """command that has chosen it, such as "ringtrain sweep"; "": nothing was chosen"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """options of `ringtrain.fit` by dotted name, which win over the script's own"""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

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
