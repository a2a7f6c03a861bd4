"""Image files in folders, one folder per class."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import IO

import numpy as np

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns
from ringtrain.data.data_files import DataFile
from ringtrain.errors import DataError

TYPES = {"image": "encoded image", "class": "int64", "path": "text"}

MAX_NAMES = 5
"""classes that are listed"""


class ClassFolders:
    """Images with their class, which is the place of their folder among the names of all; a block is one image.

    Args:
        columns: Of TYPES; None: all.
        class_names: Names of all folders, in order. None: those of the images, sorted.
    """

    kind = "images"

    def __init__(
        self, files: Sequence[DataFile], columns: Sequence[str] | None, class_names: Sequence[str] | None = None
    ) -> None:
        columns = list(TYPES) if columns is None else columns
        missing = [name for name in columns if name not in TYPES]
        if missing:
            raise DataError(f"{files[0]}: is an image, which has no column {missing[0]}: expected {', '.join(TYPES)}")
        self.columns = columns
        self.class_names = list(class_names or sorted({_folder_of(file) for file in files}))
        self._classes = {name: number for number, name in enumerate(self.class_names)}
        other = next((file for file in files if _folder_of(file) not in self._classes), None)
        if other:
            raise DataError(f"{other}: is in none of the folders {', '.join(self.class_names)}")
        self.blocks = [Block(file, 0, 1, 0, file.size) for file in files]

    def types(self) -> dict[str, str]:
        names = ", ".join(self.class_names[:MAX_NAMES])
        more = ", ..." if len(self.class_names) > MAX_NAMES else ""
        return {**TYPES, "class": f"int64 ({names}{more})"}

    def checksum(self) -> int:
        """Checksum of the files' sizes and classes."""
        return zlib.crc32(str([(block.end, _folder_of(block.file)) for block in self.blocks]).encode(errors="replace"))

    def read(self, block: Block) -> Columns:
        values: Columns = {}
        if "image" in self.columns:
            values["image"] = np.array([data_files.read_file(block.file, _content)], object)
        if "class" in self.columns:
            values["class"] = np.array([self._classes[_folder_of(block.file)]], np.int64)
        if "path" in self.columns:
            values["path"] = np.array([str(block.file)], object)
        return values


def _folder_of(file: DataFile) -> str:
    return file.url.rpartition("/")[0].rpartition("/")[2]


def _content(opened: IO[bytes]) -> bytes:
    return opened.read()
