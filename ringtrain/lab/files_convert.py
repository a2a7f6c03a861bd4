"""ringtrain data convert: writes the rows of files of any kind as Parquet."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ringtrain.data.blocks import Columns, Files
from ringtrain.data.row_order import Order, Unshuffled, lane_order
from ringtrain.errors import DataError, LaunchError
from ringtrain.lab.files_show import all_columns
from ringtrain.options import AT_LEAST_0, AT_LEAST_1, Argument, N

if TYPE_CHECKING:
    import pyarrow as pa

BLOCKS_OF_A_FILE = 64
LANES = 48
"""blocks whose rows are mixed, and which are in memory"""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    files: Annotated[tuple[str, ...], Argument("FILES", is_positional=True)] = ()
    """files, folders, patterns or URLs"""
    to: Annotated[str, Argument("FOLDER")] = ""
    """folder for the Parquet files, which must not exist"""
    rows: Annotated[int, N, AT_LEAST_1] = 1024
    """rows of a block (row group)"""
    seed: Annotated[int | None, N, AT_LEAST_0] = None
    """seed of a shuffle that mixes rows of 48 blocks at a time; without it, the order of the files"""


def main(options: Options) -> int:
    """Writes all files, or none."""
    if not options.files or not options.to:
        raise LaunchError("ringtrain data convert: expected files and --to FOLDER")
    target = Path(options.to)
    if target.exists():
        raise DataError(f"{target}: already exists: choose another folder with --to")
    files = all_columns(options.files)
    unfinished = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        num_rows = write(files, unfinished, options)
        unfinished.rename(target)
    except (OSError, ValueError, TypeError, NotImplementedError) as error:  # of pyarrow: values without a type there
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise DataError(f"{target}: cannot be written: {problem}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{target}: {num_rows:,} rows with {', '.join(files.types())}")
    return 0


def write(files: Files, folder: Path, options: Options) -> int:
    """Writes Parquet files into a folder, and returns the number of rows."""
    import pyarrow.parquet as pq

    writer: Any = None
    num_rows = 0
    for number, columns in enumerate(_blocks(files, options.rows, options.seed)):
        table = _table(columns)
        if number % BLOCKS_OF_A_FILE == 0:
            if writer:
                writer.close()
            name = f"part-{number // BLOCKS_OF_A_FILE:05}.parquet"
            writer = pq.ParquetWriter(folder / name, table.schema, write_page_checksum=True)
        writer.write_table(table, row_group_size=len(table))
        num_rows += len(table)
    if writer:
        writer.close()
    return num_rows


def _blocks(files: Files, num_rows: int, seed: int | None) -> Iterator[Columns]:
    """The rows in blocks of `num_rows`, of which the last has the rest; with a seed, each has rows of LANES blocks."""
    sizes = [block.num_rows for block in files.blocks]
    starts = np.cumsum([0, *sizes])
    order = Order(Unshuffled(starts[-1]), num_rows)
    num_kept = 2
    if seed is not None:
        order = lane_order(sizes, min(LANES, num_rows), num_rows, seed, 0)
        num_kept = LANES + 1
    read = functools.lru_cache(num_kept)(lambda number: files.read(files.blocks[number]))
    for step in range(order.num_steps):
        numbers = order.batch(step)
        of_rows = np.searchsorted(starts, numbers, side="right") - 1
        by_block = np.argsort(of_rows, kind="stable")
        found, begins = np.unique(of_rows[by_block], return_index=True)
        pieces: dict[str, list[NDArray[Any]]] = {}
        for number, places in zip(found.tolist(), np.split(by_block, begins[1:]), strict=True):
            for name, column in read(number).items():
                pieces.setdefault(name, []).append(column[numbers[places] - starts[number]])
        yield {name: _joined(name, of_column)[np.argsort(by_block)] for name, of_column in pieces.items()}


def _joined(name: str, pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len({(piece.dtype, piece.shape[1:]) for piece in pieces}) > 1:
        raise DataError(f"{name}: values of several types or shapes, expected one: convert them before")
    return np.concatenate(pieces)


def _table(columns: Columns) -> pa.Table:
    import pyarrow as pa

    for name, column in columns.items():
        if column.dtype.kind not in "biufO" or 0 in column.shape:
            raise DataError(f"{name}: values of {column.dtype} and shape {column.shape}, expected numbers or texts")
    return pa.table({name: _array(column) for name, column in columns.items()})


def _array(values: NDArray[Any]) -> pa.Array:
    """A column; of rows with several values, of lists of one length."""
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(_array(values.reshape(-1, *values.shape[2:])), values.shape[1])
