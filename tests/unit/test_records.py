"""Rows of files: their order, what ranks read of them, and what is said of files that cannot be read."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain
from ringtrain import from_rank_0
from ringtrain.data import blocks
from ringtrain.data.blocks import BlockCache, num_bytes
from ringtrain.data.parts import Parts
from ringtrain.data.records import RecordRows, Records
from ringtrain.errors import DataError


def example(**features: Any) -> bytes:
    kinds = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
    made = {name: tf.train.Feature(**{kinds[type(values[0])]: {"value": values}}) for name, values in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


def written(path: Path, numbers: Any) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in map(int, numbers):
            writer.write(example(id=[number], x=[number / 2, 2.0 * number], text=[b"row %d" % number]))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """203 rows in three files, of which one has no records' name."""
    monkeypatch.setattr(blocks, "MAX_ROWS", 20)
    for file, numbers in enumerate(np.split(np.arange(203), [50, 120])):
        written(tmp_path / f"part-{file}.tfrecord", numbers)
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def records(files: Any, **more: Any) -> Records:
    return Records(files, inputs={"x": "x", "text": "text"}, target="id", **more)


def counted(cache: BlockCache) -> list[int]:
    """Numbers of the blocks that a cache reads from now on."""
    read, numbers = cache.read, []

    def counting(number: int) -> Any:
        numbers.append(number)
        return read(number)

    cache.read = counting
    return numbers


def test_rows_are_those_of_the_files(folder: Path) -> None:
    rows = records(str(folder / "*.tfrecord"), transform=lambda x, y: ({**x, "more": x["x"] + 1}, y))
    assert len(rows) == 203
    found: list[int] = []
    for x, y in rows.dataset(32, seed=1):
        ids = y.numpy()
        np.testing.assert_array_equal(x["x"], np.stack([ids / 2, 2.0 * ids], 1).astype(np.float32))
        np.testing.assert_array_equal(x["more"], x["x"] + 1)
        assert [text.decode() for text in x["text"].numpy()] == [f"row {number}" for number in ids]
        found += ids.tolist()
    assert sorted(found) == list(range(203)) and found != sorted(found)
    in_order = np.concatenate([y.numpy() for _, y in rows.dataset(32)])
    assert in_order.tolist() == list(range(203))
    shuffled = rows.dataset(32, seed=1)
    first, second = (np.concatenate([y.numpy() for _, y in shuffled]).tolist() for _ in range(2))
    of_second = np.concatenate([y.numpy() for _, y in rows.dataset(32, seed=1, epoch=1)]).tolist()
    assert first == found != second == of_second


def test_classes_have_weights(folder: Path) -> None:
    rows = RecordRows(
        Records(folder, inputs="x", target="id", transform=lambda x, y: (x, y % 2)), False, {0: 1.0, 1: 5.0}
    )
    _, _, weight = rows.rows(0, 4)
    assert weight.numpy().tolist() == [1, 5, 1, 5]


def test_the_order_is_that_of_any_number_of_ranks_and_goes_on_within_an_epoch(folder: Path) -> None:
    from ringtrain.data.arrays import RowBatches

    def ids(rank: int, size: int, first_step: int = 0) -> tuple[list[list[int]], int]:
        rows = records(folder)
        rows.lanes = 4
        batches = RowBatches(RecordRows(rows, shuffle=True), 32, Parts.of_rank(rank, size), 3)
        read = counted(rows.cache)
        found = [batch if batches.is_even else batch[1] for batch in batches(1, first_step)]
        return [y.numpy().tolist() for _, y in found], len(read)

    whole, num_read = ids(0, 1)
    for size in (2, 3):
        parts = [ids(rank, size) for rank in range(size)]
        joined = [[*itertools.chain(*step)] for step in zip(*(found for found, _ in parts), strict=True)]
        assert joined == whole
        assert max(number for _, number in parts) < num_read
    late, num_late = ids(0, 1, first_step=5)
    assert late == whole[5:] and num_late < num_read


