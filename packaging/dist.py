"""Writes the files of a release to dist/: ringtrain's wheel and sdist, and ringtrain-horovod's.

    make dist                    # from what is committed; the same commit gives the same bytes

ringtrain-horovod's wheel is the one that set-up has built and keeps in its cache.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Writes dist/ and prints the SHA-256 of each file."""
    horovod = cached_wheel()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        write_ringtrain(export(Path(scratch)), dist)
    shutil.copy(horovod, dist)
    command = [sys.executable, "-Bc", f"import build_backend; build_backend.build_sdist({str(dist)!r})"]
    subprocess.run(command, cwd=ROOT / "packaging" / "horovod", check=True)
    for path in sorted(dist.iterdir()):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), f"{path.stat().st_size / 1e6:6.2f} MB", path.name)
    return 0


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS for the folder's other files, as sha256sum --check reads it."""
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))


def export(folder: Path) -> Path:
    """Writes the committed files to a folder: a build takes nothing else, such as modules that are no longer there."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python 3.11.2 does not have
        tar.extractall(folder)
    return folder


def write_ringtrain(source: Path, dist: Path) -> None:
    """Builds ringtrain's wheel and sdist."""
    time_s = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    environ = os.environ | {"SOURCE_DATE_EPOCH": time_s.stdout.strip()}
    code = "from setuptools import build_meta as build; build.build_wheel({0!r}); build.build_sdist({0!r})"
    command = [sys.executable, "-c", code.format(str(dist))]
    subprocess.run(command, cwd=source, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (sdist,) = dist.glob("ringtrain-*.tar.gz")
    sdist.write_bytes(without_times(sdist.read_bytes(), int(time_s.stdout)))


def without_times(sdist: bytes, time_s: int) -> bytes:
    """The same archive with one time and no owners. setuptools writes those of the files that it has just made."""
    packed, result = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(sdist)) as tar, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time_s, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, tar.extractfile(member) if member.isfile() else None)
    with gzip.GzipFile("", "wb", 9, result, mtime=time_s) as compressed:
        compressed.write(packed.getvalue())
    return result.getvalue()


def cached_wheel() -> Path:
    """Wheel of ringtrain-horovod in set-up's cache."""
    shown = subprocess.run([ROOT / "launch" / "setup.sh", "--print-key"], check=True, capture_output=True, text=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "ringtrain" / "wheels" / shown.stdout.split()[-1]
    for wheel in folder.glob("ringtrain_horovod*.whl"):
        return wheel
    raise SystemExit(f"{folder} has no wheel: rm -r dist .venv/setup/stamp, then make setup, which builds one")


if __name__ == "__main__":
    sys.exit(main())
