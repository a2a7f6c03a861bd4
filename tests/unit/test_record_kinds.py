"""Rows of all kinds of files, on disk and behind a URL: errors that pass, indices, and the cache on disk."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringtrain import cli
from ringtrain.data import FitArguments, blocks, data_files, inputs
from ringtrain.data.range_cache import LOCK, RangeCache
from ringtrain.data.records import RecordRows, Records
from ringtrain.errors import DataError

NUM = 60
COLUMNS = {"parquet": ("x", "y"), "tfrecord": ("x", "y"), "tar": ("npy", "cls"), "images": ("image", "class")}


def tar_of(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value))
    return file.getvalue()


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
        elif kind == "tar":
            rows = {f"{row:03}.npy": npy(np.float32([row, 1])) for row in part.tolist()}
            rows |= {f"{row:03}.cls": b"%d" % row for row in part.tolist()}
            tar_of(path.with_suffix(".tar"), dict(sorted(rows.items())))
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
    """A store that fails at each request once: it raises, or its answer has less than it was asked for."""
    fsspec = pytest.importorskip("fsspec")
    MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem

    class Store(MemoryFileSystem):
        protocol, store, pseudo_dirs, cachable = ("odd",), {}, [""], False
        requests, num_bytes, faults, error = 0, 0, True, None
        asked: set[Any] = set()  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.replace("odd://", "memory://"))

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
            Store.requests += 1
            if Store.error:
                raise Store.error
            random.random()  # as a store's library that waits
            is_fault = Store.faults and (path, start, end) not in Store.asked
            Store.asked.add((path, start, end))
            if is_fault and Store.requests % 2:
                raise OSError("slow down")
            content = super().cat_file(path, start, end, **more)
            Store.num_bytes += len(content)
            return content[:-1] if is_fault else content

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
    random.seed(1)
    rows = Records("odd://rows", *COLUMNS[kind])
    assert random.random() == random.Random(1).random()

    path = next(path for path in store.store if "part-20" in path or "020" in path)
    store().pipe_file(path, store.store[path].getvalue()[:-1])
    with pytest.raises(tf.errors.OpError, match=r"odd://.*20.*: has changed since it was opened"):
        list(rows.dataset(32))
    store.error, store.requests = PermissionError("the token has expired"), 0
    with pytest.raises(DataError, match=r"^odd://.*cannot be read: the token has expired$"):
        Records("odd://rows", *COLUMNS[kind])
    assert store.requests <= NUM  # each file once


@pytest.mark.parametrize("kind", COLUMNS)
def test_what_is_kept_on_disk_is_read_once(kind: str, tmp_path: Path, store: Any) -> None:
    store.faults = False
    store.upload(write(kind, tmp_path / "rows"))
    once, fetched = passes("odd://rows", kind, cache=tmp_path / "cache"), store.num_bytes
    assert fetched > 0
    assert passes("odd://rows", kind, cache=tmp_path / "cache") == once
    assert store.num_bytes == fetched
    # A damaged file of the cache counts as missing.
    damaged = max((tmp_path / "cache").rglob("??/*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert passes("odd://rows", kind, cache=tmp_path / "cache") == once
    assert fetched < store.num_bytes <= fetched + damaged.stat().st_size


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("??/*"))


def test_the_cache_keeps_to_its_limit(tmp_path: Path) -> None:
    """What was used since it was opened stays, older contents go, and a process that was killed leaves nothing."""
    cache = RangeCache(tmp_path, 10_000, time.time() - 100)
    for number in range(30):
        cache.put(f"old {number}", bytes(996))
        assert sizes(tmp_path) <= 10_000
    assert [cache.get(f"old {number}") is not None for number in range(12)] == [True] * 10 + [False] * 2
    (tmp_path / "unfinished").write_bytes(bytes(5000))
    later = RangeCache(tmp_path, 10_000, time.time() + 100)
    later.put("new", bytes(1996))
    assert later.get("new") == bytes(1996) and sizes(tmp_path) <= 10_000
    assert not (tmp_path / "unfinished").exists()
    later.put("too large", bytes(20_000))
    assert later.get("too large") is None and later.get("new") is not None
    (tmp_path / LOCK).write_text("no number")
    later.put("again", bytes(96))
    assert later.get("again") is not None and sizes(tmp_path) <= 10_000


PUTS = """
import sys, time
from pathlib import Path
from ringtrain.data.range_cache import RangeCache
cache = RangeCache(Path(sys.argv[1]), 50_000, time.time())
for number in range(200):
    key = f"{sys.argv[2] if number % 2 else 'both'} {number}"
    cache.put(key, key.encode() * 100)
    found = cache.get(key)
    assert found in (None, key.encode() * 100), key
