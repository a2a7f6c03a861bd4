"""Files of rows of any kind, which their first bytes tell, and images in a folder per class."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns
from ringtrain.data.data_files import DataFile
from ringtrain.data.parquet_files import ParquetFiles
from ringtrain.data.tfrecord_files import TFRecordFiles
from ringtrain.errors import DataError

PARQUET = b"PAR1"
"""first bytes of its files"""
COLUMNS = ("image", "class", "path")


class ClassFolders:
    """Images with their class, which is the place of their folder among the names of all; a block is one image."""

    kind = "images"

    def __init__(
        self, files: Sequence[DataFile], columns: Sequence[str], class_names: Sequence[str] | None = None
    ) -> None:
        missing = [name for name in columns if name not in COLUMNS]
        if missing:
            raise DataError(f"{files[0]}: is an image, which has no column {missing[0]}: expected {', '.join(COLUMNS)}")
        self.columns = columns
        self.class_names = list(class_names or sorted({file.folder_name for file in files}))
        self._classes = {name: number for number, name in enumerate(self.class_names)}
        other = next((file for file in files if file.folder_name not in self._classes), None)
        if other:
            raise DataError(f"{other}: is in none of the folders {', '.join(self.class_names)}")
        self.blocks = [Block(file, 0, 1, 0, file.size) for file in files]

    def checksum(self) -> int:
        """Checksum of the files' sizes and classes."""
        return zlib.crc32(str([(block.end, block.file.folder_name) for block in self.blocks]).encode(errors="replace"))

    def read(self, block: Block) -> Columns:
        values: Columns = {}
        if "image" in self.columns:
            values["image"] = np.array([data_files.read_file(block.file, lambda opened: opened.read())], object)
        if "class" in self.columns:
            values["class"] = np.array([self._classes[block.file.folder_name]], np.int64)
        if "path" in self.columns:
            values["path"] = np.array([str(block.file)], object)
        return values


Files = ParquetFiles | TFRecordFiles | ClassFolders


def opened(files: Sequence[DataFile], columns: Sequence[str], class_names: Sequence[str] | None = None) -> Files:
    """Opens files of one kind; raises DataError if they cannot be read, are of several kinds, or have no rows."""
    kinds = data_files.of_each(_kind_of, files)
    kind = next(filter(None, kinds.values()), "TFRecord")
    other = next((file for file in files if kinds[file] not in ("", kind)), None)
    if other:
        raise DataError(f"{other}: is {kinds[other]}, expected files of one kind, {kind} as the first one")
    if class_names and kind != "images":
        raise DataError(f"ringtrain.Records: got class_names with files of {kind}, expected them with images alone")
    found: Files
    if kind == "images":
        found = ClassFolders(files, columns, class_names)
    elif kind == "Parquet":
        found = ParquetFiles(files, columns)
    else:
        found = TFRecordFiles(files, columns)
    if not found.blocks:
        raise DataError(f"ringtrain.Records: no row in {len(files)} files, expected at least one: {files[0]}")
    return found


def _kind_of(file: DataFile) -> str:
    """Kind of a file; "": it is empty, as a TFRecord without rows is."""
    if file.name.lower().endswith(data_files.IMAGES):
        return "images"  # of which there may be a million: they are not opened
    if not file.size:
        return ""

    begin = data_files.read_file(file, lambda opened: opened.read(len(PARQUET)))
    return "Parquet" if begin == PARQUET else "TFRecord"
