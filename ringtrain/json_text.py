"""JSON from files and other processes, where anything may stand. Standard library only."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
