"""Prints modules, statements and public names of each folder of ringtrain/; limits of functions are ruff's.

python tests/support/house.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ringtrain"


def num_public_names(tree: ast.Module) -> int:
    """Functions and classes of a module, and methods of these classes, whose names have no leading underscore."""
    count = 0
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else []
        for definition in (node, *members):
            if isinstance(definition, ast.FunctionDef | ast.ClassDef) and not definition.name.startswith("_"):
                count += 1
    return count


def main() -> None:
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
    print(f"{'folder':<12}{'modules':>8}{'statements':>12}{'public names':>14}")
    for folder in sorted(modules, key=lambda name: (name == "all", name)):
        print(f"{folder:<12}{modules[folder]:>8}{statements[folder]:>12}{names[folder]:>14}")


if __name__ == "__main__":
    main()
