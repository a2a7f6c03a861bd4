"""ringtrain data: shows files of rows, and writes rows as a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data import data_files, record_files
from ringtrain.data.blocks import Block
from ringtrain.data.data_files import DataFile
from ringtrain.data.record_files import Files
from ringtrain.data.records import Records
from ringtrain.errors import DataError, LaunchError
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_0, FILE, Argument, N

ROWS = 3
"""number of first rows that are shown"""
MAX_LETTERS = 40
"""of a value that is shown"""
ROWS_OF_A_BLOCK = 1024
"""of a Parquet file that is written"""
FilesArgument = Annotated[tuple[str, ...], Argument("FILES", is_positional=True)]


def files_of(given: Sequence[str]) -> list[DataFile]:
    """Files of paths, folders, patterns or URLs."""
    if not given:
        raise LaunchError("ringtrain data: got no files, expected paths, folders, patterns or URLs")
    return data_files.files_of(given)


# ---- show -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShowOptions:
    """Options of ringtrain data show."""

    files: FilesArgument = ()
    """files, folders, patterns or URLs"""
    check: bool = False
    """read all blocks, decode image files, and compare checksums, which TFRecords have, and Parquet if written so"""


def show(options: ShowOptions) -> int:
    """Prints numbers of files and rows, the columns, and the first rows."""
    files = record_files.opened(files_of(options.files), None)
    if options.check:
        check(files)
    num_files = len({block.file for block in files.blocks})
    num_rows = sum(block.num_rows for block in files.blocks)
    print(f"{files.kind}: {num_files:,} files, {len(files.blocks):,} blocks, {num_rows:,} rows")
    values = first_rows(files)
    head = ("column", "type", *(f"row {row}" for row in range(ROWS)))
    Table(head, [(name, kind, *values[name]) for name, kind in files.types().items()]).show()
    if options.check:
        print(f"all {len(files.blocks):,} blocks can be read")
    return 0


def check(files: Files) -> None:
    """Reads all blocks, and decodes their images; raises DataError after a line for each that fails."""
    texts = data_files.of_each(lambda block: problem_of(files, block), files.blocks).values()
    problems = [text for text in texts if text]
    for text in problems:
        print(text)
    if problems:
        raise DataError(f"{len(problems):,} of {len(files.blocks):,} blocks cannot be read")


def problem_of(files: Files, block: Block) -> str:
    """Reason why a block cannot be read; empty if it can."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow logs each image that it cannot decode
    import tensorflow as tf

    from ringtrain.data import blocks

    try:
        columns = files.read(block)
        if files.kind == "images":
            for content in columns.get("image", ()):
                tf.io.decode_image(content)
    except DataError as error:
        return str(error)
    except tf.errors.OpError as error:
        return f"{block.name}: {blocks.text_of(error)}"
    return ""


def first_rows(files: Files) -> dict[str, list[str]]:
    """First rows by column, as text; empty where there are fewer."""
    shown: dict[str, list[str]] = {name: [] for name in files.types()}
    try:
        for block in files.blocks[:ROWS]:
            for name, column in files.read(block).items():
                shown[name] += [text_of(value) for value in column[:ROWS]]
    except DataError as error:  # of values that no model can be given
        print(error)
    return {name: [*texts, *[""] * ROWS][:ROWS] for name, texts in shown.items()}


def text_of(value: Any) -> str:
    """Formats a value of a row with few letters."""
    if isinstance(value, bytes):
        if len(value) > MAX_LETTERS or not value.isascii():
            return f"{len(value):,} bytes"
        value = value.decode()
    if isinstance(value, np.ndarray):
        value = np.array2string(value, threshold=4)
    text = " ".join(str(value).split())
    if len(text) <= MAX_LETTERS:
        return text
    return f"{text[: MAX_LETTERS - 3]}..."


# ---- convert --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvertOptions:
    """Options of ringtrain data convert."""

    files: FilesArgument = ()
    """files, folders, patterns or URLs"""
    to: Annotated[str, FILE] = ""
    """Parquet file to write, which must not exist"""
    seed: Annotated[int | None, N, AT_LEAST_0] = None
    """seed of a shuffle that mixes rows of 48 blocks at a time; without it, the order of the files"""


def convert(options: ConvertOptions) -> int:
    """Writes the rows of files as one Parquet file."""
    import pyarrow as pa

    if not options.to:
        raise LaunchError("ringtrain data convert: expected files and --to FILE")
    target = Path(options.to)
    if target.exists():
        raise DataError(f"{target}: already exists: choose another file with --to")
    columns = record_files.opened(files_of(options.files), None).types()
    rows = Records(options.files, {name: name for name in columns})
    unfinished = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(rows, options.seed, unfinished)
        unfinished.rename(target)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{target}: cannot be written: {' '.join(str(error).split())}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"{target}: {len(rows):,} rows with {', '.join(columns)}")
    return 0


def write_parquet(rows: Records, seed: int | None, path: Path) -> None:
    """Writes rows in the order of a training with this seed, a batch as a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None
    for (columns,) in rows.dataset(ROWS_OF_A_BLOCK, seed).as_numpy_iterator():
        table = pa.table({name: arrow_array(column) for name, column in columns.items()})
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema, write_page_checksum=True)
        writer.write_table(table)
    writer.close()


def arrow_array(values: NDArray[Any]) -> Any:
    """Column of numbers or texts; of rows with several values, of lists of one length."""
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(arrow_array(values.reshape(-1, *values.shape[2:])), values.shape[1])
