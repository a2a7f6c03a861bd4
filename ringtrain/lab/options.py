"""Values of options that several commands of the lab have."""

from __future__ import annotations

from typing import Any

from ringtrain.errors import LaunchError
from ringtrain.options import options_of

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""seconds of a unit of time"""


def by_flag(options: Any) -> dict[str, Any]:
    """Values by flag, without the file of results."""
    known = options_of(type(options))
    return {known[name].flags[0]: value for name, value in vars(options).items() if name != "out"}


def seconds_of(text: str, option: str = "--budget") -> float:
    """Converts "300", "300s", "5m", "1h" or "30d" to seconds. option: For the message of an error."""
    number, factor = text, 1
    if text[-1:] in UNITS:
        number, factor = text[:-1], UNITS[text[-1]]
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"got {option} {text}, expected a time such as 90s, 5m, 1h or 30d")
    return seconds
