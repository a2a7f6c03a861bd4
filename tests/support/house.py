"""Prints the size of each folder of ringtrain/, and checks the limits in pyproject.toml.

python tests/support/house.py            # exit code 1 if something is over its limit
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def long_functions(path: Path, limit: int) -> Iterator[str]:
    """Functions of a file that are longer than so many lines, without their docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, *_ = node.body
            has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
            if (node.end_lineno or 0) - node.lineno + 1 - docstring > limit:
                yield f"{node.name} in {path.relative_to(ROOT)}"


def measure(package: Path, limits: dict[str, Any]) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Sizes and what is over its limit.

    Args:
        package: folder with modules, and folders of them.
        limits: for every file, function and folder; `long_files` may be as long as they say.

    Returns:
        For each folder its name, lines and the most modules that one folder in it has; and complaints.
    """
    folders: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        folders.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    rows, over = [], []
    for name, paths in folders.items():
        lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in paths}
        modules = max(sum(other.parent == path.parent and other.name[0] != "_" for other in paths) for path in paths)
        rows.append((name or ".", sum(lengths.values()), modules))
        if modules > limits["modules"]:
            over.append(f"{name}: {modules} modules in a folder, limit {limits['modules']}")
        for path, length in lengths.items():
            limit = limits["long_files"].get(path.relative_to(package).as_posix(), limits["file"])
            if length > limit:
                over.append(f"{path.relative_to(package)}: {length} lines, limit {limit}")
    functions = [
        name for paths in folders.values() for path in paths for name in long_functions(path, limits["function"])
    ]
    if len(functions) > limits["long_functions"]:
        over.append(f"{len(functions)} functions over {limits['function']} lines: {', '.join(functions)}")
    return rows, over


def main() -> int:
    """Prints a row per folder, then complaints."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    rows, over = measure(ROOT / "ringtrain", limits)
    print(f"{'folder':<12}{'lines':>8}{'modules':>9}")
    for name, lines, modules in rows:
        print(f"{name:<12}{lines:>8}{modules:>9}")
    print(f"{'all':<12}{sum(row[1] for row in rows):>8}")
    for complaint in over:
        print(f"over: {complaint}")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