"""


def test_processes_share_a_cache(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", PUTS, str(tmp_path), str(number)]) for number in range(3)]
    largest = 0
    while any(process.poll() is None for process in started):
        try:
            largest = max(largest, sizes(tmp_path))
        except FileNotFoundError:
            continue
    assert [process.returncode for process in started] == [0, 0, 0]
    assert 40_000 < sizes(tmp_path) <= 50_000 >= largest


FULL = """
import resource, sys
from pathlib import Path
from ringtrain.data.range_cache import RangeCache
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
cache = RangeCache(Path(sys.argv[1]), 10**6, 0)
cache.put("key", bytes(200))
cache.put("other key", bytes(200))
cache.put("small", b"1")
assert cache.get("key") is None and cache.get("small") == b"1"
"""


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, store: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is kept, in one line: a folder that is a file, and a disk that takes no file of this size."""
    store.faults = False
    store.upload(write("tfrecord", tmp_path / "rows"))
    expected = passes("odd://rows", "tfrecord")
    (tmp_path / "file").touch()
    assert passes("odd://rows", "tfrecord", cache=tmp_path / "file") == expected
    assert capfd.readouterr().err.count("file/ringtrain-cache: could not keep data: ") == 1
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "full")], stderr=subprocess.PIPE, text=True, check=True
    )
    assert ended.stderr.count("full: could not keep data: File too large") == 1
    assert sizes(tmp_path / "full") < 150


@pytest.mark.parametrize("kind", ["tfrecord", "tar"])
def test_with_an_index_files_are_not_read_before_training(kind: str, tmp_path: Path, store: Any) -> None:
    store.faults = False
    folder = write(kind, tmp_path / "rows")
    store.upload(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    Records("odd://rows", *COLUMNS[kind])
    without = store.num_bytes
    assert without > size
    assert cli.main(["data", "index", "odd://rows"]) == 0
    store.num_bytes = 0
    assert passes("odd://rows", kind) == passes(folder, kind)
    opened = store.num_bytes
    store.num_bytes = 0
    Records("odd://rows", *COLUMNS[kind])
    assert store.num_bytes < without - size / 3 and store.num_bytes < opened
    name = min(name for name in store.store if name.endswith(".idx"))  # of the first file, which is read when opened
    right = store.store[name].getvalue()
    checksum = RecordRows(Records("odd://rows", *COLUMNS[kind])).checksum()
    store().rm(name)
    assert RecordRows(Records("odd://rows", *COLUMNS[kind])).checksum() == checksum
    for wrong in (b"v1.2 1\nnpy 512 999999999 a.npy\n", b"0 7\n", b"nothing\n", b"v1.2 0\n", right[:-9]):
        store().pipe_file(name, wrong)
        with pytest.raises(DataError, match="is not the index of this file"):
            passes("odd://rows", kind)
    assert cli.main(["data", "index", "odd://rows"]) == 0
    assert store.store[name].getvalue() == right


@pytest.mark.parametrize("kind", ["tfrecord", "tar"])
@pytest.mark.parametrize("num_rows", [5, 20])
def test_the_index_of_another_version_of_a_file_is_not_believed(
    kind: str, num_rows: int, tmp_path: Path, store: Any
) -> None:
    """With files of equal size, that has more rows or fewer."""
    store.faults = False
    paths = [tmp_path / f"{number}-{kind}" for number in range(2)]
    for path, rows in zip(paths, (10, num_rows), strict=True):
        if kind == "tar":
            tar_of(path, {f"{row}.{column}": b"1" * 2 for row in range(rows) for column in ("cls", "txt")})
        else:
            x = tf.train.Feature(bytes_list={"value": [bytes(71)]})
            example = tf.train.Example(features=tf.train.Features(feature={"cls": x})).SerializeToString()
            with tf.io.TFRecordWriter(str(path)) as writer:
                for _ in range(rows):
                    writer.write(example if rows == 10 else bytes((len(example) + 16) * 10 // rows - 16))
    content = [path.read_bytes() for path in paths]
    size = max(map(len, content))
    if kind == "tfrecord":
        assert len(content[0]) == len(content[1]), [*map(len, content)]
    store().pipe_file("/rows/part", content[1])
    assert cli.main(["data", "index", "odd://rows"]) == 0
    store().pipe_file("/rows/part", content[0].ljust(size, b"\0"))
    with pytest.raises((DataError, tf.errors.OpError), match=r"is not the index of this file|cannot be read"):
        list(Records("odd://rows/part", "cls").dataset(4))


def damaged_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b"ustar", 3000)
    content[place - 200 : place - 100] = b"?" * 100
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1800])


