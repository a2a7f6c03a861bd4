"""Images in folders and TFRecords: rows of each rank, crops, and messages about images that are broken or missing."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import batches
import numpy as np
import pictures
import pytest
import tensorflow as tf

from ringtrain import data
from ringtrain.config.sections import DataConfig
from ringtrain.data import tfrecord_files
from ringtrain.data.augment import picture
from ringtrain.errors import DataError
from ringtrain.training.rows import errors_named

pytestmark = pytest.mark.slow

SOURCES = ("image-folder", "imagenet-tfrecords")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that say which row they are, as a folder and as records in 5 shards: 47 to train, 9 to test."""
    root = tmp_path_factory.mktemp("numbered")
    pictures.write_numbered(root / "image-folder", 47, 9)
    pictures.write_records(root / "image-folder", root / "imagenet-tfrecords", 5)
    return root


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """The same for crops of photographs: 12 to train, 4 to test, in 2 shards; each test may break its own."""
    pictures.write_folder(tmp_path / "image-folder", 12, 4)
    pictures.write_records(tmp_path / "image-folder", tmp_path / "imagenet-tfrecords", 2)
    return tmp_path


def load(root: Path, name: str, **options: Any) -> data.DataSet:
    return data.source(DataConfig(**{"name": name, "dir": str(root / name), "image_size": 8, **options}))()


def numbers_in(found: list[Any]) -> list[list[int]]:
    """Numbers of the rows in each batch."""
    numbers = []
    for images, labels in found:
        numbers.append([pictures.number_of(image) for image in images])
        assert labels.numpy().tolist() == [number % 2 for number in numbers[-1]]
    return numbers


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_row_is_trained_once_and_all_ranks_train_the_batches_of_one(numbered: Path, name: str, size: int) -> None:
    train = load(numbered, name).train
    for epoch in range(2):
        ranks = [numbers_in(batches.of_rank(train, 12, rank, size, epoch=epoch)) for rank in range(size)]
        together = [[*itertools.chain(*parts)] for parts in zip(*ranks, strict=True)]
        assert together == numbers_in(batches.of_rank(train, 12, epoch=epoch))
        assert [len(batch) for batch in together] == [12, 12, 12, 11]
        assert sorted(itertools.chain(*together)) == list(range(47))


@pytest.mark.parametrize("name", SOURCES)
def test_every_test_row_is_evaluated_once(numbered: Path, name: str) -> None:
    test = load(numbered, name).test
    found = [batch for rank in range(4) for batch in data.evaluation_batches(test, test.shard(rank, 4), 2)]
    assert sorted(itertools.chain(*numbers_in(found))) == list(range(1000, 1009))


@pytest.mark.parametrize("name", SOURCES)
def test_crops_are_the_same_after_a_resume_and_others_in_other_epochs_and_seeds(photographs: Path, name: str) -> None:
    def images(augment: bool, **more: int) -> list[bytes]:
        train = load(photographs, name, augment=augment).train
        return [image.numpy().tobytes() for batch, _ in batches.of_rank(train, 5, **more) for image in batch]

    assert images(True, epoch=1)[5:] == images(True, epoch=1, first_step=1)
    assert sorted(images(True, rank=0, size=2) + images(True, rank=1, size=2)) == sorted(images(True))
    assert len({*images(True), *images(True, epoch=1), *images(True, seed=4)}) == 36
    assert len({*images(False), *images(False, epoch=1), *images(False, seed=4)}) == 12


def test_rows_with_the_same_image_have_different_crops(photographs: Path) -> None:
    paths = [*(photographs / "image-folder" / "train").rglob("*.jpg")]
    for path in paths:
        path.write_bytes(paths[0].read_bytes())
    found = batches.of_rank(load(photographs, "image-folder").train, 12)
    assert len({image.numpy().tobytes() for images, _ in found for image in images}) == 12


@pytest.mark.parametrize("encode", [tf.io.encode_jpeg, tf.io.encode_png])
def test_evaluation_has_the_center_in_normalized_colors(encode: Callable[..., tf.Tensor]) -> None:
    pixels = np.zeros((256, 300, 3), np.uint8)
    pixels[16:240, 38:262] = 124, 116, 104  # ImageNet's mean
    image = picture(encode(pixels), 224, None).numpy()
    assert image.shape == (224, 224, 3)
    assert np.abs(image[8:-8, 8:-8]).max() < 0.05
    assert np.all(picture(encode(np.full_like(pixels, 255)), 224, None).numpy() > 2)


def test_crops_are_of_the_area_and_shape_that_goyal_et_al_name() -> None:
    """Of a picture whose colors are its coordinates, the crop's corners can be read off the result."""
    rows, columns = np.mgrid[0:200, 0:200].astype(np.uint8)
    encoded = tf.io.encode_png(np.stack([rows, columns, np.zeros_like(rows)], axis=-1))
    cropped = tf.function(lambda seed: picture(encoded, 50, seed))
    areas, ratios, flipped = [], [], 0
    for number in range(300):
        image = cropped(tf.constant([0, number], tf.int64)).numpy() * [0.229, 0.224, 0.225] + [0.485, 0.456, 0.406]
        height, width = np.ptp(image[..., 0]) * 255 * 50 / 49, np.ptp(image[..., 1]) * 255 * 50 / 49
        areas.append(height * width / 200**2)
        ratios.append(width / height)
        flipped += image[0, 0, 1] > image[0, -1, 1]
    assert 0.07 < min(areas) < 0.15 and 0.85 < max(areas) < 1.02 and 0.45 < np.mean(areas) < 0.63
    assert 0.73 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.36
    assert 110 < flipped < 190


