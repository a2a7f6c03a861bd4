"""docs/promises.md: few promises, each with a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+)\. .+ \| `(\w+)` \|$", re.MULTILINE)
MOST = 45


def test_each_promise_names_a_test() -> None:
    rows = ROW.findall((ROOT / "docs" / "promises.md").read_text())
    assert [int(number) for number, _ in rows] == [*range(1, len(rows) + 1)] and len(rows) <= MOST
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    missing = [name for _, name in rows if name != "fuzz" and f"def {name}(" not in tests]
    assert not missing
