"""Tar files in WebDataset's layout: successive members whose names are equal up to the first dot are a row."""

from __future__ import annotations

import functools
import io
import itertools
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import data_files
from ringtrain.data.blocks import Block, Columns
from ringtrain.data.data_files import DataFile
from ringtrain.data.scanned_files import ScannedFiles
from ringtrain.errors import DamagedData, DataError

HEADER = tarfile.BLOCKSIZE
"""bytes of a member's header; contents are padded to a multiple of it"""
MAGIC = slice(257, 262)
NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
"""columns that are an integer in decimal, as in WebDataset"""
VERSION = "v1.2"
"""first word of an index"""


class Member(NamedTuple):
    """A file in a tar file."""

    row: str
    """its name up to the first dot"""
    column: str
    """what follows it, in lower case"""
    name: str
    begin: int
    length: int
    """of its content, in bytes"""


class TarFiles(ScannedFiles):
    """Members by column, whose headers are read with them.

    Args:
        columns: What follows the first dot of their names; None: as in the first row.
    """

    kind = "tar"

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        super().__init__(files, _positions, _from_index)
        if columns is None:
            columns = list(self.types()) if self.blocks else []
        self.columns = columns

    def types(self) -> dict[str, str]:
        rows = self.parsed(self.blocks[0], functools.partial(_rows_of_block, block=self.blocks[0]))
        return {column: _type_of(column) for column in rows[0]}

    def read(self, block: Block) -> Columns:
        return self.parsed(block, functools.partial(self._columns, block=block))

    def _columns(self, content: bytes, block: Block) -> Columns:
        rows = _rows_of_block(content, block)
        columns = {}
        for column in self.columns:
            for row in rows:
                if column not in row:
                    name = next(iter(row.values())).row
                    raise DataError(f"{block.file}: {name} has no {column}: it has {', '.join(row)}")
            texts = [content[row[column].begin : row[column].begin + row[column].length] for row in rows]
            columns[column] = _values(column, texts, f"{block.name}: {column}")
        return columns


def _rows_of_block(content: bytes, block: Block) -> list[dict[str, Member]]:
    """Members of the rows of a block by column, whose positions are those in the block."""
    rows = [*_rows(_members(io.BytesIO(content), block.file, is_whole=False), block.file)]
    if len(rows) != block.num_rows:
        raise ValueError(f"it has {len(rows)} rows, expected {block.num_rows}")
    return rows


def index(file: DataFile) -> str:
    """Text of a file's index: per row, "column begin length name" of each member (as DALI's wds2idx).

    Raises:
        DataError: The file is damaged, or has names with spaces, which an index cannot have.
    """
    rows = _scanned(file)
    if not rows:
        raise DataError(f"{file}: has no row")
    lines = [f"{VERSION} {len(rows)}"]
    for row in rows:
        fields = []
        for member in row.values():
            if member.name.split() != [member.name]:
                raise DataError(f"{file}: {member.name!r} has a space, which an index cannot have: rename it")
            fields.append(f"{member.column} {member.begin} {member.length} {member.name}")
        lines.append(" ".join(fields))
    return "\n".join([*lines, ""])


def _positions(file: DataFile) -> list[int]:
    """A checksum of the members' names and lengths, and positions of a file's rows."""
    rows = _scanned(file)
    checksum = zlib.crc32(str(rows).encode(errors="surrogateescape"))
    last = [[*row.values()][-1] for row in rows]
    return [checksum, *_starts([(member.begin, member.length) for member in last])]


