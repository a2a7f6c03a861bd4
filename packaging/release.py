"""Writes to dist/ all that a person needs to publish a release: CONTRIBUTING.md says how.

make release
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from dist import ROOT, write_checksums
from dist import main as write_dist


def main() -> int:
    """Writes dist/ with SHA256SUMS and NOTES.md, and lets twine check the metadata."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "ringtrain/__init__.py").read_text(), re.MULTILINE).group(1)
    text = notes(changelog, version)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True)
    if changed.stdout:
        raise SystemExit("a release is made of what is committed: git commit or git stash first")
    write_dist()
    dist = ROOT / "dist"
    check([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])
    (dist / "NOTES.md").write_text(text, encoding="utf-8")
    write_checksums(dist)
    print("dist/ is ready: CONTRIBUTING.md has what is left to do")
    return 0


def notes(changelog: str, version: str) -> str:
    """The changelog's newest section, which must be that of this version."""
    newest = re.search(r"^## (\S+).*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if newest is None or newest.group(1) != version:
        received = newest.group(1) if newest else "none"
        raise SystemExit(f"CHANGELOG.md: newest section is {received}, expected {version}, ringtrain's version: add it")
    return newest.group(2).strip() + "\n"


def check(files: list[Path]) -> None:
    """Runs twine check in an environment of its own, which is removed afterwards: nothing here needs twine."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "twine"]
        if subprocess.run(command, check=False).returncode:
            print("not checked: twine could not be installed: pip install twine; twine check dist/*.whl dist/*.tar.gz")
            return
        subprocess.run([python, "-m", "twine", "check", "--strict", *map(str, files)], check=True)


if __name__ == "__main__":
    sys.exit(main())
