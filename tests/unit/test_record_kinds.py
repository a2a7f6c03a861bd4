"""Rows of all kinds of files, on disk and behind a URL, with errors that pass."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.data import FitArguments, blocks, data_files, splits_of
from ringtrain.data.records import RecordRows, Records
from ringtrain.errors import DataError

NUM = 60
COLUMNS = {"parquet": ("x", "y"), "tfrecord": ("x", "y"), "images": ("image", "class")}


def write(kind: str, folder: Path) -> Path:
    """Writes 60 rows of a kind into a folder, in files of 20."""
    folder.mkdir()
    for part in np.split(np.arange(NUM), 3):
        path = folder / f"part-{part[0]:02}"
        if kind == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.table({"x": part / 2.0, "y": part}), path, row_group_size=7)
        elif kind == "tfrecord":
            with tf.io.TFRecordWriter(str(path)) as writer:
                for row in part.tolist():
                    x = tf.train.Feature(float_list={"value": [row, 0.5]})
                    features = {"x": x, "y": tf.train.Feature(int64_list={"value": [row]})}
                    writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
        else:
            for row in part.tolist():
                image = folder / f"class-{row % 3}" / f"{row:03}.jpg"
                image.parent.mkdir(exist_ok=True)
                image.write_bytes(tf.io.encode_jpeg(np.full((8, 8, 3), row, np.uint8)).numpy())
    return folder


def passes(files: Any, kind: str, **more: Any) -> list[Any]:
    inputs, target = COLUMNS[kind]
    rows = Records(files, inputs, target, **more).dataset(16, seed=3)
    return [(x.tolist(), y.tolist()) for x, y in rows.as_numpy_iterator()]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_ROWS", 7)
    monkeypatch.setattr(data_files, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def store() -> Iterator[Any]:
    """A store of which each file cannot be opened once."""
    fsspec = pytest.importorskip("fsspec")
    MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem

    class Store(MemoryFileSystem):
        protocol, store, pseudo_dirs, cachable = ("odd",), {}, [""], False
        requests, error = 0, None
        asked: set[str] = set()  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.replace("odd://", "memory://"))

        def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
            Store.requests += 1
            if Store.error:
                raise Store.error
            if mode != "rb":
                return super().open(path, mode, **more)
            if path not in Store.asked:
                Store.asked.add(path)
                raise OSError("slow down")
            return io.BytesIO(super().open(path).getvalue())  # that of fsspec has one position for all threads

        @classmethod
        def upload(cls, folder: Path) -> None:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    cls().pipe_file(f"/rows/{path.relative_to(folder)}", path.read_bytes())

    fsspec.register_implementation("odd", Store, clobber=True)
    yield Store
    Store.store.clear()


@pytest.mark.parametrize("kind", COLUMNS)
def test_files_behind_a_url_are_read_in_spite_of_errors_that_pass(kind: str, tmp_path: Path, store: Any) -> None:
    folder = write(kind, tmp_path / "rows")
    store.upload(folder)
    store().pipe_file("/rows/_SUCCESS", b"")
    local = passes(folder, kind)
    assert sorted(itertools.chain.from_iterable(y for _, y in local)) == sorted(
        row % 3 if kind == "images" else row for row in range(NUM)
    )
    assert passes("odd://rows", kind) == local
    if kind != "images":
        assert passes("odd://rows/part*", kind) == local
    assert store.requests > 20
    if kind != "images":
        rows = Records("odd://rows", *COLUMNS[kind])
        path = next(path for path in store.store if "part-20" in path)
        store().pipe_file(path, store.store[path].getvalue()[:60])
        with pytest.raises(tf.errors.OpError, match=r"odd://.*20.* cannot be read"):
            list(rows.dataset(32))
    store.error, store.requests = PermissionError("the token has expired"), 0
    with pytest.raises(DataError, match=r"^odd://.*cannot be read: the token has expired$"):
        Records("odd://rows", *COLUMNS[kind])
    assert store.requests <= NUM  # each file once


def test_files_of_a_folder_or_pattern_count_once(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows" / "sub").mkdir(parents=True)
    for path in (tmp_path / "rows" / "a", tmp_path / "rows" / "sub" / "b"):
        pq.write_table(pa.table({"x": [1.0, 2.0]}), path)
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    (tmp_path / "rows" / "dataset_info.json").touch()
    assert len(Records(tmp_path / "rows", "x")) == 4
    (tmp_path / "rows" / "dataset_info.json").unlink()
    for pattern in ("rows", "rows/**", "rows/**/*", "link"):
        assert len(Records(tmp_path / pattern, "x")) == 4
    (tmp_path / "rows" / "sub" / "loop").symlink_to(tmp_path / "rows")
    assert len(Records(tmp_path / "rows", "x")) == 4
    for twice in ([tmp_path / "rows"] * 2, [tmp_path / "rows", tmp_path / "rows" / "a"]):
        with pytest.raises(DataError, match=r"/rows/a is named twice"):
            Records(twice, "x")
    pq.write_table(pa.table({"number": [1.0], "text": ["a"], "list": [[[1.0]]]}), tmp_path / "kinds")
    for columns in (["number", "text"], ["number", "list"]):
        with pytest.raises(DataError, match="cannot be one array"):
            Records(tmp_path / "kinds", columns)


def test_classes_of_folders_have_names(tmp_path: Path) -> None:
    folder = write("images", tmp_path / "rows")
    (folder / "_other").symlink_to(folder / "class-2")
    rows = Records(folder, "path", "class")
    assert rows.class_names == ["_other", "class-0", "class-1", "class-2"] and len(rows) == NUM + NUM // 3
    held_out = Records(folder / "class-1", "path", "class", class_names=rows.class_names)
    assert {*next(iter(held_out.dataset(20)))[1].numpy().tolist()} == {2}
    with pytest.raises(DataError, match="is in none of the folders a, b"):
        Records(folder, "path", "class", class_names=["a", "b"])
    for other in (None, ["class-1"]):
        with pytest.raises(DataError, match="give both the same class_names"):
            splits_of(
                FitArguments(x=rows, validation_data=Records(folder / "class-1", "path", "class", class_names=other)), 4
            )
    assert len(splits_of(FitArguments(x=rows, validation_data=held_out), 4)[1]) == NUM // 3


def test_images_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    good = tf.io.encode_png(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).numpy()
    for number in range(12):
        path = tmp_path / "rows" / f"class-{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes({3: b"", 8: good[:40]}.get(number, good))

    def transform(images: Any, labels: Any) -> Any:
        return tf.map_fn(tf.io.decode_png, images, fn_output_signature=tf.uint8), labels

    rows = Records(tmp_path / "rows", "image", "class", transform=transform)
    for seed, batch_size in ((None, 1), (3, 4)):
        with pytest.raises(tf.errors.OpError, match=r"(08|03).png: transform fails: "):
            list(rows.dataset(batch_size, seed))


def test_the_number_of_lanes_follows_from_memory_and_is_a_part_of_the_training(tmp_path: Path) -> None:
    """A resume with another number would train rows twice."""
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        for length in [2_000] * 7 + [400_000] * 21:
            text = tf.train.Feature(bytes_list={"value": [bytes(length)]})
            writer.write(tf.train.Example(features=tf.train.Features(feature={"bin": text})).SerializeToString())
    records = [Records(tmp_path / "a", "bin", memory_mb=size) for size in (512, 512, 8)]
    assert [one.lanes for one in records] == [48, 48, 1]  # the largest block decides
    checksums = [RecordRows(one, shuffle=True).checksum() for one in records]
    assert checksums[0] == checksums[1] != checksums[2]


FIT = """
import sys, keras, ringtrain
from ringtrain.data import blocks
blocks.MAX_ROWS = 7
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("adam", "mse")
ringtrain.fit(model, ringtrain.Records(sys.argv[1], "x", "y"), batch_size=16, verbose=0)
"""


def test_fit_ends_in_one_line_that_names_a_damaged_block(tmp_path: Path) -> None:
    folder = write("tfrecord", tmp_path / "rows")
    content = bytearray((folder / "part-20").read_bytes())
    content[len(content) // 20 * 9 + 20] ^= 255
    (folder / "part-20").write_bytes(content)
    command = [sys.executable, "-c", FIT, str(folder)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    line = r"^ringtrain\.errors\.DataError: .*part-20: records from 7 on cannot be read: corrupted record at \d+$"
    assert len(re.findall(line, ended.stderr, re.MULTILINE)) == 1, ended.stderr[-3000:]
