"""Which start of a job this is, and why earlier ones ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ringtrain.protocol.env import ATTEMPT
from ringtrain.protocol.json_text import INVALID, parse_json


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How often a job has been started, and what came of it."""

    number: int = 0
    """starts before this one"""
    causes: tuple[str, ...] = ()
    """why each of them ended, a line each"""
    run_name: str = ""
    """that the first start gave its run; empty: none was known yet"""
    num_ranks: int = 0
    """of the first start; 0: as many as now"""

    def to_json(self) -> str:
        """The attempt as text for the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Attempt:
        """What the launcher says; without one, or by another program's word: a first start."""
        try:
            fields = parse_json(environ.get(ATTEMPT, "{}"))
            causes = tuple(str(cause) for cause in fields.get("causes", ()))
            number, num_ranks = int(fields.get("number", 0)), int(fields.get("num_ranks", 0))
            return cls(number=number, causes=causes, run_name=str(fields.get("run_name", "")), num_ranks=num_ranks)
        except INVALID:
            return cls()
