"""Checkpoints as atomic folders: checkpoints/step-00000440/{state,ranks}.npz and manifest.json.

A folder is written under a temporary name, flushed to disk and renamed. The manifest, written last, holds a checksum
of every file; a checkpoint that does not match it is never restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.checkpoint import durable
from ringtrain.errors import CheckpointError, DamagedCheckpoint
from ringtrain.protocol.json_text import INVALID, parse_json

FORMAT = 3
"""Manifest format. 3: in_common is what all runs of one name have in common."""
MANIFEST = "manifest.json"
RESULT = "result.npz"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"
NAME = re.compile(r"step-(\d{8,})")
"""of a checkpoint"""


@dataclass(frozen=True)
class Checkpoint:
    """Verified checkpoint."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def global_step(self) -> int:
        """Number of completed steps."""
        return self.manifest["global_step"]

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """Loads the arrays of one of its files, by name."""
        with np.load(self.folder / f"{name}.npz", allow_pickle=False) as file:
            return dict(file)


def save(
    folder: Path,
    global_step: int,
    files: Mapping[str, Mapping[str, NDArray[Any]]],
    facts: Mapping[str, Any],
    after_file: Callable[[str], None] = lambda name: None,  # called while the checkpoint is incomplete
) -> Path:
    """Writes a checkpoint, unless this step has a valid one, and returns its folder; rank 0 only. Raises OSError."""
    final = folder / f"step-{global_step:08d}"
    unfinished = folder / f"{UNFINISHED}{global_step:08d}-{socket.gethostname()}-{os.getpid()}"  # unique per process
    if final.exists():
        try:
            return verify(final).folder  # or raises CheckpointError if it cannot be read now
        except DamagedCheckpoint:
            shutil.rmtree(final)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        checksums = {}
        for name, arrays in files.items():
            path = unfinished / f"{name}.npz"
            with open(path, "wb") as file:
                np.savez(file, **dict(arrays))  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            checksums[path.name] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
            after_file(name)
        manifest = {"format": FORMAT, "global_step": global_step, **facts, "files": checksums}
        with open(unfinished / MANIFEST, "w", encoding="utf-8") as text:
            body = json.dumps(manifest, indent=1)
            text.write(json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest()}) + "\n" + body)
            text.flush()
            os.fsync(text.fileno())
        durable.flush(unfinished)
        os.rename(unfinished, final)
        durable.flush(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def verify(folder: Path) -> Checkpoint:
    """Verifies every file against the manifest; raises DamagedCheckpoint, or CheckpointError if it cannot be read."""
    try:
        return _verify(folder)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be read: {error.strerror}: nothing was removed; start again when it"
            f" can be read"
        ) from error


def read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the manifest and its SHA-256, of all content; raises DamagedCheckpoint, CheckpointError or OSError."""
    try:
        head, _, body = (folder / MANIFEST).read_bytes().decode().partition("\n")
        digest = parse_json(head)["sha256"]
        if digest != hashlib.sha256(body.encode()).hexdigest():
            raise DamagedCheckpoint(f"{folder / MANIFEST}: its content does not match its checksum")
        manifest = parse_json(body)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no {MANIFEST}: not a checkpoint, or not a whole one") from None
    except INVALID as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST}: cannot be read: {error}") from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{folder}: has format {manifest['format']}, this ringtrain reads {FORMAT}: use the one that has saved it"
        )
    return manifest, digest


def _verify(folder: Path) -> Checkpoint:
    manifest, _ = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            checksum, size = _sha256(path), path.stat().st_size
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
        if size != expected["bytes"]:
            raise DamagedCheckpoint(f"{path}: has {size} bytes, expected {expected['bytes']}")
        if checksum != expected["sha256"]:
            raise DamagedCheckpoint(f"{path}: does not have the checksum in {MANIFEST}: its content has changed")
    return Checkpoint(folder, manifest)


def step_of(name: str) -> int:
    """Returns the step of a checkpoint from the name of its folder; -1 if it is none."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else -1


def saved_in(folder: Path) -> list[Path]:
    """Returns the checkpoint folders of a run, newest first, including incomplete ones."""
    # Not glob, which treats an unreadable folder as empty.
    names = os.listdir(folder) if folder.is_dir() else []
    folders = [folder / name for name in names if NAME.fullmatch(name)]
    return sorted(folders, key=lambda path: step_of(path.name), reverse=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest valid checkpoint or None, and why newer ones were skipped. Raises CheckpointError."""
    refused: list[str] = []
    for path in saved_in(folder):
        try:
            return verify(path), refused
        except DamagedCheckpoint as error:
            refused.append(str(error))
    return None, refused


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints. Raises OSError."""
    for path in folder.glob(f"{REMOVED}*"):  # partly removed by a process that was killed
        shutil.rmtree(path, ignore_errors=True)
    for path in saved_in(folder)[keep:]:
        _remove(path)


def remove_after(folder: Path, global_step: int) -> None:
    """Removes later checkpoints, and incomplete folders, on resume; none if one that may be valid is unreadable."""
    later = [path for path in saved_in(folder) if step_of(path.name) > global_step]
    for path in later:
        with contextlib.suppress(DamagedCheckpoint):
            verify(path)
    for path in later:
        _remove(path)
    for path in (*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REMOVED}*")):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    # Renamed first: a partly removed folder must not look like a checkpoint.
    doomed = path.with_name(f"{REMOVED}{path.name}-{time.time_ns()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def save_result(folder: Path, weights: Mapping[str, NDArray[Any]]) -> None:
    """Writes the weights with which a run has ended, to be read without their classes; raises OSError."""
    unfinished, path = folder / f"{UNFINISHED}{RESULT}", folder / RESULT
    path.unlink(missing_ok=True)  # of an earlier end
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, **weights)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_result(folder: Path) -> dict[str, NDArray[Any]]:
    """Returns the weights of `save_result`; raises CheckpointError if they cannot be read."""
    try:
        with np.load(folder / RESULT, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{folder / RESULT}: cannot be read: {_one_line(error)}: delete it, and the last checkpoint takes its place"
        ) from error


def export(model: Any, folder: Path) -> None:
    """Writes the model without optimizer as model.keras; for rank 0 only. Raises OSError, else CheckpointError."""
    import keras

    unfinished, path = folder / ".unfinished.keras", folder / "model.keras"
    try:
        with _uncompiled(model):
            model.save(unfinished)
        os.replace(unfinished, path)
    except OSError:  # an earlier export is kept
        raise
    except Exception as error:  # also from the model's own code
        # Not the model's method: a layer that is a Keras trainer, but no keras.Model, has none.
        keras.saving.save_weights(model, folder / "model.weights.h5")
        raise CheckpointError(
            f"{path}: cannot be written: {_one_line(error)}: the weights are in model.weights.h5 and in the"
            f" last checkpoint"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _uncompiled(model: Any) -> Iterator[None]:
    """Excludes loss and optimizer from what Keras writes of a model."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