@pytest.mark.parametrize("batch_size", [8, 512])
def test_texts_count_in_memory_and_blocks_are_read_once(
    tmp_path: Path, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 MB of texts in blocks of 256 kB, with 8 MB of memory, of which batches of 512 take 4 MB."""
    monkeypatch.setattr(blocks, "MAX_BYTES", 256 << 10)
    with tf.io.TFRecordWriter(str(tmp_path / "texts.tfrecord")) as writer:
        for number in range(3000):
            writer.write(example(text=[b"%08d" % number * 1024]))
    rows = Records(tmp_path, inputs="text", memory_mb=8)
    assert 8_192 < rows.bytes_of_row < 8_300
    read, seen = counted(rows.cache), 0
    for (texts,) in rows.dataset(batch_size, seed=0):
        seen += len(texts)
        kept = [future.result() for future in [*rows.cache._blocks.values()] if future.done()]
        # Besides the limit, what one batch needs, and what was read while it was made.
        assert sum(map(num_bytes, kept)) < (8 << 20) + 2 * rows.lanes * (256 << 10)
    assert seen == 3000 and len(rows.blocks) > 90
    assert len(read) <= 1.5 * len(rows.blocks)


def test_nothing_stays_of_records_that_are_deleted(folder: Path) -> None:
    def readers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("ringtrain-blocks")}

    before = readers()
    rows = records(folder)
    for _ in rows.dataset(32, seed=0):
        pass
    assert readers() - before
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    for thread in readers() - before:
        thread.join(30)
    assert alive() is None and not readers() - before


def test_one_process_evaluates_rows_of_files(folder: Path) -> None:
    """As several ranks do, which divide the rows."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile("sgd", "mae")
    rows = Records(folder, inputs="x", target="id")
    expected = np.arange(203) * 2.5
    for given in (rows, from_rank_0(rows), lambda rank, size: rows):
        assert ringtrain.predict(model, given, verbose=0)[:, 0].tolist() == expected.tolist()
        error = ringtrain.evaluate(model, given, batch_size=7, verbose=0)
        assert error == pytest.approx(np.mean(expected - np.arange(203)))


def test_what_cannot_be_read_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    first = folder / "part-0.tfrecord"
    content = bytearray(first.read_bytes())
    (tmp_path / "short").write_bytes(content[:700])
    content[930] ^= 1
    (tmp_path / "changed").write_bytes(content)
    (tmp_path / "parquet").write_bytes(b"PAR1")
    (tmp_path / "other").write_text("no records are in this file, but a text\n")
    wrong: dict[str, dict[str, Any]] = {
        "got no files": {"files": []},
        "no file .*/nothing-": {"files": tmp_path / "nothing-*"},
        "none://bucket/rows: ": {"files": "none://bucket/rows"},
        "expected files of one kind": {"files": [first, tmp_path / "parquet"]},
        "part-0.tfrecord: has no feature z: it has id, text, x": {"inputs": "z"},
        r"got \['x', 3\] in inputs or target": {"inputs": ["x", 3]},
        "a weight without a target": {"weight": "id"},
        "memory_mb 0": {"memory_mb": 0},
        "changed: records from 0 on cannot be read: corrupted record": {"files": tmp_path / "changed"},
        "short: record 10: the file ends within it": {"files": tmp_path / "short"},
        "other: record 0: the file ends within it, or a length is damaged": {"files": tmp_path / "other"},
        "transform has random_uniform, which would depend": {"transform": lambda x: x + tf.random.uniform([])},
    }
    for message, arguments in wrong.items():
        with pytest.raises((DataError, tf.errors.OpError), match=message) as error:
            for _ in Records(**{"files": first, "inputs": "x", **arguments}).dataset(8):
                pass
        assert isinstance(error.value, tf.errors.OpError) or "\n" not in str(error.value)
    for batch_size in (0, 2.5, "a"):
        with pytest.raises(DataError, match="expected an integer of at least 1"):
            Records(first, "x").dataset(batch_size)


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)

    def table(rows: int, **more: Any) -> Any:
        columns = {
            "a": draw.random(rows),
            "b": draw.integers(0, 9, rows).astype(np.int32),
            "text": [f"t{number}" for number in range(rows)],
            "kind": pa.array(["x", "y"] * (rows // 2) + ["x"] * (rows % 2)).dictionary_encode(),
            "vector": list(draw.random((rows, 3))),
        }
        return pa.table({**columns, **more})

    tables = [table(70), table(0), table(45)]
    for number, one in enumerate(tables):
        pq.write_table(one, tmp_path / f"rows-{number}.parquet", row_group_size=20, write_page_checksum=True)
    inputs = {"numbers": ["a", "b"], "vector": "vector", "text": "text", "kind": "kind"}
    rows = Records(tmp_path, inputs=inputs, target="b", weight="a")
    x, y, weight = rows.dataset(200).get_single_element()
    expected = pa.concat_tables([tables[0], tables[2]]).to_pandas()
    np.testing.assert_array_equal(x["numbers"], expected[["a", "b"]].to_numpy(np.float32))
    np.testing.assert_array_equal(x["vector"], np.stack(expected["vector"]).astype(np.float32))
    assert x["text"].numpy().astype(str).tolist() == expected["text"].tolist()
    assert x["kind"].numpy().astype(str).tolist() == expected["kind"].tolist()
    np.testing.assert_array_equal(y, expected["b"])
    np.testing.assert_array_equal(weight, expected["a"].to_numpy(np.float32))
    assert {block.num_rows for block in rows.blocks} == {20, 10, 5}

    def message(name: str, **columns: Any) -> str:
        pq.write_table(pa.table(columns), tmp_path / name)
        with pytest.raises((DataError, tf.errors.OpError)) as error:
            list(Records([tmp_path / "rows-0.parquet", tmp_path / name], inputs="a").dataset(500))
        return str(error.value)

    assert "other.parquet: has no column a: it has c" in message("other.parquet", c=[1.0])
    assert "texts.parquet: row group 0: a has rows of shape () and object, expected () and float32" in message(
        "texts.parquet", a=["1"]
    )
    assert "nulls.parquet: row group 0: column a: 1 of 2 values are null" in message("nulls.parquet", a=[1.0, None])
    content = bytearray((tmp_path / "rows-0.parquet").read_bytes())
    content[60:80] = bytes(20)
    (tmp_path / "damaged.parquet").write_bytes(content)
    with pytest.raises((DataError, tf.errors.OpError), match=r"damaged.parquet: row group 0 cannot be read"):
        list(Records(tmp_path / "damaged.parquet", inputs="a").dataset(500))
    (tmp_path / "cut.parquet").write_bytes(content[:500])
    with pytest.raises(DataError, match=r"cut.parquet: cannot be read as Parquet"):
        Records(tmp_path / "cut.parquet", inputs="a")
    pq.write_table(pa.table({"a": [[1.0], [1.0, 2.0]]}), tmp_path / "lists.parquet")
    with pytest.raises((DataError, tf.errors.OpError), match="column a: lists of several lengths"):
        list(Records(tmp_path / "lists.parquet", inputs="a").dataset(500))


def test_fields_of_columns(tmp_path: Path) -> None:
    """As in image sets that a hub keeps as Parquet."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in (1, 2):
        images = [{"bytes": b"%d" % part, "path": path} for path in (None, "a.png")]
        (tmp_path / "rows").mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": images, "a.b": [1, 2]}), tmp_path / "rows" / f"{part}.parquet")
    rows = Records(tmp_path / "rows", inputs={name: name for name in ("image.bytes", "a.b")}, target="a.b")
    read = [(x, y) for x, y in rows.dataset(1).unbatch().as_numpy_iterator()]
    assert [(x["image.bytes"], y) for x, y in read] == [(b"1", 1), (b"1", 2), (b"2", 1), (b"2", 2)]
    with pytest.raises(DataError, match=r"has no column image: it has image.bytes, image.path, a.b"):
        Records(tmp_path / "rows", "image")
    with pytest.raises(DataError, match=r"image.path: 1 of 2 values are null"):
        Records(tmp_path / "rows", "image.path")


def test_ranks_with_other_rows_in_files_of_equal_size_have_other_checksums(tmp_path: Path) -> None:
    """The first and the last row are equal."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, middle in ((1, 5.0), (2, 6.0)):
        table = pa.table({"x": [1.0, 3.0, middle]})
        (tmp_path / f"parquet-{number}").mkdir()
        pq.write_table(table, tmp_path / f"parquet-{number}" / "1", row_group_size=3)
        pq.write_table(table.slice(0, 1), tmp_path / f"parquet-{number}" / "2")
        (tmp_path / f"records-{number}").mkdir()
        for name, values in (("1", table["x"].to_pylist()), ("2", [1.0])):
            with tf.io.TFRecordWriter(str(tmp_path / f"records-{number}" / name)) as writer:
                for value in values:
                    writer.write(example(x=[value]))
    for kind in ("parquet", "records"):
        one, other = (RecordRows(Records(tmp_path / f"{kind}-{number}", "x"), shuffle=True) for number in (1, 2))
        again = RecordRows(Records(tmp_path / f"{kind}-1", "x"), shuffle=True)
        assert one.checksum() == again.checksum() != other.checksum()


LEFT = """
import sys, time
from ringtrain import Records
rows = Records(sys.argv[1], "x", memory_mb=1)
read = rows.cache.read
rows.cache.read = lambda number: read(number) if number < 2 else EXPRESSION
batches = iter(rows.dataset(8))
print("read", next(batches)[0].shape)
"""


@pytest.mark.parametrize("expression", ["time.sleep(3)", "1 / 0"])
def test_a_process_ends_while_blocks_are_read(folder: Path, expression: str) -> None:
    """An iterator is left that waits for a block, or reads on after errors."""
    command = [sys.executable, "-c", LEFT.replace("EXPRESSION", expression), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0 and "read (8, 2)" in ended.stdout, ended.stderr[-3000:]
