"""Writes wheelhouse/: all wheels that hosts without a network install ringtrain from, for this Python.

    make wheels

pip downloads the pinned versions and takes only files whose hash is in hashes.txt. SHA256SUMS checks a copy.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys

from packaging.requirements import Requirement

from dist import ROOT, write_checksums
from dist import main as write_dist


def main() -> int:
    """Writes dist/ and wheelhouse/."""
    write_dist()
    wheels = list((ROOT / "dist").glob("*.whl"))
    extra = "gpu" if any("_cu12-" in wheel.name for wheel in wheels) else "cpu"
    folder = ROOT / "wheelhouse"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--only-binary", ":all:"]
    hashes = ["--require-hashes", "--constraint", str(ROOT / "hashes.txt")]
    subprocess.run([*pip, "--quiet", *hashes, "--dest", str(folder), *requirements(extra)], check=True)
    for wheel in wheels:
        shutil.copy(wheel, folder)
    write_checksums(folder)
    size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    num_wheels = len(list(folder.glob("*.whl")))
    print(f"wheelhouse/: {num_wheels} wheels, {size_mb:.0f} MB. On each host, with this folder there:")
    print(f"python{sys.version_info[0]}.{sys.version_info[1]} -m venv ENV")
    print(f"ENV/bin/pip install --no-index --find-links wheelhouse 'ringtrain[{extra}]'")
    return 0


def requirements(extra: str) -> list[str]:
    """Requirements of ringtrain with an extra, without ringtrain-horovod, which is built here."""
    wanted = []
    for text in importlib.metadata.requires("ringtrain") or []:
        requirement = Requirement(text)
        if requirement.name.startswith("ringtrain-horovod"):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


if __name__ == "__main__":
    sys.exit(main())
