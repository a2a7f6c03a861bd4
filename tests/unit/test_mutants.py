"""The table of tests/support/mutants.py fits the current code and tests."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from launching import ROOT

sys.path.append(str(ROOT / "tests" / "support"))
from mutants import MUTANTS


def test_every_mutant_can_be_made_and_names_a_test_that_there_is(tmp_path: Path) -> None:
    for one in MUTANTS:
        path = tmp_path / "ringtrain" / one.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / "ringtrain" / one.file).read_text())
        one.apply(tmp_path)
        file, _, test = one.test.partition("::")
        source, properties = ROOT / file, ROOT / "tests" / "ring" / "properties"
        name, _, case = test.partition("[")
        if name == "test_property":
            module, _, name = case.rstrip("]").rpartition("-")[2].partition(".")
            source = properties / f"{module}.py"
        functions = {node.name for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, one.line
    assert len({one.claim for one in MUTANTS}) == len(MUTANTS)