def sparse(path: Path) -> None:
    (path.parent / "1.npy").write_bytes(npy(1))
    with open(path.parent / "1.npy", "r+b") as file:
        file.truncate(1 << 20)
    subprocess.run(["tar", "-S", "-cf", path, "-C", path.parent, "1.npy"], check=True)


def empty_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2048:4096] = bytes(2048)
    path.write_bytes(content)


def linked(path: Path) -> None:
    tar_of_list(path, ["1.npy", "1.cls"])
    with tarfile.open(path, "a") as file:
        member = tarfile.TarInfo("2.npy")
        member.type, member.linkname = tarfile.LNKTYPE, "1.npy"
        file.addfile(member)


WRONG_TARS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a name twice": (lambda path: tar_of_list(path, ["1.npy", "1.cls", "1.cls"]), r"has 1.cls twice"),
    "a row in two places": (
        lambda path: tar_of_list(path, ["1.npy", "2.cls", "1.cls"]),
        r"members of 1 are in two places",
    ),
    "a column is missing": (lambda path: tar_of_list(path, ["1.npy", "1.cls", "2.npy"]), r": 2 has no cls: it has npy"),
    "damaged header": (damaged_header, r"is damaged or cut at byte \d"),
    "cut": (cut, r"cannot be read as tar: .*unexpected end of data"),
    "cut between rows": (
        lambda path: path.write_bytes(path.read_bytes()[: 4 * 1024]) and None,
        r"is damaged or cut at",
    ),
    "a sparse member": (sparse, r"1.npy is sparse"),
    "a link": (linked, r"2.npy is a link"),
    "no number": (lambda path: tar_of(path, {"1.npy": npy(1), "1.cls": b"dog"}), r"records from 0 on: cls: .* int64: "),
    "no array": (lambda path: tar_of(path, {"1.npy": b"NUMPY", "1.cls": b"1"}), r"npy: cannot be read as array"),
    "a ZIP": (lambda path: tar_of(path, {"1.npy": b"PK\3\4", "1.cls": b"1"}), r"npy: cannot be read as array"),
    "half a header": (
        lambda path: tar_of(path, {"1.npy": npy(1)[:40], "1.cls": b"1"}),
        r"npy: cannot be read as array",
    ),
    "an empty page": (empty_page, r"is damaged or cut at byte 2,048"),
    "no row": (lambda path: tar_of(path, {"README": b"nothing"}), r"no row in 1 files"),
}


def tar_of_list(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "w") as file:
        for name in names:
            content = npy(1) if name.endswith("npy") else b"1"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("name", WRONG_TARS)
