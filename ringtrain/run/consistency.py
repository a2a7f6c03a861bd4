"""Verifies before training that code, versions and data are the same on all ranks."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringtrain.config import Config
from ringtrain.errors import ConfigError

PACKAGE = Path(__file__).parents[1]


def of_code(config: Config, versions: Mapping[str, str]) -> dict[str, str]:
    """Returns this rank's versions, and checksums of ringtrain's files and of the user's modules."""
    found = {f"version of {name}": version for name, version in versions.items()}
    files = sorted(PACKAGE.rglob("*.py"))
    found |= {f"ringtrain/{path.relative_to(PACKAGE)}": checksum_of(path) for path in files}
    for name in (config.data.name, config.model.name, *config.model.metrics, *config.train.callbacks):
        module, colon, _ = name.partition(":")
        path = _path_of(module) if colon else None
        if path is not None:
            found[f"module {module}"] = checksum_of(path)
    return found


def checksum_of(path: Path) -> str:
    """Returns the CRC-32 of a file as text."""
    return f"with checksum {zlib.crc32(path.read_bytes()):08x}"


def refuse(prints: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raises ConfigError with the first rank that differs from rank 0. `prints`: host and values of each rank."""
    host_0, first = prints[0]
    for rank, (host, other) in enumerate(prints):
        for name in sorted({*first, *other}, key=lambda name: ("/" in name, name)):
            own, theirs = first.get(name, "missing"), other.get(name, "missing")
            # A user's module that only one rank has is a different configuration, which another check reports.
            if own != theirs and not (name.startswith("module ") and "missing" in (own, theirs)):
                raise ConfigError(
                    f"rank {rank} on {host} has another {name} than rank 0 on {host_0}: {theirs}, not {own}:"
                    f" bring code, libraries and data to the same state on all hosts"
                )


def _path_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None  # reported where the module is imported
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def git_revision(start: Path) -> str | None:
    """Returns the commit hash of a folder's work tree; None outside of one and before its first commit."""
    for folder in (start, *start.parents):
        git = folder / ".git"
        if git.is_dir():
            break
    else:
        return None
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        branch = head.removeprefix("ref: ")
        if (git / branch).exists():
            return (git / branch).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {branch}")), None)
    except OSError:
        return None
