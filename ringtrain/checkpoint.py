"""Saves a model so that a file under its final name is always a whole one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def save(model: keras.Model, folder: Path, global_step: int) -> Path:
    """Saves weights, optimizer and architecture as plain Keras; for rank 0 alone.

    Args:
        model: compiled.
        folder: that exists.
        global_step: steps done, which names the file.

    Returns:
        The file, e.g. checkpoints/440.keras.

    Raises:
        OSError: it cannot be written; the unfinished file is removed.
    """
    final, unfinished = folder / f"{global_step}.keras", folder / f".unfinished-{global_step}.keras"
    try:
        model.save(unfinished)
        _flush(unfinished)
        os.replace(unfinished, final)
        _flush(folder)
    finally:
        unfinished.unlink(missing_ok=True)
    return final


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
