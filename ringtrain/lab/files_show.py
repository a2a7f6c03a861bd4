"""ringtrain data show: what is in files of rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ringtrain.data.blocks import Block, Files
from ringtrain.data.data_files import files_of, of_each
from ringtrain.data.record_files import opened
from ringtrain.errors import DataError, LaunchError
from ringtrain.lab.tables import Table
from ringtrain.options import AT_LEAST_0, Argument, N

MAX_LETTERS = 40
"""of a value"""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    files: Annotated[tuple[str, ...], Argument("FILES", is_positional=True)] = ()
    """files, folders, patterns or URLs"""
    rows: Annotated[int, N, AT_LEAST_0] = 3
    """number of first rows that are printed"""
    check: bool = False
    """read all blocks, decode image files, and compare checksums, which TFRecords have, and Parquet if written so"""


def main(options: Options) -> int:
    """Prints numbers of files, blocks and rows, the columns, and the first rows."""
    if not options.files:
        raise LaunchError("ringtrain data show: got no files, expected paths, folders, patterns or URLs")
    files = all_columns(options.files)
    facts = facts_of(files)
    if options.check:
        check(files)
    rows = []
    for name, value in facts.items():
        text = f"{value:,}" if isinstance(value, int) else value
        rows.append((name.replace("_", " "), text))
    Table(("", ""), rows).show()
    values = first_rows(files, options.rows)
    head = [f"row {number}" for number in range(max(map(len, values.values())))]
    Table(("column", "type", *head), [(name, kind, *values[name]) for name, kind in files.types().items()]).show()
    if options.check:
        print(f"all {len(files.blocks):,} blocks can be read")
    return 0


def check(files: Files) -> None:
    """Reads all blocks, and decodes their images; raises DataError after a line for each that fails."""
    problems = [
        problem for problem in of_each(lambda block: problem_of(files, block), files.blocks).values() if problem
    ]
    for problem in problems:
        print(problem)
    if problems:
        raise DataError(f"{len(problems):,} of {len(files.blocks):,} blocks cannot be read")


def problem_of(files: Files, block: Block) -> str:
    """What is wrong with a block; "": nothing."""
    try:
        columns = files.read(block)
    except DataError as error:
        return str(error)
    if files.kind != "images":
        return ""
    for content in columns.get("image", ()):
        problem = problem_of_image(content)
        if problem:
            return f"{block.name}: {problem}"
    return ""


def problem_of_image(content: bytes) -> str:
    """What is wrong with an encoded image; "": nothing."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it logs each of them
    import tensorflow as tf

    from ringtrain.data import image_files

    try:
        tf.io.decode_image(content)
    except tf.errors.OpError as error:
        return image_files.text_of(error)
    return ""


def first_rows(files: Files, num_rows: int) -> dict[str, list[str]]:
    """The first rows by column, as text; of values that no model can be given, what is wrong with them."""
    shown: dict[str, list[str]] = {name: [] for name in files.types()}
    for block in files.blocks[:num_rows]:
        try:
            for name, column in files.read(block).items():
                shown[name] += [text_of(value) for value in column]
        except DataError as error:
            print(error)
            break
    return {name: [*texts, *[""] * num_rows][:num_rows] for name, texts in shown.items()}


def all_columns(given: Sequence[str]) -> Files:
    """Files with all their columns; raises DataError if they cannot be read."""
    return opened(files_of(given), None)


def facts_of(files: Files) -> dict[str, Any]:
    """Numbers of files, bytes, blocks and rows."""
    sizes = [block.num_rows for block in files.blocks]
    different = {block.file for block in files.blocks}
    return {
        "kind": files.kind,
        "files": len(different),
        "bytes": sum(file.size for file in different),
        "blocks": len(sizes),
        "rows": sum(sizes),
        "rows_of_a_block": f"{min(sizes):,} to {max(sizes):,}",
    }


def text_of(value: Any) -> str:
    """A value of a row, in a few letters."""
    if isinstance(value, bytes) and (len(value) > MAX_LETTERS or not value.isascii()):
        return f"{len(value):,} bytes"
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, np.ndarray):
        text = np.array2string(np.asarray(value), threshold=4)
    else:
        text = str(value)
    text = " ".join(text.split())
    if len(text) <= MAX_LETTERS:
        return text
    return f"{text[: MAX_LETTERS - 3]}..."
