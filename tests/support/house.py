"""Prints modules, statements and public names of each folder of ringtrain/; fails above the budgets of pyproject.toml.

python tests/support/house.py
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringtrain"


def num_public_names(tree: ast.Module) -> int:
    """Functions and classes of a module, and methods of these classes, whose names have no leading underscore."""
    count = 0
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else []
        for definition in (node, *members):
            if isinstance(definition, ast.FunctionDef | ast.ClassDef) and not definition.name.startswith("_"):
                count += 1
    return count


def main() -> int:
    modules: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        first, *rest = path.relative_to(PACKAGE).parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for folder in (first if rest else ".", "all"):
            modules[folder] += 1
            statements[folder] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
            names[folder] += num_public_names(tree)
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ringtrain"]["budgets"]
    print(f"{'folder':<12}{'modules':>8}{'of':>5}{'statements':>12}{'of':>7}{'public names':>14}")
    is_above = False
    for folder in sorted(modules, key=lambda name: (name == "all", name)):
        most_modules, most_statements = budgets.get(folder, [0, 0])
        row = f"{folder:<12}{modules[folder]:>8}{most_modules:>5}{statements[folder]:>12}{most_statements:>7}"
        above = ""
        if modules[folder] > most_modules or statements[folder] > most_statements:
            is_above, above = True, "  above its budget: remove something, or say in the change why it is worth more"
        print(f"{row}{names[folder]:>14}{above}")
    return int(is_above)


if __name__ == "__main__":
    sys.exit(main())
