"""Files and folders that are still there after a loss of power."""

from __future__ import annotations

import errno
import os
from pathlib import Path

UNFINISHED = ".unfinished"
"""end of the name of a file that is being written"""


def flush(folder: Path) -> None:
    """Flushes new, renamed and removed entries of a folder to disk, where that is possible. Raises OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # files may be made in it all the same
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Creates a folder and the missing ones above it, and flushes the entry of each."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        flush(path.parent)


def write(path: Path, text: str) -> None:
    """Writes a file that has its old or its new content, whenever process or machine ends."""
    unfinished = path.with_suffix(UNFINISHED)
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    flush(path.parent)
