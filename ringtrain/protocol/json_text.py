"""JSON from files and other processes, which may contain anything."""

from __future__ import annotations

import json
from typing import Any

INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""exceptions raised when fields are read from a parsed value of another shape"""


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text. Raises ValueError if it is invalid, nested too deeply, or has integers of over 64 bits."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Object of a JSON text; {} if it is invalid or another value."""
    try:
        value = parse_json(text)
    except INVALID:
        return {}
    return value if isinstance(value, dict) else {}


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"got an integer of {len(digits)} digits, expected at most 64 bits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