def _starts(last: Sequence[tuple[int, int]]) -> list[int]:
    """Positions of rows, each of which begins where the one before ends.

    Args:
        last: Begin and length of the last member of each row.
    """
    padded = [-(-length // HEADER) * HEADER for _, length in last]
    ends = [begin + length for (begin, _), length in zip(last, padded, strict=True)]
    return [0, *ends[:-1]] if ends else []


def _from_index(file: DataFile, text: str) -> list[int]:
    first, *lines = text.splitlines()
    last: list[tuple[int, int]] = []
    for line in lines:
        words = line.split(" ")[-4:]
        if len(words) == 4 and words[1].isdecimal() and words[2].isdecimal():
            last.append((int(words[1]), int(words[2])))
    starts = _starts(last)
    is_ascending = all(begin < end for begin, end in itertools.pairwise([*starts, file.size]))
    if not lines or first != f"{VERSION} {len(lines)}" or len(last) != len(lines) or not is_ascending:
        raise DataError(f"{file}{data_files.INDEX}: {data_files.OTHER_INDEX}")
    return starts


def _scanned(file: DataFile) -> list[dict[str, Member]]:
    """Members of each row by column, from the headers of the whole file."""

    def scan(opened: IO[bytes]) -> list[dict[str, Member]]:
        rows = [*_rows(_members(opened, file, is_whole=True), file)]
        names = [next(iter(row.values())).row for row in rows]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice:
            raise DataError(f"{file}: members of {twice} are in two places, expected them next to each other")
        return rows

    return data_files.read_file(file, scan, f"{file}: cannot be read as tar", data_files.WINDOW)


def _rows(members: Iterator[Member], file: DataFile) -> Iterator[dict[str, Member]]:
    """Successive members of a row, by column."""
    row: dict[str, Member] = {}
    for member in members:
        if row and member.row != next(iter(row.values())).row:
            yield row
            row = {}
        if member.column in row:
            raise DataError(f"{file}: has {member.name} twice")
        row[member.column] = member
    if row:
        yield row


def _members(opened: IO[bytes], file: DataFile, is_whole: bool) -> Iterator[Member]:
    """Members of a whole file, or of some of its rows, that have a dot in their names."""
    with tarfile.open(fileobj=opened, mode="r:", errors="surrogateescape") as members:
        for member in members:
            folder, _, its_name = member.name.rpartition("/")
            stem, dot, column = its_name.partition(".")
            if member.isdir() or not stem or not dot:
                continue  # as WebDataset
            if not member.isfile() or member.issparse():
                kind = "sparse" if member.issparse() else "a link or a device"
                raise DataError(f"{file}: {member.name} is {kind}, expected a file")
            name = f"{folder}/{stem}" if folder else stem
            yield Member(name, column.lower(), member.name, member.offset_data, member.size)
        end = members.offset
    # tarfile takes a damaged or empty header for the end, and a file without an end for a whole one.
    opened.seek(end)
    rest = opened.read()
    if rest.strip(b"\0") or (is_whole and len(rest) < HEADER):
        raise DamagedData(
            f"{file}: is damaged or cut at byte {end:,}, where a member's header, or the end, is expected"
        )


def is_header(begin: bytes) -> bool:
    """Returns whether a file begins with the header of a tar file, or with the end of an empty one."""
    return begin[MAGIC] == b"ustar" or begin == bytes(HEADER)


def _type_of(column: str) -> str:
    """Type of a column by its last ending: x.npy is an array, too."""
    ending = column.rpartition(".")[2]
    if ending in NUMBERS:
        return "int64"
    return "array" if ending == "npy" else "bytes"


def _values(column: str, contents: list[bytes], name: str) -> NDArray[Any]:
    """Values of a column: numbers, arrays of one shape, or the contents as they are."""
    kind = _type_of(column)
    if kind == "bytes":
        return np.array(contents, object)
    try:
        values = [_value(kind, content) for content in contents]
    except Exception as error:  # of NumPy, of many classes
        problem = " ".join(str(error).split())[:200]
        raise DamagedData(f"{name}: cannot be read as {kind}: {problem}") from error
    found = {(value.dtype, value.shape) for value in values}
    if len(found) > 1:
        texts = sorted(f"{dtype} of shape {shape}" for dtype, shape in found)
        raise DataError(f"{name}: arrays of several types or shapes, {texts[0]} and {texts[1]}: expected one")
    return np.stack(values)


def _value(kind: str, content: bytes) -> NDArray[Any]:
    if kind == "int64":
        return np.array(int(content), np.int64)
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array
