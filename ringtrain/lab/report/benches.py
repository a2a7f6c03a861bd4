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
        bench, machine, results = str(record["bench"]), dict(record["machine"]), record["results"]
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
    single, parts = [], []
    items = value.items() if isinstance(value, Mapping) else [(str(place), one) for place, one in enumerate(value)]
    for name, inner in [*items] if not _is_leaf(value) else [("", value)]:
        told = " ".join(filter(None, (title, _words(name))))
        if _is_leaf(inner):
            single.append((_words(name), _text(name or title, inner)))
        elif rows := _rows(inner):
            head = list(dict.fromkeys(key for _, row in rows for key in row))
            cells = [[told_row, *(_text(key, row.get(key)) for key in head)] for told_row, row in rows]
            parts += [Table(["", *map(_words, head)], cells, told), *_charts(told, rows)]
        else:
            unit = name if _unit(name) else ""
            flat = isinstance(inner, Mapping) and all(map(_is_leaf, inner.values()))
            if flat:
                single += [(f"{_words(name)}: {_words(key)}", _text(unit or key, one)) for key, one in inner.items()]
            else:
                parts += _parts(told, inner)
    return [*([Table(["", "median (p10 to p90)"], single, title)] if single else []), *parts]


def _rows(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of a table if all entries are mappings of single values with few columns; else empty."""
    if isinstance(value, Mapping):
        rows = [(str(name), inner) for name, inner in value.items()]
    else:
        rows = [
            (str(one.get("name", place)) if isinstance(one, Mapping) else "", one) for place, one in enumerate(value)
        ]
    alike = all(isinstance(row, Mapping) and not _is_leaf(row) and all(map(_is_leaf, row.values())) for _, row in rows)
    return rows if rows and alike and max(len(row) for _, row in rows) <= MAX_CELLS else []


def _charts(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Part]:
    found: list[Part] = []
    fast = [(name, row, _value(row.get("images_per_s"))) for name, row in rows]
    known = [(name, row, value) for name, row, value in fast if value is not None]
    ranks = [row.get("num_ranks", row.get("ranks")) for _, row, _ in known]
    if len(known) > 1 and all(isinstance(one, int) for one in ranks) and len({*ranks}) == len(ranks):
        points = sorted(zip(ranks, (value for _, _, value in known), strict=True))
        found.append(Chart(f"{title}, images/s", "ranks", [Line("measured", points)], from_zero=True))
    elif len(known) > 1:
        found.append(Bars(f"{title}, images/s", ["images/s"], [(name, [value]) for name, _, value in known]))
    return found


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.keys() >= SPREAD
    return not isinstance(value, list) or all(isinstance(one, int | float | str) for one in value)


def _value(value: Any) -> float | None:
    if isinstance(value, Mapping):
        return value.get("median")
    if isinstance(value, list):
        return statistics.median(value) if value and all(isinstance(one, int | float) for one in value) else None
    return value if isinstance(value, int | float) else None


def _unit(name: str) -> str:
    return "s" if name.endswith("_s") and not name.endswith("_per_s") else ""


def _words(name: str) -> str:
    return name.removesuffix("_s" if _unit(name) else "").replace("_per_s", "/s").replace("_", " ")


def _text(name: str, value: Any) -> str:
    middle = _value(value)
    if value is None or middle is None or isinstance(value, bool):
        return "" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    factor, unit = (1e3, " ms") if _unit(name) and abs(middle) < 1 else (1.0, f" {_unit(name)}".rstrip())
    text = number(factor * middle) + unit
    if isinstance(value, Mapping):
        text += f" ({number(factor * value['p10'])} to {number(factor * value['p90'])})"
    return text
