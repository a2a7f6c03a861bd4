"""The tables of tests/support/mutants.py and tests/fuzz/defects.py fit the current code and tests."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from launching import ROOT

sys.path += [str(ROOT / "tests" / folder) for folder in ("support", "fuzz")]
from defects import PLANTED
from mutants import MUTANTS


def test_every_mutant_and_planted_defect_can_be_made(tmp_path: Path) -> None:
    for one in (*MUTANTS, *PLANTED):
        path = tmp_path / "ringtrain" / one.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / "ringtrain" / one.file).read_text())
        one.apply(tmp_path)
    assert len({one.claim for one in MUTANTS}) == len(MUTANTS)


def test_every_mutant_names_a_test_that_there_is() -> None:
    for one in MUTANTS:
        file, _, test = one.test.partition("::")
        source, properties = ROOT / file, ROOT / "tests" / "ring" / "properties"
        name, _, case = test.partition("[")
        if name == "test_property":
            module, _, name = case.rstrip("]").rpartition("-")[2].partition(".")
            source = properties / f"{module}.py"
        functions = {node.name for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, one.line