def test_a_wrong_tar_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    path = write("tar", tmp_path / "rows") / "part-00.tar"
    change, message = WRONG_TARS[name]
    change(path)
    with pytest.raises(DataError, match=message) as error:
        Records(path, "npy", "cls")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def damage(kind: str, folder: Path) -> int:
    """Damages the third row of the second file; returns the number of rows of its block."""
    path = sorted(folder.iterdir())[1]
    content = bytearray(path.read_bytes())
    if kind == "tar":
        content[content.index(b"NUMPY", content.index(b"022.npy"))] = 0
    elif kind == "tfrecord":
        content[len(content) // 20 * 2 + 20] ^= 255
    else:
        content[60:80] = bytes(20)
    path.write_bytes(content)
    return 7


@pytest.mark.parametrize("kind", ["parquet", "tfrecord", "tar"])
def test_damaged_blocks_are_skipped_and_counted(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In training, if it is asked for; evaluation fails, and so does a file that has changed."""
    folder = write(kind, tmp_path / "rows")
    num_damaged = damage(kind, folder)
    inputs, target = COLUMNS[kind]
    rows = Records(folder, inputs, target, on_error="skip")
    seen = [y for _, of_batch in passes_of(rows, 3) for y in of_batch]
    assert len(seen) == NUM and {*range(NUM)} - {*seen} == {*range(20, 20 + num_damaged)}
    assert len(RecordRows(rows).skipped) == num_damaged
    printed = capfd.readouterr().err
    assert len(re.findall(r"ringtrain: skipped .*part-20.*: 7 rows: ", printed)) == 1
    passes_of(rows, 4)
    assert "skipped" not in capfd.readouterr().err
    for failing, seed in ((rows, None), (Records(folder, inputs, target), 3)):
        with pytest.raises(tf.errors.OpError, match=r"part-20.* (from 0 on|row group 0)"):
            passes_of(failing, seed)
    fresh = Records(folder, inputs, target, on_error="skip")
    os.utime(sorted(folder.iterdir())[2], ns=(1, 1))
    with pytest.raises(tf.errors.OpError, match=r"part-40.*has changed"):
        passes_of(fresh, 3)


def passes_of(rows: Records, seed: int | None) -> list[Any]:
    return [(x.tolist(), y.tolist()) for x, y in rows.dataset(16, seed=seed).as_numpy_iterator()]


@pytest.mark.parametrize("kind", COLUMNS)
def test_data_are_shown_and_converted(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    folder = write(kind, tmp_path / "rows")
    assert cli.main(["data", "show", str(folder), "--check", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == NUM and {*COLUMNS[kind]} <= {*shown["columns"]}
    assert cli.main(["data", "show", str(folder), "--check"]) == 0
    assert COLUMNS[kind][0] in capsys.readouterr().out
    for seed in ([], ["--seed", "1"]):
        target = tmp_path / f"parquet{len(seed)}"
        words = ["data", "convert", str(folder), "--to", str(target), "--rows", "16", "--blocks", "2", *seed]
        assert cli.main(words) == 0
        assert cli.main(words) == 2  # it exists
        assert [path.name for path in sorted(target.iterdir())] == ["part-00000.parquet", "part-00001.parquet"]
        inputs, target_column = COLUMNS[kind]
        rows = [
            [
                (str(x), int(y))
                for batch in Records(files, inputs, target_column).dataset(60)
                for x, y in zip(*batch, strict=True)
            ]
            for files in (folder, target)
        ]
        assert sorted(rows[0]) == sorted(rows[1])
        assert (rows[0] == rows[1]) == (not seed)
    shutil.rmtree(target)


def test_files_of_other_kinds_are_not_converted(tmp_path: Path) -> None:
    folder = write("parquet", tmp_path / "rows")
    for words in (["index", str(folder)], ["show"], ["convert", str(folder)], ["show", str(tmp_path / "none")]):
        assert cli.main(["data", *words]) == 2


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
    with pytest.raises(DataError, match="got no files"):
        Records("", "x")


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
            inputs(
                FitArguments(x=rows, validation_data=Records(folder / "class-1", "path", "class", class_names=other)), 4
            )
    assert len(inputs(FitArguments(x=rows, validation_data=held_out), 4)[1]) == NUM // 3


def test_images_that_cannot_be_decoded_are_named_or_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the transform decodes them, and by `ringtrain data show --check`."""
    good = tf.io.encode_png(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).numpy()
    for number in range(12):
        path = tmp_path / "rows" / f"class-{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes({3: b"", 8: good[:40]}.get(number, good))
    bad = ["08.png", "03.png"]

    def transform(images: Any, labels: Any) -> Any:
        return tf.map_fn(tf.io.decode_png, images, fn_output_signature=tf.uint8), labels

    def passed(seed: int | None, batch_size: int, on_error: str) -> list[Any]:
        rows = Records(tmp_path / "rows", "image", "class", transform=transform, on_error=on_error)
        return [images.shape[0] for _ in range(2) for images, _ in rows.dataset(batch_size, seed)]

    for batch_size in (1, 5):
        assert sum(passed(3, batch_size, "skip")) == 24
        text = capfd.readouterr().err
        assert [text.count(f"{name}: transform fails: ") for name in bad] == [1, 1]
    for seed, on_error in ((None, "skip"), (3, "fail")):
        with pytest.raises(tf.errors.OpError, match=r'(08|03).png: transform fails: .*on_error="skip"'):
            passed(seed, 4, on_error)
    capfd.readouterr()
    assert cli.main(["data", "show", str(tmp_path / "rows"), "--check"]) == 2
    shown = capfd.readouterr()
    assert [line.partition(": ")[0][-6:] for line in shown.out.splitlines()] == bad
    assert "2 of 12 blocks cannot be read" in shown.err
    for name in bad:
        for path in tmp_path.rglob(name):
            path.unlink()
    assert cli.main(["data", "show", str(tmp_path / "rows"), "--check"]) == 0
    assert "all 10 blocks can be read" in capfd.readouterr().out


def test_a_transform_that_fails_for_whole_batches_says_so(tmp_path: Path) -> None:
    def transform(numbers: Any) -> Any:
        tf.debugging.assert_less(tf.shape(numbers)[0], 2)
        return numbers

    folder = write("tfrecord", tmp_path / "rows")
    with pytest.raises(tf.errors.OpError, match="transform fails for a batch, and for none of its rows"):
        list(Records(folder, "x", transform=transform).dataset(8))


def test_arrays_of_other_types_in_later_rows_are_refused(tmp_path: Path) -> None:
    """They would be cut or rounded."""
    pytest.importorskip("pyarrow")  # for `convert`
    tar_of(tmp_path / "named.tar", {"0.x.npy": npy([1.5, 2]), "0.y.cls": b"3"})
    x, y = next(iter(Records(tmp_path / "named.tar", "x.npy", "y.cls").dataset(1)))
    assert x.numpy().tolist() == [[1.5, 2]] and y.numpy().tolist() == [3]
    for number, arrays in enumerate(([np.uint8(1)] * 7 + [np.int64(300)], ["ab"] * 7 + ["abcdef"], [1, 2, 3.5])):
        path = tmp_path / f"{number}.tar"
        tar_of(path, {f"{row}.npy": npy(array) for row, array in enumerate(arrays)})
        with pytest.raises((DataError, tf.errors.OpError), match=r"npy.*(types|dtype|uint8|U)"):
            list(Records(path, "npy").dataset(8))
        assert cli.main(["data", "convert", str(path), "--to", str(tmp_path / "to")]) == 2


def test_a_record_that_begins_as_gzip_does_is_none(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "one")) as writer:
        text = tf.train.Feature(bytes_list={"value": [bytes(0x8B1F - 23)]})
        writer.write(tf.train.Example(features=tf.train.Features(feature={"x": text})).SerializeToString())
    assert (tmp_path / "one").read_bytes()[:2] == b"\x1f\x8b"
    assert len(Records(tmp_path / "one", "x")) == 1


def test_lanes_follow_from_the_largest_block(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", {f"{row}.bin": bytes(2_000 if row < 7 else 400_000) for row in range(28)})
    assert Records(tmp_path / "a.tar", "bin", memory_mb=8).lanes == 1
    assert Records(tmp_path / "a.tar", "bin", memory_mb=512).lanes == 48


def test_a_cache_deletes_nothing_else(tmp_path: Path, store: Any) -> None:
    store.faults = False
    store.upload(write("tfrecord", tmp_path / "rows"))
    for folder in ("own", "ringtrain-cache/other"):
        (tmp_path / "disk" / folder).mkdir(parents=True)
        (tmp_path / "disk" / folder / "file").write_bytes(bytes(10**5))
    once = passes("odd://rows", "tfrecord", cache=tmp_path / "disk", cache_gb=2e-6)
    assert once == passes(tmp_path / "rows", "tfrecord")
    assert len([*(tmp_path / "disk").rglob("file")]) == 2
    assert 0 < sizes(tmp_path / "disk" / "ringtrain-cache") <= 2e-6 * 2**30


def test_rows_in_another_order_are_another_training(tmp_path: Path) -> None:
    """The order follows from `memory_mb`, too: a resume with another one would train rows twice."""
    tar_of(tmp_path / "a.tar", {f"{row}.bin": bytes(50_000) for row in range(28)})
    records = [Records(tmp_path / "a.tar", "bin", memory_mb=size) for size in (256, 256, 2)]
    checksums = [RecordRows(one, shuffle=True).checksum() for one in records]
    assert records[0].lanes > records[2].lanes and checksums[0] == checksums[1] != checksums[2]


def test_columns_that_cannot_be_one_array(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"number": [1.0], "text": ["a"], "list": [[[1.0]]]}), tmp_path / "a")
    for columns in (["number", "text"], ["number", "list"]):
        with pytest.raises(DataError, match="cannot be one array"):
            Records(tmp_path / "a", columns)


