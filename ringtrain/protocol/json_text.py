"""JSON from files and other processes, where anything may stand. Standard library only."""

from __future__ import annotations

import json
from typing import Any

INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""exceptions of reading fields out of a parsed value that holds something else"""


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text.

    Raises:
        ValueError: it is not JSON, nested too deeply to be read, or holds an integer of more than 64 bits.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"got an integer of {len(digits)} digits, expected at most 64 bits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
