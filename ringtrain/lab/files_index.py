"""ringtrain data index: writes where each row begins next to TFRecord files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ringtrain.data import data_files, record_files, tfrecord_files
from ringtrain.data.data_files import INDEX, DataFile
from ringtrain.errors import DataError, LaunchError
from ringtrain.options import Argument

KIND = "TFRecord"


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    files: Annotated[tuple[str, ...], Argument("FILES", is_positional=True)] = ()
    """files, folders, patterns or URLs"""


def main(options: Options) -> int:
    """Writes an index of each file."""
    if not options.files:
        raise LaunchError("ringtrain data index: got no files, expected paths, folders, patterns or URLs")
    files = [file for file in data_files.files_of(options.files) if file.size]
    if not files:
        raise DataError("ringtrain data index: all files are empty")
    kind = record_files.kind_of_all(files)
    if kind != KIND:
        raise DataError(f"{files[0]}: is {kind}, which needs no index")
    data_files.of_each(lambda file: _write(file, tfrecord_files.index(file).encode(errors="surrogateescape")), files)
    print(f"{len(files):,} files have an index, NAME{INDEX}")
    return 0


def _write(file: DataFile, content: bytes) -> None:
    if file.is_remote:
        store, path = data_files.store_of(file.url + INDEX)
        data_files.with_retries(lambda: store.pipe_file(path, content), file.url, f"{file}{INDEX}: cannot be written")
        return
    unfinished = Path(f"{file}{INDEX}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(f"{file}{INDEX}")
    except OSError as error:
        raise DataError(f"{file}{INDEX}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