FITS = """
import sys, keras, ringtrain
from ringtrain.data import blocks
blocks.MAX_ROWS = 7
folder, on_error = sys.argv[1:3]
for number, (shuffle, batch_size) in enumerate([(True, 16), (False, 4)]):
    rows = ringtrain.Records(folder, "x", "y", on_error=on_error)
    rows.lanes = min(rows.lanes, number + 1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    ringtrain.fit(model, rows, batch_size=batch_size, shuffle=shuffle, verbose=0, name=f"{on_error}-{number}")
    print("skipped", len(rows.unreadable.skipped))
"""


def test_fit_skips_damaged_blocks_or_ends_in_one_line(tmp_path: Path) -> None:
    """The first blocks, of which whole batches are, and those of the last, smaller batch."""
    folder = write("tfrecord", tmp_path / "rows")
    shutil.copytree(folder, tmp_path / "later")
    for path, places in (
        (folder / "part-00", (0, 8)),
        (folder / "part-40", (19,)),
        (tmp_path / "later" / "part-20", (9,)),
    ):
        content = bytearray(path.read_bytes())
        for place in places:
            content[len(content) // 20 * place + 20] ^= 255
        path.write_bytes(content)
    ends = [
        subprocess.run(
            [sys.executable, "-c", FITS, given, on_error], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for given, on_error in ((folder, "skip"), (tmp_path / "later", "fail"))
    ]
    assert ends[0].returncode == 0, ends[0].stderr[-3000:]
    assert re.findall(r"skipped (\d+)$", ends[0].stdout, re.MULTILINE) == ["20"] * 2
    assert ends[1].returncode != 0
    line = r"^ringtrain\.errors\.DataError: .*part-20: records from 7 on cannot be read: corrupted record at \d+$"
    assert len(re.findall(line, ends[1].stderr, re.MULTILINE)) == 1, ends[1].stderr[-3000:]
