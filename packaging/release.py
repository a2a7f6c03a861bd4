"""Writes to dist/ all that a person needs to publish a release: CONTRIBUTING.md says how.

make release
"""

from __future__ import annotations

import email
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

import yaml

from dist import ROOT, write_checksums
from dist import main as write_dist


def main() -> int:
    """Writes dist/ with SHA256SUMS, NOTES.md and recipe.yaml, and lets twine check the metadata."""
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
    (dist / "recipe.yaml").write_text(recipe(version, dist / f"ringtrain-{version}.tar.gz"), encoding="utf-8")
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


def recipe(version: str, sdist: Path) -> str:
    """Recipe of ringtrain for conda, pure Python: TensorFlow, Open MPI and Horovod come by pip."""
    with tarfile.open(sdist) as tar:
        metadata = tar.extractfile(f"ringtrain-{version}/PKG-INFO").read().decode()
    headers = email.message_from_string(metadata)
    python = headers["Requires-Python"]
    requirements = [text.replace(">=", " >=") for text in headers.get_all("Requires-Dist") if "extra ==" not in text]
    install = "${{ PYTHON }} -m pip install . --no-deps --no-build-isolation"
    entry_point = "ringtrain = ringtrain.cli:main"
    sections = {
        "schema_version": 1,
        "package": {"name": "ringtrain", "version": version},
        # For a channel, the address of the release in place of `path`.
        "source": {"path": sdist.name, "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest()},
        "build": {"noarch": "python", "script": install, "python": {"entry_points": [entry_point]}},
        "requirements": {
            "host": [f"python {python}", "pip", "setuptools >=64"],
            "run": [f"python {python}", *requirements],
        },
        "tests": [{"python": {"imports": ["ringtrain"], "pip_check": False}}, {"script": ["ringtrain --version"]}],
        "about": {"summary": headers["Summary"], "license": headers["License"], "license_file": "LICENSE"},
    }
    return yaml.safe_dump(sections, sort_keys=False, width=120)


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