def test_shape_and_classes(numbered: Path) -> None:
    for name in SOURCES:
        data_set = load(numbered, name, image_size=0)
        assert (data_set.input_shape, data_set.num_classes) == ((224, 224, 3), 2)
        assert (len(data_set.train), len(data_set.test)) == (47, 9)
    (numbered / "imagenet-tfrecords" / "labels.txt").rename(numbered / "hidden")
    try:
        assert load(numbered, "imagenet-tfrecords").num_classes == 1000
    finally:
        (numbered / "hidden").rename(numbered / "imagenet-tfrecords" / "labels.txt")


def message_of(root: Path, name: str, **options: Any) -> str:
    """Error of an epoch on one rank, as a run prints it."""
    with pytest.raises(DataError) as error, errors_named(name):
        batches.of_rank(load(root, name, **options).train, 4)
    message = str(error.value)
    assert "\n" not in message and "{{" not in message
    return message


def starts_in(path: Path) -> list[int]:
    records = tf.data.TFRecordDataset([str(path)]).as_numpy_iterator()
    return [0, *itertools.accumulate(len(record) + tfrecord_files.HEADER + tfrecord_files.FOOTER for record in records)]


def cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size + size if size < 0 else size)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut_picture(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])


def change_record(path: Path, change: Callable[[Any], None]) -> None:
    """Changes the features of a file's fourth record."""
    records = [*tf.data.TFRecordDataset([str(path)]).as_numpy_iterator()]
    example = tf.train.Example.FromString(records[3])
    change(example.features.feature)
    records[3] = example.SerializeToString()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def other_label(path: Path) -> None:
    def change(feature: Any) -> None:
        feature["image/class/label"].int64_list.value[0] = 3

    change_record(path, change)


def no_image(path: Path) -> None:
    def change(feature: Any) -> None:
        del feature["image/encoded"]

    change_record(path, change)


PICTURE, RECORDS = "image-folder/train/flower/0004.jpg", "imagenet-tfrecords/train-00000-of-00002"
BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "text": (PICTURE, lambda path: path.write_text("404 not found"), "{path}: Unknown image file format"),
    "JPEG cut short": (PICTURE, cut_picture, "{path}: Invalid JPEG data"),
    "label": (RECORDS, other_label, "{path}: record 3: label 3, expected 1 to 2"),
    "no feature": (RECORDS, no_image, "{path}: .*Name: record 3, Feature: image/encoded"),
    "cut within a record": (RECORDS, lambda path: cut(path, -5), "{path}: record 5: the file ends within it"),
    "cut within a length": (RECORDS, lambda path: cut(path, starts_in(path)[4] + 5), "{path}: record 4: the file ends"),
    "corrupt length": (RECORDS, lambda path: flip(path, starts_in(path)[2] + 1), "{path}: record"),
    "flipped bit": (RECORDS, lambda path: flip(path, starts_in(path)[2] + 300), "{path}: records from 0 on cannot be"),
    "empty": (RECORDS, lambda path: path.write_bytes(b""), "{path}: contains no record"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(photographs: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one thread: what is broken is read again from within the pipeline, which must not wait for itself."""
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 1)
    file, spoil, message = BROKEN[case]
    path = photographs / file
    spoil(path)
    name = path.relative_to(photographs).parts[0]
    assert re.match(message.format(path=re.escape(str(path))), message_of(photographs, name))


def test_broken_test_images_are_named(photographs: Path) -> None:
    path = photographs / "image-folder" / "val" / "flower" / "0002.jpg"
    path.write_bytes(b"x")
    test = load(photographs, "image-folder").test
    with pytest.raises(DataError, match=f"{path}: Unknown image"), errors_named("images"):
        [*data.evaluation_batches(test, range(4), 4)]


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


MISSING: dict[str, tuple[str, str, Callable[[Path], Any], str]] = {
    "no folder": ("image-folder", "train", shutil.rmtree, "{path}: cannot be read: No such file or directory"),
    "no class": ("image-folder", "train/0.png", Path.touch, "{path}: is in none of the folders"),
    "no test": ("image-folder", "val", shutil.rmtree, "{root}: contains neither val nor test"),
    "no records": ("imagenet-tfrecords", "", emptied, "{root}: contains 0 files train-"),
    "missing shard": ("imagenet-tfrecords", "train-00001-of-00002", Path.unlink, "{root}: contains 1 files train-"),
    "no validation": ("imagenet-tfrecords", "validation-00000-of-00001", Path.unlink, "{root}: contains 0 files valid"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_files_are_named(photographs: Path, case: str) -> None:
    name, path, spoil, message = MISSING[case]
    spoil(photographs / name / path)
    with pytest.raises(DataError) as error:
        load(photographs, name)
    assert str(error.value).startswith(message.format(path=photographs / name / path, root=photographs / name))


def test_a_source_that_needs_a_directory_asks_for_it() -> None:
    with pytest.raises(DataError, match=r"image-folder: give its .* with --data.dir"):
        data.source(DataConfig(name="image-folder"))()


@pytest.fixture
def open_to_all(photographs: Path) -> Iterator[Path]:
    """The photographs where another user can read them; this process becomes that user if it may become anyone."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = Path(shutil.copytree(photographs, Path(name) / "data"))
        root.chmod(0o755)
        yield root


@contextlib.contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """Context of a user who may not read a file or folder."""
    user = os.geteuid()
    path.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("image-folder", "train/flower"),
        ("image-folder", "train/temple/0003.jpg"),
        ("imagenet-tfrecords", "labels.txt"),
    ],
)
def test_files_without_permission_are_named(open_to_all: Path, name: str, path: str) -> None:
    (open_to_all / name).mkdir(exist_ok=True)
    with forbidden(open_to_all / name / path):
        message = message_of(open_to_all, name)
    assert message.startswith(str(open_to_all / name / path)) and "Permission denied" in message
