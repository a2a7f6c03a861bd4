"""Files written by ringtrain bench --out as tables and charts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.errors import LaunchError
from ringtrain.lab.report.charts import Bars, Chart, Line, number
from ringtrain.lab.report.html import Part, Section
from ringtrain.lab.tables import Table
from ringtrain.protocol.json_text import INVALID, parse_json

SPREAD = {"median", "p10", "p90"}
MAX_CELLS = 12
"""maximum number of columns; wider results become rows"""


def read(path: Path) -> Section:
    """Reads the results of a bench as a section."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        bench = str(record["bench"])
        machine = dict(record["machine"])
        results = record["results"]
        when = time.strftime("%Y-%m-%d", time.localtime(record.get("time_s", 0)))
        where = f"{when}, {machine.get('host', '?')}: {machine.get('cores', '?')} cores, {machine.get('cpu') or '?'}"
        versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        return Section(f"bench {bench}: {path.name}", [f"{where}; {versions}", *_parts("", results)])
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error
    except INVALID as error:
        raise LaunchError(f"{path}: expected a file that ringtrain bench --out wrote, or a run's folder") from error


def _parts(title: str, value: Any) -> list[Part]:
    """Converts nested plain values to tables: alike entries share columns, all others get a row each."""
    if isinstance(value, Mapping):
        entries = list(value.items())
    else:
        entries = [(str(index), entry) for index, entry in enumerate(value)]
    if _is_leaf(value):
        entries = [("", value)]
    singles: list[list[str]] = []
    parts: list[Part] = []
    for name, entry in entries:
        heading = " ".join(filter(None, (title, _words(name))))
        if _is_leaf(entry):
            singles.append([_words(name), _text(name or title, entry)])
            continue
        rows = _rows(entry)
        if rows:
            parts.append(_table(heading, rows))
            parts += _charts(heading, rows)
        elif isinstance(entry, Mapping) and all(map(_is_leaf, entry.values())):
            for key, leaf in entry.items():
                # The name of the whole tells the unit of all, if it has one.
                unit_name = name if _is_time(name) else key
                singles.append([f"{_words(name)}: {_words(key)}", _text(unit_name, leaf)])
        else:
            parts += _parts(heading, entry)
    if singles:
        parts.insert(0, Table(["", "median (p10 to p90)"], singles, title))
    return parts


def _rows(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of a table if all entries are mappings of single values with few columns; else empty."""
    rows: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        rows += value.items()
    else:
        for index, entry in enumerate(value):
            name = ""
            if isinstance(entry, Mapping):
                name = str(entry.get("name", index))
            rows.append((name, entry))
    if all(_is_row(entry) for _, entry in rows):
        return rows
    return []


def _is_row(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or _is_leaf(entry):
        return False
    return len(entry) <= MAX_CELLS and all(map(_is_leaf, entry.values()))


def _table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    keys: dict[str, None] = {}
    for _, row in rows:
        keys |= dict.fromkeys(row)
    cells = []
    for name, row in rows:
        cells.append([name, *(_text(key, row.get(key)) for key in keys)])
    return Table(["", *map(_words, keys)], cells, title)


def _charts(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Part]:
    """Chart of the speed over the number of ranks, or a bar per row if the rows do not differ in it."""
    names: list[str] = []
    ranks: list[Any] = []
    speeds: list[float] = []
    for name, row in rows:
        speed = _median(row.get("images_per_s"))
        if speed is not None:
            names.append(name)
            ranks.append(row.get("num_ranks", row.get("ranks")))
            speeds.append(speed)
    if len(speeds) < 2:
        return []
    title = f"{title}, images/s"
    if all(isinstance(num_ranks, int) for num_ranks in ranks) and len(set(ranks)) == len(ranks):
        points = sorted(zip(ranks, speeds, strict=True))
        return [Chart(title, "ranks", [Line("measured", points)], from_zero=True)]
    return [Bars(title, ["images/s"], [(name, [speed]) for name, speed in zip(names, speeds, strict=True)])]


def _is_leaf(value: Any) -> bool:
    """True for what fits into one cell: a single value, a spread of measured values, or a list of single values."""
    if isinstance(value, Mapping):
        return value.keys() >= SPREAD
    if isinstance(value, list):
        return all(isinstance(entry, int | float | str) for entry in value)
    return True


def _median(value: Any) -> float | None:
    if isinstance(value, Mapping):
        return value.get("median")
    numbers = value if isinstance(value, list) else [value]
    if numbers and all(isinstance(entry, int | float) for entry in numbers):
        return statistics.median(numbers)
    return None


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _words(name: str) -> str:
    if _is_time(name):
        name = name.removesuffix("_s")
    return name.replace("_per_s", "/s").replace("_", " ")


def _text(name: str, value: Any) -> str:
    """Formats the value of a leaf with its unit, which its name tells."""
    if value is None:
        return ""
    median = _median(value)
    if isinstance(value, list) and median is None:
        return ", ".join(map(str, value))
    if isinstance(value, bool) or median is None:
        return str(value)
    factor, unit = 1.0, ""
    if _is_time(name):
        unit = " s"
    if _is_time(name) and abs(median) < 1:
        factor, unit = 1e3, " ms"
    text = number(factor * median) + unit
    if isinstance(value, Mapping):
        text += f" ({number(factor * value['p10'])} to {number(factor * value['p90'])})"
    return text
