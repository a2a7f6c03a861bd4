"""Number of a job's attempt, and exit causes of earlier attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ringtrain.protocol.env import ATTEMPT
from ringtrain.protocol.json_text import INVALID, parse_json


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a job, as its ranks see it."""

    number: int = 0
    """number of earlier attempts"""
    causes: tuple[str, ...] = ()
    """exit cause of each earlier attempt, a line each"""
    run_name: str = ""
    """of the first run of the first attempt's process; "": not known yet"""
    num_ranks: int = 0
    """of the first attempt; 0: the current number"""
    job: str = ""
    """ID that all attempts of a job have in common; "": no launcher has started it"""
    grace_s: float = 0.0
    """seconds after a signal at which the launcher kills the ranks (--grace); 0: not known"""
    launched_s: float = 0.0
    """Unix time at which the job was launched, before its first attempt; 0: not known"""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Attempt:
        """Attempt from the environment; a first one if RINGTRAIN_ATTEMPT is unset or invalid."""
        try:
            fields = parse_json(environ.get(ATTEMPT, "{}"))
            return cls(
                number=int(fields.get("number", 0)),
                causes=tuple(str(cause) for cause in fields.get("causes", ())),
                run_name=str(fields.get("run_name", "")),
                num_ranks=int(fields.get("num_ranks", 0)),
                job=str(fields.get("job", "")),
                grace_s=float(fields.get("grace_s", 0.0)),
                launched_s=float(fields.get("launched_s", 0.0)),
            )
        except INVALID:
            return cls()
